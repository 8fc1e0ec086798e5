"""State of each row of the decode batch besides the caches, as arrays, so that a step handles all rows at once."""

import math
from collections.abc import Iterable

import numpy as np

from dragoman.server.engine.messages import GREEDY, Answer, SearchOptions
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide
from dragoman.server.runtime.runner import Candidates


class Rows:
    """State of rows `[0, max_rows)`.

    Attributes:
        tokens: `[max_rows]`, next input token of each row.
        positions: `[max_rows]`, its position: the number of tokens in the row's cache.
        is_plain: `[max_rows]`, whether the row is a plain greedy request's, whose answer is kept here.
    """

    def __init__(self, max_rows: int, target: TargetSide) -> None:
        self.tokens = np.zeros(max_rows, np.int64)
        self.positions = np.zeros(max_rows, np.int64)
        self.is_plain = np.zeros(max_rows, np.bool_)
        self._starts = np.zeros(max_rows, np.int64)
        self._limits = np.zeros(max_rows, np.int64)
        self._num_fed = np.zeros(max_rows, np.int64)  # length of the forced prefix, which is in the history from the start
        self._num_counted = np.zeros(max_rows, np.int64)  # part of it that counts in the score's length
        self._length_penalties = np.ones(max_rows, np.float64)
        self._forces_end = np.zeros(max_rows, np.bool_)
        self._has_log_probs = np.ones(max_rows, np.bool_)
        self._history = np.zeros((max_rows, target.max_tokens), np.int32)
        self._log_probs = np.zeros((max_rows, target.max_tokens), np.float32)
        self._target = target

    def start(
        self,
        row: int,
        max_new_tokens: int,
        decoder_start_id: int | None = None,
        search: SearchOptions = GREEDY,
        *,
        is_plain: bool,
    ) -> None:
        """Prepare a row for a new answer of at most `max_new_tokens` after the forced prefix.

        The answer of a plain row is kept here, with the options' forced prefix, end and score; a search keeps any other.
        """
        self._starts[row] = self._target.decoder_start_id if decoder_start_id is None else decoder_start_id
        self.feed(row, int(self._starts[row]), 0)
        self.is_plain[row] = is_plain
        num_fed = len(search.forced_prefix) if is_plain else 0
        self._history[row, :num_fed] = search.forced_prefix[:num_fed]
        self._num_fed[row] = num_fed
        self._num_counted[row] = search.num_forced
        self._length_penalties[row] = search.length_penalty
        self._forces_end[row] = search.is_end_forced
        self._has_log_probs[row] = search.has_log_probs
        self._limits[row] = num_fed + max_new_tokens

    def park(self, row: int) -> None:
        """Keep a row at position 0 while its source is not prefilled; its candidates are ignored."""
        self.feed(row, self._target.decoder_start_id, 0)
        self.is_plain[row] = False
        self._num_fed[row] = 0

    def feed(self, row: int, token: int, position: int) -> None:
        """Set the next input token of a row."""
        self.tokens[row] = token
        self.positions[row] = position

    def feed_all(self, hypotheses: Iterable[tuple[list[int], list[Hypothesis]]]) -> None:
        """Set the next input tokens to the last tokens of hypotheses, given with their rows in the same order."""
        fed = [(row, each.token_ids) for rows, live in hypotheses for row, each in zip(rows, live, strict=True)]
        if not fed:
            return
        where = [row for row, _ in fed]
        self.tokens[where] = [token_ids[-1] for _, token_ids in fed]
        self.positions[where] = [len(token_ids) for _, token_ids in fed]

    def feed_again(self, row: int, token_ids: list[int]) -> None:
        """Set the next input token of a row to the previous one: the last of its tokens, or the start token."""
        self.feed(row, token_ids[-1] if token_ids else int(self._starts[row]), len(token_ids))

    def move(self, source: int, target: int) -> None:
        """Copy a row's state to another row."""
        of_rows = (self.tokens, self.positions, self.is_plain, self._starts, self._limits)
        for array in (*of_rows, self._num_fed, self._num_counted, self._length_penalties, self._forces_end, self._has_log_probs):
            array[target] = array[source]
        length = int(max(self.positions[source], self._num_fed[source]))
        self._history[target, :length] = self._history[source, :length]
        self._log_probs[target, :length] = self._log_probs[source, :length]

    def take_likeliest(self, candidates: Candidates) -> list[int]:
        """Append to each row its likeliest token, or its next forced one; return the plain rows that have ended.

        The search of a row that is not plain overwrites that token before the next step.
        """
        num_rows = len(candidates.ids)
        tokens, positions = self.tokens[:num_rows], self.positions[:num_rows]
        tokens[:] = candidates.ids[:, 0]
        every = np.arange(num_rows)
        is_forced = positions < self._num_fed[:num_rows]
        np.copyto(tokens, self._history[every, positions], where=is_forced)
        has_log_probs = self._has_log_probs[:num_rows]
        if not has_log_probs.all():
            is_last = self._forces_end[:num_rows] & (positions + 1 >= self._limits[:num_rows])
            tokens[is_last & ~has_log_probs] = self._target.eos_id
        self._history[every, positions] = tokens
        self._log_probs[every, positions] = np.where(has_log_probs, candidates.log_probs[:, 0], 0)
        positions += 1
        has_ended = (tokens == self._target.eos_id) & ~is_forced | (positions >= self._limits[:num_rows])
        ended: list[int] = np.flatnonzero(has_ended & self.is_plain[:num_rows]).tolist()
        return ended

    def before_forced_end(self, num_rows: int) -> list[int]:
        """Return the plain rows in `[0, num_rows)` whose next token must be end-of-sequence, and its log-probability is wanted."""
        positions, is_eos = self.positions[:num_rows], self.tokens[:num_rows] == self._target.eos_id
        has_ended = is_eos & (positions > self._num_fed[:num_rows])
        is_before = self._forces_end[:num_rows] & (positions + 1 == self._limits[:num_rows]) & ~has_ended
        is_before &= self._has_log_probs[:num_rows]
        rows: list[int] = np.flatnonzero(is_before & self.is_plain[:num_rows]).tolist()
        return rows

    def hypothesis(self, row: int) -> Hypothesis:
        """Return the hypothesis of a plain row for a search to continue; the row is no longer plain."""
        self.is_plain[row] = False
        length = int(self.positions[row])
        log_probs: list[float] = self._log_probs[row, int(self._num_fed[row]) : length].tolist()
        return Hypothesis(self._history[row, :length].tolist(), log_probs, sum(log_probs))

    def is_eos(self, row: int) -> bool:
        """Return whether a plain row's last token was a generated, not a forced, end-of-sequence."""
        return int(self.tokens[row]) == self._target.eos_id and self.num_generated(row) > 0

    def num_generated(self, row: int) -> int:
        """Return the number of tokens generated in a plain row, with end-of-sequence, without the forced prefix."""
        return max(int(self.positions[row] - self._num_fed[row]), 0)

    def answer(self, row: int) -> Answer:
        """Return the answer that has ended in a plain row."""
        length, first, is_eos = int(self.positions[row]), int(self._num_fed[row]), self.is_eos(row)
        log_probs: list[float] = self._log_probs[row, first:length].tolist()
        token_ids: list[int] = self._history[row, : length - is_eos].tolist()
        score = sum(log_probs) / math.pow(length - first + int(self._num_counted[row]), float(self._length_penalties[row]))
        return Answer(token_ids, log_probs, score, "eos" if is_eos else "length")
