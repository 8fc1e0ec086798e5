"""Rules on the candidates of a hypothesis: excluded tokens, and tokens made more or less likely.

A search that needs the best n requests a few more than n, since rules seldom affect many. The least likely candidate shows whether
the result equals that over the whole vocabulary; otherwise more candidates are needed.
"""

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.server.engine.messages import SearchOptions
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide

# Candidates up to which a loop that stops early is faster than arrays.
MAX_LISTED = 1024
# Options up to which sorting all is faster than inserting those that moved.
MAX_SORTED = 256
# Most candidates requested beyond twice those wanted; rules could affect many more, but hardly ever do.
NUM_SPARE = 15

# A token, its log-probability by the model, and its value after the rules.
Option = tuple[int, float, float]


class Options(Struct, frozen=True, eq=False):
    """Candidates of a hypothesis after the rules, without impossible ones: best first, ties by the lower id."""

    ids: NDArray[np.int64]  # `[K']` int64
    log_probs: NDArray[np.float64]  # `[K']` float64, the model's
    values: NDArray[np.float64]  # `[K']` float64, after the rules
    is_untouched: bool = False  # whether there are no rules, so that unseen tokens keep the model's values, too
    num_lifted: int = 0  # most unseen tokens that a penalty below 1 has made more likely
    lift: float = 1.0  # factor of their log-probabilities

    def ceiling(self, smallest: float) -> float:
        """Return the largest possible value of an unseen token, given its largest log-probability."""
        return smallest * self.lift if self.num_lifted else smallest


class Constraints:
    """Rules of one request; `is_idle` if there are none."""

    def __init__(self, options: SearchOptions, target: TargetSide, max_new_tokens: int) -> None:
        self._eos_id, self._num_choices = target.eos_id, target.num_choices
        self._length_before_end = max_new_tokens - 1 if options.is_end_forced else math.inf
        self._suppressed = frozenset(options.suppressed_tokens)
        self._min_new_tokens = options.min_new_tokens
        self._ngram_size = options.no_repeat_ngram_size
        self._penalty = options.repetition_penalty
        self.is_idle = not (self._suppressed or self._min_new_tokens or self._ngram_size or self._penalty != 1)
        self._marks = np.zeros(0 if self.is_idle else target.vocab_size, np.bool_)

    def num_needed(self, hypothesis: Hypothesis, num_wanted: int) -> int:
        """Return how many candidates are likely to contain the `num_wanted` best after the rules; `certain` verifies it."""
        if self.forces_end(hypothesis):
            return min(1 + NUM_SPARE, self._num_choices)
        if self.is_idle:
            return min(num_wanted, self._num_choices)
        most = num_wanted + NUM_SPARE
        num_spoilt = len(self._suppressed)
        if hypothesis.num_generated < self._min_new_tokens:
            num_spoilt += self._eos_id not in self._suppressed
        if (self._ngram_size or self._penalty != 1) and num_spoilt < most:
            num_spoilt += len(set(hypothesis.token_ids[-most:])) if len(hypothesis.token_ids) <= most else most
        return min(num_wanted + min(num_spoilt, most), self._num_choices)

    def forces_end(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.num_generated >= self._length_before_end

    def end(self, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> Option | None:
        """Return the option of a forced end, at no cost; None if the candidates `[K]` lack end-of-sequence."""
        places = np.flatnonzero(ids == self._eos_id)
        return (self._eos_id, log_probs.item(places[0]), 0.0) if len(places) else None

    def certain(
        self, hypothesis: Hypothesis, ids: NDArray[np.int64], log_probs: NDArray[np.float32], num_wanted: int
    ) -> list[Option] | None:
        """Return the `num_wanted` best options of candidates `[K]`, or all that are left; None if an unseen one may be better."""
        found = self.best(hypothesis, ids, log_probs, num_wanted)
        if self.is_idle or len(ids) == self._num_choices:
            return found
        smallest = log_probs.item(-1)
        if smallest == -math.inf:
            return found
        if len(found) < num_wanted:
            return None
        _, log_prob, value = found[-1]
        if self._penalty < 1 and value <= smallest * self._penalty:
            num_seen = int(self._are_among(hypothesis.token_ids, ids).sum())
            if num_seen < len(set(hypothesis.token_ids)):  # an unseen one may be lifted as far
                return None
        # In a tie the lower id was seen first; but a token that was lowered may have a higher id.
        return found if value > smallest or value == smallest == log_prob else None

    def best(self, hypothesis: Hypothesis, ids: NDArray[np.int64], log_probs: NDArray[np.float32], num_wanted: int) -> list[Option]:
        """Return the first `num_wanted` options of `apply`."""
        if self.is_idle:
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
            if log_prob == -math.inf or num_unchanged == num_wanted:  # a penalty above 1 only lowers tokens
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
        if self.is_idle and raw[-1] > -np.inf:
            return Options(ids, raw, raw, is_untouched=True)
        tokens, num_lifted = hypothesis.token_ids, 0
        if self._penalty < 1 and len(ids) < self._num_choices:
            num_lifted = len(set(tokens)) - int(self._are_among(tokens, ids).sum())
        keep = raw > -np.inf
        if banned := self._banned(hypothesis):
            keep &= ~self._are_among(list(banned), ids)
        if not keep.all():
            ids, raw = ids[keep], raw[keep]
        if self._penalty == 1 or not tokens:
            return Options(ids, raw, raw, is_untouched=self.is_idle)
        have_moved = self._are_among(tokens, ids)
        values = np.where(have_moved, raw * self._penalty, raw)
        order = np.lexsort((ids, -values)) if len(ids) <= MAX_SORTED else _order(ids, values, have_moved)
        return Options(ids[order], raw[order], values[order], num_lifted=num_lifted, lift=self._penalty)

    def _are_among(self, tokens: list[int], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each id whether it is one of the tokens."""
        self._marks[tokens] = True
        are_marked = self._marks[ids]
        self._marks[tokens] = False
        return are_marked

    def _banned(self, hypothesis: Hypothesis) -> frozenset[int] | set[int]:
        if not self._ngram_size and hypothesis.num_generated >= self._min_new_tokens:
            return self._suppressed
        banned = set(self._suppressed)
        if hypothesis.num_generated < self._min_new_tokens:
            banned.add(self._eos_id)
        if self._ngram_size:
            banned |= _repeating(hypothesis.token_ids, self._ngram_size)
        return banned


def _order(ids: NDArray[np.int64], values: NDArray[np.float64], have_moved: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the order by descending value, then ascending id, of options of which only a few are out of order."""
    stayed, moved = np.flatnonzero(~have_moved), np.flatnonzero(have_moved)
    moved = moved[np.lexsort((ids[moved], -values[moved]))]
    rest = -values[stayed]
    first, last = rest.searchsorted(-values[moved]), rest.searchsorted(-values[moved], side="right")
    for i in np.flatnonzero(first < last).tolist():
        first[i] += int((ids[stayed[first[i] : last[i]]] < ids[moved[i]]).sum())
    return np.insert(stayed, first, moved)


def _rank(option: Option) -> tuple[float, int]:
    """Return a sort key: best first, ties by the lower id."""
    token, _, value = option
    return -value, token


def _repeating(tokens: list[int], size: int) -> set[int]:
    """Return the tokens that would repeat an n-gram of `size` tokens."""
    last = len(tokens) - size + 1
    if last < 0:
        return set()
    if size == 1:
        return set(tokens)
    beginning = tokens[last:]
    first, found, start = beginning[0], set[int](), 0
    while True:
        try:
            start = tokens.index(first, start, last)
        except ValueError:
            return found
        if tokens[start : start + size - 1] == beginning:
            found.add(tokens[start + size - 1])
        start += 1
