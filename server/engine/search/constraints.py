"""Rules that change what a search sees of a hypothesis's candidates: tokens ruled out, and tokens made less likely.

Each rule says beforehand how many candidates it can spoil. A search that needs the best n asks for n more than that, and what it
gets is what it would have got from the whole vocabulary.
"""

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.server.engine.messages import SearchOptions
from dragoman.server.engine.search.hypothesis import Hypothesis

MAX_LISTED = 1024
"""Candidates up to which a loop that stops early is faster than arrays."""


Option = tuple[int, float, float]
"""A token that a hypothesis may go on with, its log-probability by the model, and the value that the search goes by."""


class Options(Struct, frozen=True, eq=False):
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

    def best(self, hypothesis: Hypothesis, ids: NDArray[np.int64], log_probs: NDArray[np.float32], num_wanted: int) -> list[Option]:
        """Return the first `num_wanted` of what `apply` returns, or all if they are fewer."""
        if self._is_idle:
            ids, log_probs = ids[:num_wanted], log_probs[:num_wanted]
            if log_probs[-1] > -math.inf:
                values = log_probs.tolist()
                return list(zip(ids.tolist(), values, values, strict=True))
        elif self._penalty < 1 or len(ids) > MAX_LISTED:
            options = self.apply(hypothesis, ids, log_probs)
            parts = (part[:num_wanted].tolist() for part in (options.ids, options.log_probs, options.values))
            return list(zip(*parts, strict=True))
        banned = self._banned(hypothesis)
        lowered = hypothesis.token_ids if self._penalty > 1 else ()
        found: list[Option] = []
        num_unchanged = 0
        for token, log_prob in zip(ids.tolist(), log_probs.tolist(), strict=True):
            if log_prob == -math.inf or num_unchanged == num_wanted:  # a penalty lifts nothing over what comes before it
                break
            if token in banned:
                continue
            if token in lowered:
                found.append((token, log_prob, log_prob * self._penalty))
            else:
                found.append((token, log_prob, log_prob))
                num_unchanged += 1
        if lowered:
            found.sort(key=_rank)
        return found[:num_wanted]

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


def _rank(option: Option) -> tuple[float, int]:
    """Order options: best first, the lower id first in a tie."""
    token, _, value = option
    return -value, token


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
