"""What an engine does with a moment in which nothing runs."""

from typing import Any

import pytest

from dragoman.server.engine.messages import Request


class Graphs:
    """Counts captures."""

    def __init__(self, num_pending: int) -> None:
        self.num_pending, self.num_captured = num_pending, 0
        self.is_disabled = False
        self.error: Exception | None = None

    @property
    def has_pending(self) -> bool:
        return self.num_pending > 0

    def capture_next(self) -> None:
        self.num_pending -= 1
        if self.error is not None:
            raise self.error
        self.num_captured += 1


def test_a_step_is_captured_if_nothing_runs_or_waits(make_bench: Any) -> None:
    bench, graphs = make_bench(), Graphs(2)
    assert not bench.engine.is_unprepared, "a runner without graphs has nothing to prepare"
    bench.engine.prepare()
    bench.runner.graphs = graphs
    assert bench.engine.is_unprepared
    bench.engine.submit(b"", Request(1, [3, 1], 30, 0.0))
    bench.engine.prepare()
    assert graphs.num_captured == 0
    while bench.engine.has_work:
        bench.engine.step()
    bench.engine.prepare()
    assert graphs.num_captured == 1 and bench.engine.is_unprepared
    bench.engine.prepare()
    assert not bench.engine.is_unprepared


@pytest.mark.parametrize("error", [MemoryError("no"), RuntimeError("no")])
def test_one_that_fails_is_not_tried_again(make_bench: Any, error: Exception) -> None:
    bench, graphs = make_bench(), Graphs(1)
    bench.runner.graphs, graphs.error = graphs, error
    bench.engine.prepare()
    assert not bench.engine.is_unprepared


def test_lost_graphs_are_told(make_bench: Any) -> None:
    bench, graphs = make_bench(), Graphs(0)
    assert not bench.engine.statistics().are_graphs_disabled
    bench.runner.graphs, graphs.is_disabled = graphs, True
    assert bench.engine.statistics().are_graphs_disabled
