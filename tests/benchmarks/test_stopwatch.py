"""The runner that measures another one."""

import itertools
from typing import Any

import numpy as np

from benchmarks.harness.stopwatch import StopwatchRunner


class Calls:
    """A runner that notes how it was called."""

    device, max_rows = "cpu", 4
    graphs = None
    memory: Any = None

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def prefill(self, *arguments: Any) -> None:
        self.made.append(("prefill", *arguments))

    def step(self, *arguments: Any) -> str:
        self.made.append(("step", *arguments))
        return "candidates"

    def look(self, *arguments: Any) -> str:
        self.made.append(("look", *arguments))
        return "more candidates"

    def copy_row(self, *arguments: int) -> None:
        self.made.append(("copy_row", *arguments))

    def copy_positions(self, *arguments: int) -> None:
        self.made.append(("copy_positions", *arguments))


def test_calls_are_passed_on_and_timed_by_kind() -> None:
    inner, ticks = Calls(), itertools.count()
    runner: Any = StopwatchRunner(inner, clock=lambda: float(next(ticks)))  # type: ignore[arg-type]
    tokens, positions = np.zeros(2, np.int64), np.ones(2, np.int64)
    runner.prefill([[5, 1]], [0])
    assert runner.step(tokens, positions, 3) == "candidates"
    assert runner.look(tokens, positions, 9, 1) == "more candidates"
    runner.copy_row(0, 1, 7)
    runner.copy_positions(1, 0, 2, 5)
    assert (runner.step_seconds, runner.copy_seconds, runner.num_steps) == (2.0, 2.0, 2)
    assert [name for name, *_ in inner.made] == ["prefill", "step", "look", "copy_row", "copy_positions"]
    assert inner.made[1][1] is tokens and inner.made[1][3] == 3
    assert inner.made[3:] == [("copy_row", 0, 1, 7), ("copy_positions", 1, 0, 2, 5)]
    assert (runner.device, runner.max_rows) == ("cpu", 4)


def test_reset_begins_at_zero() -> None:
    runner: Any = StopwatchRunner(Calls())  # type: ignore[arg-type]
    runner.step(np.zeros(1, np.int64), np.zeros(1, np.int64), 1)
    runner.copy_row(0, 1, 1)
    runner.reset()
    assert (runner.step_seconds, runner.copy_seconds, runner.num_steps) == (0.0, 0.0, 0)
