"""Captured steps: captured at the start or while nothing runs, replayed bit for bit, and given up when a capture fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.model import Buckets
from dragoman.server.runtime.device.runner import DeviceRunner

START, EOS = 2, 1


class Steps:
    """A runner on a device that can fail, and the warnings that it gave."""

    def __init__(self, make: Callable[..., DeviceRunner], device: Any, **settings: Any) -> None:
        self.warnings: list[str] = []
        self.device, self.runner = device, make(warn=self.warnings.append, **({"is_ahead": False} | settings))
        self.graphs = self.runner.graphs

    def step(self, position: int = 0) -> tuple[str, bytes]:
        """Step one row; return its graph and the bits of its candidates."""
        if position == 0:
            self.runner.prefill([[5, EOS]], [0])
        found = self.runner.step(np.array([START]), np.array([position]), 1)
        return self.device.graph_ids[-1], found.ids.tobytes() + found.log_probs.tobytes()


Make = Callable[..., Steps]


@pytest.fixture
def make(make_device_runner: Callable[..., DeviceRunner], device: Any) -> Make:
    return lambda **settings: Steps(make_device_runner, device, **settings)


@pytest.fixture
def num_smallest(buckets: Buckets) -> int:
    return len(buckets.rows) * len(buckets.candidates)


def test_smallest_layouts_are_captured_at_the_start_and_others_while_nothing_runs(
    make: Make, buckets: Buckets, num_smallest: int
) -> None:
    steps = make()
    graph, plain = steps.step()
    assert graph == "-1"
    steps.runner.warm_up()
    assert steps.graphs.num_captured == num_smallest
    found = [steps.step(position) for position in range(6)]  # beyond the smallest layout, of 4 positions
    assert found[0][1] == plain
    assert [graph for graph, _ in found] == [found[0][0]] * 4 + ["-1"] * 2, "never captured in the middle of traffic"
    assert int(found[0][0]) >= 1
    while steps.graphs.has_pending:
        steps.graphs.capture_next()
        assert (steps.runner.cache.self_kv.capacity, steps.runner.cache.cross_kv.capacity) == (4, 4)
    assert steps.graphs.num_captured == num_smallest * len(buckets.targets) * len(buckets.sources)
    again = [steps.step(position) for position in range(6)]
    assert [bits for _, bits in again] == [bits for _, bits in found]
    assert len({graph for graph, _ in again}) == 2 and "-1" not in {graph for graph, _ in again}
    with steps.graphs.ignored():
        assert steps.step() == ("-1", plain)
    assert steps.step()[0] != "-1"


@pytest.mark.parametrize("has_graphs", [True, False])
def test_largest_batches_of_a_layout_come_first(make: Make, buckets: Buckets, num_smallest: int, has_graphs: bool) -> None:
    """Memory that ONNX Runtime's arena has got for small batches does not do for larger ones, and is kept all the same."""
    steps = make(has_graphs=has_graphs)
    if not has_graphs:
        steps.runner.warm_up()
        assert set(steps.device.graph_ids) <= {"-1", None} and not steps.graphs.has_pending
        assert steps.runner.plan.graphs == 0 and not steps.warnings and not steps.graphs.is_disabled
        return
    shapes = steps.graphs.at_start()
    sizes = [(shape.num_rows, shape.num_candidates) for shape in shapes]
    assert sizes[0] == (buckets.rows[-1], buckets.candidates[-1])
    layouts = [(shape.targets, shape.sources) for shape in shapes]
    for layout in set(layouts):
        of_layout = [size for size, other in zip(sizes, layouts, strict=True) if other == layout]
        assert of_layout == sorted(of_layout, reverse=True)
    steps.runner.warm_up()
    assert steps.graphs.num_captured == len(shapes) == num_smallest
    assert steps.graphs.has_pending


@pytest.mark.parametrize("is_captured", [False, True])
def test_failed_capture_gives_up_all_graphs_with_one_warning(make: Make, device: Any, is_captured: bool) -> None:
    steps = make()
    if is_captured:
        steps.runner.warm_up()
    device.capture_error = RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
    steps.graphs.capture_next()
    steps.runner.warm_up()
    assert steps.warnings == [str(device.capture_error)] and device.num_left == 1
    assert steps.graphs.is_disabled and steps.graphs.reason == steps.warnings[0] and not steps.graphs.has_pending
    assert steps.step()[0] == "-1" and len(steps.warnings) == 1


def test_failures_that_are_not_of_capturing_raise(make: Make, device: Any) -> None:
    steps = make()
    steps.runner.warm_up()
    device.capture_error = RuntimeError("CUDA failure 700: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="700"):  # of a replay
        steps.step()
    assert not steps.graphs.is_disabled


def test_shortage_of_memory_leaves_one_shape_plain_or_all_if_none_fits(make: Make, device: Any, num_smallest: int) -> None:
    """A graph takes memory beside that of its step; that it does not fit means nothing for the step."""
    steps = make()
    device.num_failures = 1
    steps.runner.capture(list(steps.graphs.at_start())[-1])
    assert not steps.warnings and not steps.graphs.is_disabled and device.num_left == 1
    device.has_one_shortage = True
    steps.runner.warm_up()
    assert steps.graphs.num_captured == num_smallest - 1 and not steps.warnings and not steps.graphs.is_disabled
    device.num_left = 0
    steps = make()
    device.capture_error = OutOfDeviceMemory("CUDA failure 2: out of memory ; expr=cudaGraphInstantiate(&graph_exec);")
    steps.runner.warm_up()
    assert steps.graphs.is_disabled and device.num_left == num_smallest
    assert steps.warnings == [str(device.capture_error)]
    num_runs, max_rows = device.num_runs, steps.runner.max_rows
    steps.runner.prefill([[5, EOS]] * max_rows, range(max_rows))
    steps.runner.step(np.full(max_rows, START), np.zeros(max_rows, np.int64), 1)
    assert device.num_runs == num_runs + 2 and device.graph_ids[-1] == "-1", "all rows at once"


def test_graph_that_cannot_be_captured_is_loaded_to_run_plainly(make: Make, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, bool]] = []
    open_session = device.open_session

    def refuse(path: Path, *, max_arena_bytes: int, is_captured: bool) -> Any:
        opened.append((path.stem, is_captured))
        if is_captured:
            raise DeviceError("all the graph nodes have not been partitioned to the CUDA EP")
        return open_session(path, max_arena_bytes=max_arena_bytes, is_captured=False)

    monkeypatch.setattr(device, "open_session", refuse)
    steps = make()
    assert opened == [("encoder", False), ("decoder", True), ("decoder", False)]
    assert len(steps.warnings) == 1 and "partitioned" in steps.warnings[0]
    steps.runner.warm_up()
    assert set(device.graph_ids) <= {"-1", None}
