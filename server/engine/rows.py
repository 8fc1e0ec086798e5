"""What the engine keeps of each row of the decode batch beside the caches: arrays, so that a step handles all rows at once."""

import numpy as np

from dragoman.server.engine.messages import Answer
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.target import TargetSide


class Rows:
    """State of rows `[0, max_rows)`.

    Attributes:
        tokens: `[max_rows]`, the token each row is fed next.
        positions: `[max_rows]`, its position: how many tokens the row's cache holds.
        is_plain: `[max_rows]`, whether the row is a plain greedy request's, whose answer is kept here.
    """

    def __init__(self, max_rows: int, target: TargetSide) -> None:
        self.tokens = np.zeros(max_rows, np.int64)
        self.positions = np.zeros(max_rows, np.int64)
        self.is_plain = np.zeros(max_rows, np.bool_)
        self._starts = np.zeros(max_rows, np.int64)
        self._limits = np.zeros(max_rows, np.int64)
        self._history = np.zeros((max_rows, target.max_tokens), np.int32)
        self._log_probs = np.zeros((max_rows, target.max_tokens), np.float32)
        self._target = target

    def start(self, row: int, max_new_tokens: int, decoder_start_id: int | None = None, *, is_plain: bool) -> None:
        """Make a row ready for a new answer, which starts with the model's start token unless there is another."""
        self._starts[row] = self._target.decoder_start_id if decoder_start_id is None else decoder_start_id
        self.feed(row, int(self._starts[row]), 0)
        self.is_plain[row] = is_plain
        self._limits[row] = max_new_tokens

    def feed(self, row: int, token: int, position: int) -> None:
        """Say what a row is fed next."""
        self.tokens[row] = token
        self.positions[row] = position

    def feed_again(self, row: int, token_ids: list[int]) -> None:
        """Say that a row is fed what it was fed last: the last of the tokens that it has, or the start token."""
        self.feed(row, token_ids[-1] if token_ids else int(self._starts[row]), len(token_ids))

    def move(self, source: int, target: int) -> None:
        """Take over what is kept of another row."""
        for array in (self.tokens, self.positions, self.is_plain, self._starts, self._limits):
            array[target] = array[source]
        length = int(self.positions[source])
        self._history[target, :length] = self._history[source, :length]
        self._log_probs[target, :length] = self._log_probs[source, :length]

    def take_likeliest(self, candidates: Candidates) -> list[int]:
        """Let every row go on with its likeliest token; return the plain ones that have ended.

        Rows that are not plain are fed something else by their search before the next step.
        """
        num_rows = len(candidates.ids)
        tokens, positions = self.tokens[:num_rows], self.positions[:num_rows]
        tokens[:] = candidates.ids[:, 0]
        every = np.arange(num_rows)
        self._history[every, positions] = tokens
        self._log_probs[every, positions] = candidates.log_probs[:, 0]
        positions += 1
        has_ended = (tokens == self._target.eos_id) | (positions >= self._limits[:num_rows])
        ended: list[int] = np.flatnonzero(has_ended & self.is_plain[:num_rows]).tolist()
        return ended

    def is_eos(self, row: int) -> bool:
        """Tell whether a plain row's last token ended its answer."""
        return int(self.tokens[row]) == self._target.eos_id

    def answer(self, row: int) -> Answer:
        """Return the answer that has ended in a plain row."""
        length, is_eos = int(self.positions[row]), self.is_eos(row)
        log_probs: list[float] = self._log_probs[row, :length].tolist()
        token_ids: list[int] = self._history[row, : length - is_eos].tolist()
        return Answer(token_ids, log_probs, sum(log_probs) / length, "eos" if is_eos else "length")
