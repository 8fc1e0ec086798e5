"""What export must prove of the scorer: its log-probabilities and attention weights are the eager model's, padded or not.

How the graph is run is not here: see `verify`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dragoman.export.parity import Floats, Ints, ParityError
from dragoman.model.attention import split_heads
from dragoman.model.transformer import FullAttention, Transformer


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and a target, end-of-sequence included in both."""

    source: list[int]
    target: list[int]


class Scorer(Protocol):
    """The scorer's graph, ready to run."""

    def score(self, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
        """Score one right-padded batch → log-probabilities of the targets' tokens `[B, T]`, attention `[B, L, T, S]`."""
        ...


class ScorerComparison:
    """Compares scored pairs with eager full-sequence passes, one for each pair, and remembers the extremes."""

    def __init__(self, model: Transformer, tolerance: float) -> None:
        """Compare with a model in evaluation mode."""
        self.model = model
        self.tolerance = tolerance
        self.max_log_prob_difference = 0.0
        self.max_attention_difference = 0.0
        self._expected: dict[int, tuple[Pair, Floats, Floats]] = {}  # a pair is kept, so that its id is not given away

    def compare(self, pair: Pair, log_probs: Floats, attention: Floats) -> None:
        """Compare one pair's results, `[T']` and `[L, T', S']` with padding.

        Raises:
            ParityError: If a log-probability or a weight is off, or padding gets attention.
        """
        if id(pair) not in self._expected:
            self._expected[id(pair)] = pair, *eager_scores(self.model, pair)
        _, expected_log_probs, expected_attention = self._expected[id(pair)]
        num_source, num_target = len(pair.source), len(pair.target)
        found = attention[:, :num_target, :num_source]
        log_prob_difference = float(np.abs(log_probs[:num_target] - expected_log_probs).max())
        attention_difference = float(np.abs(found - expected_attention).max())
        where = f"of a pair with {num_source} source and {num_target} target tokens; the tolerance is {self.tolerance:.3g}"
        if not log_prob_difference <= self.tolerance:  # also refuses NaN
            raise ParityError(f"the scorer's log-probabilities are off by {log_prob_difference:.3g} {where}")
        if not attention_difference <= self.tolerance:
            raise ParityError(f"the scorer's attention weights are off by {attention_difference:.3g} {where}")
        if attention[:, :num_target, num_source:].any():
            raise ParityError("the scorer attends to padding")
        self.max_log_prob_difference = max(self.max_log_prob_difference, log_prob_difference)
        self.max_attention_difference = max(self.max_attention_difference, attention_difference)


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


def _batches(pairs: Sequence[Pair], max_rows: int) -> list[list[Pair]]:
    """Put pairs of different lengths together, but the longest by itself: to it, all others would be padding."""
    order = sorted(pairs, key=lambda pair: len(pair.source) * len(pair.target))
    rest = order[:-1]
    return [rest[start : start + max_rows] for start in range(0, len(rest), max_rows)] + [order[-1:]]


@torch.inference_mode()
def eager_scores(model: Transformer, pair: Pair) -> tuple[Floats, Floats]:
    """Score one pair in PyTorch → `[T]` and `[L, T, S]`."""
    config = model.config
    memory, mask = model.encode(torch.tensor([pair.source]), torch.tensor([len(pair.source)]))
    backend = _Observer(config.num_heads, mask, model.decoder.project_memory(memory))
    inputs = torch.tensor([[config.decoder_start_id, *pair.target[:-1]]])
    hidden = model.decoder(inputs, torch.arange(inputs.shape[1]), backend)
    log_probs = model.decoder.next_token_logits(hidden)[0].log_softmax(-1)
    return log_probs[range(len(pair.target)), pair.target].numpy(), torch.stack(backend.weights).numpy()


class _Observer(FullAttention):
    """The eager backend, which also works out the weights that PyTorch's fused attention keeps to itself: `[T, S]` a layer."""

    def __init__(self, num_heads: int, source_mask: Tensor, cross_kv: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(num_heads, source_mask, cross_kv)
        self.weights: list[Tensor] = []

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert self.cross_kv is not None
        queries, keys = split_heads(query, self.num_heads), split_heads(self.cross_kv[layer][0], self.num_heads)
        scores = torch.einsum("bhtd,bhsd->bhts", queries, keys) / queries.shape[-1] ** 0.5
        self.weights.append(scores.softmax(-1)[0].mean(0))
        return super().cross_attention(layer, query)


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Ints, Ints]:
    """Stack rows of different lengths into `[B, longest]`, filled up on the right; return them with their lengths `[B]`."""
    lengths = np.array([len(row) for row in rows], np.int64)
    table = np.full((len(rows), lengths.max()), pad_id, np.int64)
    for ids, row in zip(table, rows, strict=True):
        ids[: len(row)] = row
    return table, lengths
