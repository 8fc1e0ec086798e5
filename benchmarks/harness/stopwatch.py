"""A runner that measures the one it stands for."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.runtime.runner import Runner


class StopwatchRunner:
    """See `runner.Runner`.

    Attributes:
        step_seconds: Time in `step` and `look` since the last `reset`.
        copy_seconds: Time in copies of rows and positions since then.
        num_steps: Calls of both since then.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.max_rows = runner.device, runner.max_rows
        self.holder = self.reader = None  # whatever is encoded goes through here
        self.graphs, self.memory = runner.graphs, runner.memory
        self._runner, self._clock = runner, clock
        self.reset()

    def reset(self) -> None:
        """Begin at zero."""
        self.step_seconds = self.copy_seconds = 0.0
        self.num_steps = 0

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """See `Runner`; not measured."""
        self._runner.prefill(sources, rows)

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """See `Runner`."""
        started = self._clock()
        candidates = self._runner.step(tokens, positions, num_candidates)
        self.step_seconds += self._clock() - started
        self.num_steps += 1
        return candidates

    def look(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """See `Runner`."""
        started = self._clock()
        candidates = self._runner.look(tokens, positions, num_candidates, first_row)
        self.step_seconds += self._clock() - started
        self.num_steps += 1
        return candidates

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See `Runner`."""
        started = self._clock()
        self._runner.copy_row(source, target, length)
        self.copy_seconds += self._clock() - started

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """See `Runner`."""
        started = self._clock()
        self._runner.copy_positions(source, target, start, stop)
        self.copy_seconds += self._clock() - started

    def cache_bytes(self) -> tuple[int, int]:
        """See `Runner`."""
        return self._runner.cache_bytes()
