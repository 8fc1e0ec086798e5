"""Comparisons with eager PyTorch: candidates of decode steps, greedy answers, and the scorer's results."""

from collections.abc import Sequence

import numpy as np
import torch

from dragoman.export.proof.batching import drive
from dragoman.export.proof.cases import EagerReference, Pair, Row, greedy_rows
from dragoman.export.proof.eager import EagerPass, Floats, Ints, product_positions
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.sessions import OnnxRunner
from dragoman.model.decode import pad
from dragoman.model.networks.network import Network

NUM_GREEDY_SLOTS, MAX_NEW_TOKENS = 32, 32


class Comparison:
    """Comparison of decode steps with the eager model, and the largest differences.

    Steps with all V candidates are compared over the whole vocabulary. Those with fewer are compared over these, and no other token
    may be likelier than the last of them by more than the tolerance.
    """

    def __init__(self, reference: EagerReference, tolerance: float) -> None:
        """Compare with the eager model."""
        self.reference = reference
        self.pad_id = reference.model.config.pad_id
        self.is_padding_predicted = reference.model.config.padding == "predicted"
        self.tolerance = tolerance
        self.largest_allowed = tolerance
        self.max_difference = 0.0
        self.max_batch_rows = 0
        self.max_position = 0
        self.num_positions = 0

    def observe(self, rows: list[Row], ids: Ints, log_probs: Floats) -> None:
        """Compare one step's candidates.

        Raises:
            ParityError: If a log-probability is off, the order is wrong, or padding is a candidate of a model that predicts none.
        """
        expected = self.reference.log_probs(rows)
        found = np.full_like(expected, np.nan)
        np.put_along_axis(found, ids, log_probs, 1)
        if not self.is_padding_predicted:
            refuse_padding(found, self.pad_id)
        differences = self._differences(found, expected, log_probs)
        for i, row in enumerate(rows):
            if not differences[i] <= self.tolerance:  # also refuses NaN
                differences[i] = self._judge(row, found[i : i + 1], log_probs[i : i + 1], float(differences[i]))
        if not is_ordered(ids, log_probs):
            raise ParityError("candidates are not in order of log-probability, the lower id first where they are equal")
        self.max_difference = max(self.max_difference, float(differences.max()))
        self.max_batch_rows = max(self.max_batch_rows, len(rows))
        self.max_position = max(self.max_position, *(row.position for row in rows))
        self.num_positions += len(rows)

    def _differences(self, found: Floats, expected: Floats, log_probs: Floats) -> Floats:
        """Return the largest difference of each row's candidates, `[n]`; NaN where a candidate is missing."""
        num_candidates, vocab_size = log_probs.shape[1], found.shape[1]
        if not self.is_padding_predicted:
            found, expected = (np.delete(table, self.pad_id, 1) for table in (found, expected))
        is_absent = np.isnan(found)
        differences = np.abs(found - expected)
        if num_candidates < vocab_size:
            beyond = np.maximum(expected - log_probs[:, -1:], 0)
            differences = np.where(is_absent, beyond, differences)
            differences[is_absent.sum(1) != found.shape[1] - num_candidates] = np.nan
        largest: Floats = differences.max(1)
        return largest

    def _judge(self, row: Row, found: Floats, log_probs: Floats, difference: float) -> float:
        """Compare one row's candidates, `[1, V]` and `[1, K]`, with double precision."""
        allowed, double = self.tolerance, self.reference.double
        if difference < np.inf:
            whole = self.reference.of_row(row)
            allowed = max(self.tolerance, self.reference.allowance(whole).log_prob)
            precise = double.of(whole).log_probs(row.position, row.position + 1)
            difference = float(self._differences(found, precise, log_probs)[0])
            self.largest_allowed = max(self.largest_allowed, allowed)
        if not difference <= allowed:
            raise ParityError(
                f"log-probabilities are off by {difference:.3g} at position {row.position} of a row with {len(row.source)} "
                f"source tokens; the tolerance is {allowed:.3g}"
            )
        return difference


def refuse_padding(found: Floats, pad_id: int) -> None:
    """Refuse padding with a log-probability above -inf in `[n, V]`, for models that never predict it.

    Raises:
        ParityError: If there is one.
    """
    of_padding = found[:, pad_id]
    if not np.isneginf(of_padding[~np.isnan(of_padding)]).all():
        raise ParityError("padding has a log-probability above -inf")


def is_ordered(ids: Ints, log_probs: Floats) -> bool:
    """Return whether candidates `[n, K]` fall in log-probability, and equal ones rise in id."""
    is_lower = log_probs[:, 1:] < log_probs[:, :-1]
    is_tie = (log_probs[:, 1:] == log_probs[:, :-1]) & (ids[:, 1:] > ids[:, :-1])
    return bool((is_lower | is_tie).all())


def check_greedy(runner: OnnxRunner, reference: EagerReference, sources: list[list[int]], tolerance: float) -> tuple[int, int]:
    """Decode greedily with the graphs and check every token; return the number of tokens, and of sources that differ at a tie.

    One pass of the eager model over each answer gives its choice at every position after the same beginning; where all choices are
    the same, so is the answer.

    Raises:
        ParityError: If a choice differs elsewhere.
    """
    rows = greedy_rows(reference.model, sources, MAX_NEW_TOKENS)
    drive(runner, rows, NUM_GREEDY_SLOTS, 1, False)
    order = sorted(rows, key=lambda row: (len(row.inputs), len(row.source)))
    num_mismatches = 0
    for start in range(0, len(order), NUM_GREEDY_SLOTS):
        num_mismatches += _count_parted(order[start : start + NUM_GREEDY_SLOTS], reference, tolerance)
    return sum(row.position for row in rows), num_mismatches


@torch.inference_mode()
def _count_parted(rows: Sequence[Row], reference: EagerReference, tolerance: float) -> int:
    """Count the rows with a token that is not eager's choice, which only a tie within the tolerance excuses."""
    model = reference.model
    sources = pad([row.source for row in rows], model.config.pad_id)
    inputs = pad([row.inputs[:-1] for row in rows], model.config.pad_id)
    lengths = torch.tensor([len(row.source) for row in rows])
    answers = [torch.tensor(row.inputs[1:]) for row in rows]
    hidden = model.decode(inputs, *model.encode(sources, lengths))
    found = torch.cat(answers)
    expected, margins = _choices(model, torch.cat([states[: len(ids)] for states, ids in zip(hidden, answers, strict=True)]), found)
    places = [(row, step) for row, ids in zip(rows, answers, strict=True) for step in range(len(ids))]
    parted = (expected != found).nonzero()[:, 0].tolist()
    for place in parted:
        row, step = places[place]
        margin, allowed = float(margins[place]), tolerance
        if not margin < allowed:
            margin, allowed = _in_double(reference, row, step, tolerance)
        if not margin < allowed:  # also refuses NaN
            raise ParityError(
                f"greedy decoding gives token {found[place]} instead of {expected[place]} at step {step} of a source with "
                f"{len(row.source)} tokens, which differ by {margin:.3g} in log-probability; the tolerance is {allowed:.3g}"
            )
    return len({id(places[place][0]) for place in parted})


def _in_double(reference: EagerReference, row: Row, step: int, tolerance: float) -> tuple[float, float]:
    """Return a token's distance from the best in double precision, and the distance allowed: both log-probabilities may be off."""
    whole = reference.whole(row.source, row.inputs[1:], row.inputs[0])
    margin = reference.double.margin(whole, step, row.inputs[step + 1])
    return margin, max(tolerance, 2 * reference.allowance(whole).log_prob)


def _choices(model: Network, hidden: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's choices after hidden states `[n, d_model]`, and the distance of each token found from them, `[n]` each."""
    choices, margins = [], []
    num_positions = product_positions(model.config.target_vocab_size)
    for start in range(0, len(found), num_positions):
        part = slice(start, start + num_positions)
        log_probs = model.decoder.log_probs(hidden[part])
        best, expected = log_probs.max(-1)
        choices.append(expected)
        margins.append(best - log_probs.gather(1, found[part, None])[:, 0])
    return torch.cat(choices), torch.cat(margins)


class ScorerComparison:
    """Comparison of scored pairs with eager full-sequence passes, and the largest differences."""

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


def check_scorer(scorer: OnnxRunner, pairs: Sequence[Pair], comparison: ScorerComparison, max_rows: int, num_alone: int) -> None:
    """Score pairs in batches, and some of them alone, twice: the server scores pairs alone.

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


def _batches(pairs: Sequence[Pair], max_rows: int) -> list[list[Pair]]:
    """Batch pairs of different lengths; the longest by itself, since padding would be most of its batch."""
    order = sorted(pairs, key=lambda pair: len(pair.source) * len(pair.target))
    rest = order[:-1]
    return [rest[start : start + max_rows] for start in range(0, len(rest), max_rows)] + [order[-1:]]
