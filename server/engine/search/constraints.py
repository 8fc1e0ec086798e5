"""Rules that change what a search sees of a hypothesis's candidates: tokens ruled out, and tokens made less likely.

Each rule says beforehand how many candidates it can spoil. A search that needs the best n asks for n more than that, and what it
gets is what it would have got from the whole vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.engine.messages import SearchOptions
from server.engine.search.hypothesis import Hypothesis


@dataclass(frozen=True, slots=True)
class Options:
    """A hypothesis's candidates after the rules, best first, the lower id first in a tie; those with no probability are gone.

    Attributes:
        ids: `[K']` int64.
        log_probs: `[K']` float64, the model's.
        values: `[K']` float64, what the search goes by.
        is_untouched: Whether there are no rules, so that the candidates not seen have the model's values too.
    """

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    values: NDArray[np.float64]
    is_untouched: bool = False


class Constraints:
    """The rules of one request."""

    def __init__(self, options: SearchOptions, eos_id: int, vocab_size: int) -> None:
        self._eos_id, self._vocab_size = eos_id, vocab_size
        self._suppressed = frozenset(options.suppressed_tokens)
        self._min_new_tokens = options.min_new_tokens
        self._ngram_size = options.no_repeat_ngram_size
        self._penalty = options.repetition_penalty
        self._is_idle = not (self._suppressed or self._min_new_tokens or self._ngram_size or self._penalty != 1)
        self._marks = np.zeros(0 if self._is_idle else vocab_size, np.bool_)

    def num_needed(self, hypothesis: Hypothesis, num_wanted: int) -> int:
        """Return how many of the model's candidates hold the `num_wanted` best after the rules.

        A penalty above 1 can only push tokens down, and only those the hypothesis has; one below 1 can lift a token from anywhere.
        """
        if self._is_idle:
            return min(num_wanted, self._vocab_size)
        if self._penalty < 1:
            return self._vocab_size
        num_lowered = len(set(hypothesis.token_ids)) if self._penalty > 1 else 0
        return min(num_wanted + len(self._banned(hypothesis)) + num_lowered, self._vocab_size)

    def apply(self, hypothesis: Hypothesis, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> Options:
        """Apply the rules to a hypothesis's candidates, `[K]` each, likeliest first."""
        raw = log_probs.astype(np.float64)
        if self._is_idle and raw[-1] > -np.inf:
            return Options(ids, raw, raw, is_untouched=True)
        keep = raw > -np.inf
        if banned := self._banned(hypothesis):
            keep &= ~self._are_among(list(banned), ids)
        if not keep.all():
            ids, raw = ids[keep], raw[keep]
        if self._penalty == 1 or not hypothesis.token_ids:
            return Options(ids, raw, raw, is_untouched=self._is_idle)
        values = np.where(self._are_among(hypothesis.token_ids, ids), raw * self._penalty, raw)
        order = np.lexsort((ids, -values))
        return Options(ids[order], raw[order], values[order])

    def _are_among(self, tokens: list[int], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell of each id whether it is one of the tokens, by marking those in an array over the vocabulary for a moment."""
        self._marks[tokens] = True
        are_marked = self._marks[ids]
        self._marks[tokens] = False
        return are_marked

    def _banned(self, hypothesis: Hypothesis) -> frozenset[int] | set[int]:
        """Return the tokens that may not come next."""
        if not self._ngram_size and hypothesis.num_generated >= self._min_new_tokens:
            return self._suppressed
        banned = set(self._suppressed)
        if hypothesis.num_generated < self._min_new_tokens:
            banned.add(self._eos_id)
        if self._ngram_size:
            banned |= _repeating(hypothesis.token_ids, self._ngram_size)
        return banned


def _repeating(tokens: list[int], size: int) -> set[int]:
    """Return the tokens that would make the last `size` tokens a sequence that occurred before."""
    last = len(tokens) - size + 1
    if last < 0:
        return set()
    if size == 1:
        return set(tokens)
    beginning = tokens[last:]
    first = beginning[0]
    return {tokens[i + size - 1] for i in range(last) if tokens[i] == first and tokens[i : i + size - 1] == beginning}
