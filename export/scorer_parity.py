"""What export must prove of the scorer: its log-probabilities and attention weights are the eager model's, padded or not.

How the graph is run is not here: see `verify`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dragoman.export.eager_pass import EagerPass
from dragoman.export.parity import EagerReference, Floats, Ints, ParityError
from dragoman.export.row import Row


@dataclass(frozen=True, slots=True)
class Pair:
    """A source as the model encodes it, a target with end-of-sequence, and what the decoder is fed first; None for the model's."""

    source: list[int]
    target: list[int]
    decoder_start_id: int | None = None


class Scorer(Protocol):
    """The scorer's graph, ready to run."""

    def score(self, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
        """Score one right-padded batch → log-probabilities of targets' tokens `[B, T]`, attention `[B, L, T, S]`; L may be 0."""
        ...


class ScorerComparison:
    """Compares scored pairs with eager full-sequence passes, one for each pair, and remembers the extremes."""

    def __init__(self, reference: EagerReference, tolerance: float) -> None:
        """Compare with the eager model."""
        self.reference = reference
        self.tolerance = tolerance
        self.largest_allowed = tolerance
        self.max_log_prob_difference = 0.0
        self.max_attention_difference = 0.0

    def compare(self, pair: Pair, log_probs: Floats, attention: Floats) -> None:
        """Compare one pair's results, `[T']` and `[L, T', S']` with padding.

        Raises:
            ParityError: If a log-probability or a weight is off, or padding gets attention.
        """
        whole = self.reference.whole(pair.source, pair.target, pair.decoder_start_id)
        num_source, num_target = len(pair.source), len(pair.target)
        found = log_probs[:num_target], attention[:, :num_target, :num_source]
        differences = _differences(found, whole)
        allowed: tuple[float, ...] = self.tolerance, self.tolerance
        double = self.reference.double
        if self.tolerance < max(differences) < np.inf:
            differences = _differences(found, double.of(whole))
            allowed = tuple(max(self.tolerance, allowance) for allowance in self.reference.allowance(whole))
            self.largest_allowed = max(self.largest_allowed, *allowed)
        for name, difference, limit in zip(("log-probabilities", "attention weights"), differences, allowed, strict=True):
            if not difference <= limit:  # also refuses NaN
                raise ParityError(
                    f"the scorer's {name} are off by {difference:.3g} of a pair with {num_source} source and {num_target} target "
                    f"tokens; the tolerance is {limit:.3g}"
                )
        if attention[:, :num_target, num_source:].any():
            raise ParityError("the scorer attends to padding")
        self.max_log_prob_difference = max(self.max_log_prob_difference, differences[0])
        self.max_attention_difference = max(self.max_attention_difference, differences[1])


def _differences(found: tuple[Floats, Floats], whole: EagerPass) -> tuple[float, float]:
    """Return the largest difference of a token's log-probability and of an attention weight."""
    log_probs, attention = found
    return float(np.abs(log_probs - whole.target_log_probs()).max()), float(np.abs(attention - whole.attention).max(initial=0))


def check_scorer(scorer: Scorer, pairs: Sequence[Pair], comparison: ScorerComparison, max_rows: int, num_alone: int) -> None:
    """Score pairs in batches, and some of them alone and once more: the server scores them alone.

    Raises:
        ParityError: If results are off, or the second time has other bits than the first.
    """
    for batch in _batches(pairs, max_rows):
        for pair, *results in zip(batch, *scorer.score(batch), strict=True):
            comparison.compare(pair, *results)
    alone = [scorer.score([pair]) for pair in pairs[:num_alone]]
    for pair, first in zip(pairs, alone, strict=False):
        comparison.compare(pair, first[0][0], first[1][0])
        if any(a.tobytes() != b.tobytes() for a, b in zip(first, scorer.score([pair]), strict=True)):
            raise ParityError("the scorer does not give the same bits twice")


def pair_of(row: Row, eos_id: int) -> Pair:
    """Return a row as a pair to score, whose target ends with end-of-sequence."""
    return Pair(row.source, [*row.inputs[1:], eos_id], row.inputs[0])


def _batches(pairs: Sequence[Pair], max_rows: int) -> list[list[Pair]]:
    """Put pairs of different lengths together, but the longest by itself: to it, all others would be padding."""
    order = sorted(pairs, key=lambda pair: len(pair.source) * len(pair.target))
    rest = order[:-1]
    return [rest[start : start + max_rows] for start in range(0, len(rest), max_rows)] + [order[-1:]]


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Ints, Ints]:
    """Stack rows of different lengths into `[B, longest]`, filled up on the right; return them with their lengths `[B]`."""
    lengths = np.array([len(row) for row in rows], np.int64)
    table = np.full((len(rows), lengths.max()), pad_id, np.int64)
    for ids, row in zip(table, rows, strict=True):
        ids[: len(row)] = row
    return table, lengths
