"""Which steps are replayed: none that was not captured in a quiet moment, and none at all once a capture has failed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.server.runtime.device.buckets import Buckets
from dragoman.server.runtime.device.cuda import CudaDevice
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.runner import DeviceRunner

Make = Callable[..., DeviceRunner]
START, EOS = 2, 1


def step(runner: DeviceRunner, position: int = 0, num_candidates: int = 1) -> Any:
    found = runner.step(np.array([START]), np.array([position]), num_candidates)
    return found.ids.copy(), found.log_probs.copy()


def test_steps_are_plain_until_they_have_been_captured(make_device_runner: Make, device: Any) -> None:
    runner = make_device_runner(is_ahead=False)
    runner.prefill([[5, EOS]], [0])
    plain = step(runner)
    assert device.graph_ids[-1] == "-1"
    runner.warm_up()
    runner.prefill([[5, EOS]], [0])
    replayed = step(runner)
    assert int(device.graph_ids[-1]) >= 1
    for one, other in zip(plain, replayed, strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_smallest_layouts_are_captured_at_the_start_and_others_while_nothing_runs(
    make_device_runner: Make, device: Any, buckets: Buckets
) -> None:
    runner = make_device_runner(is_ahead=False)
    runner.warm_up()
    num_smallest = len(buckets.rows) * len(buckets.candidates)
    assert runner.graphs.num_captured == num_smallest
    runner.prefill([[5, EOS]], [0])
    for position in range(6):  # beyond the smallest layout, of 4 positions
        step(runner, position)
    assert device.graph_ids[-6:][:4] == [device.graph_ids[-6]] * 4 and int(device.graph_ids[-6]) >= 1
    assert device.graph_ids[-2:] == ["-1", "-1"], "never captured in the middle of traffic"
    while runner.graphs.has_pending:
        runner.graphs.capture_next()
        assert (runner.cache.self_kv.capacity, runner.cache.cross_kv.capacity) == (4, 4)
    layouts = len(buckets.targets) * len(buckets.sources)
    assert runner.graphs.num_captured == num_smallest * layouts
    runner.prefill([[5, EOS]], [0])
    for position in range(6):
        step(runner, position)
    ids = [int(graph) for graph in device.graph_ids[-6:]]
    assert min(ids) >= 1 and len(set(ids)) == 2


@pytest.mark.parametrize("capture", ["idle", "start"])
def test_of_a_layout_the_largest_batches_come_first(make_device_runner: Make, buckets: Buckets, capture: str) -> None:
    """What ONNX Runtime's arena has got for small ones does not do for larger ones, and is kept all the same."""
    shapes = make_device_runner(capture=capture).graphs.at_start()
    sizes = [(shape.num_rows, shape.num_candidates) for shape in shapes]
    assert sizes[0] == (buckets.rows[-1], buckets.candidates[-1])
    layouts = [(shape.targets, shape.sources) for shape in shapes]
    for layout in set(layouts):
        of_layout = [size for size, other in zip(sizes, layouts, strict=True) if other == layout]
        assert of_layout == sorted(of_layout, reverse=True)


def test_all_layouts_are_captured_before_the_model_is_ready_if_asked_for(make_device_runner: Make, buckets: Buckets) -> None:
    runner = make_device_runner(capture="start")
    runner.warm_up()
    sizes = (buckets.rows, buckets.candidates, buckets.targets, buckets.sources)
    assert runner.graphs.num_captured == np.prod([len(size) for size in sizes]) and not runner.graphs.has_pending


def test_nothing_is_captured_where_that_is_off(make_device_runner: Make, device: Any) -> None:
    warnings: list[str] = []
    runner = make_device_runner(capture="never", warn=warnings.append)
    runner.warm_up()
    assert set(device.graph_ids) <= {"-1", None} and not runner.graphs.has_pending
    assert runner.plan.graphs == 0 and not warnings and not runner.graphs.is_disabled


def test_a_failed_capture_leaves_plain_steps_and_one_warning(make_device_runner: Make, device: Any) -> None:
    warnings: list[str] = []
    runner = make_device_runner(warn=warnings.append, is_ahead=False)
    device.capture_error = RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
    runner.warm_up()
    assert warnings == [str(device.capture_error)] and device.num_left == 1
    assert runner.graphs.is_disabled and runner.graphs.reason == warnings[0] and not runner.graphs.has_pending
    runner.prefill([[5, EOS]], [0])
    step(runner)
    assert device.graph_ids[-1] == "-1" and len(warnings) == 1


def test_what_was_captured_is_given_up_too(make_device_runner: Make, device: Any) -> None:
    runner = make_device_runner(is_ahead=False)
    runner.warm_up()
    device.capture_error = RuntimeError("no")
    runner.graphs.capture_next()
    device.capture_error = None
    runner.prefill([[5, EOS]], [0])
    step(runner)
    assert device.graph_ids[-1] == "-1" and runner.graphs.is_disabled


def test_replays_can_be_left_out_for_a_while(make_device_runner: Make, device: Any) -> None:
    runner = make_device_runner(is_ahead=False)
    runner.warm_up()
    runner.prefill([[5, EOS]], [0])
    num_captured = runner.graphs.num_captured
    with runner.graphs.ignored():
        step(runner)
        assert device.graph_ids[-1] == "-1"
    step(runner)
    assert int(device.graph_ids[-1]) >= 1 and runner.graphs.num_captured == num_captured


def test_a_replay_that_fails_is_no_matter_of_capturing(make_device_runner: Make, device: Any) -> None:
    runner = make_device_runner(is_ahead=False)
    runner.warm_up()
    runner.prefill([[5, EOS]], [0])
    device.capture_error = RuntimeError("CUDA failure 700: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="700"):
        step(runner)
    assert not runner.graphs.is_disabled


def test_a_step_that_fails_plainly_too_raises(make_device_runner: Make, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_device_runner()

    def run(*_: Any) -> None:
        raise RuntimeError("INVALID_ARGUMENT")

    monkeypatch.setattr(device, "run", run)
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
        runner.graphs.capture_next()


def test_a_shortage_while_capturing_makes_steps_smaller_and_graphs_stay(make_device_runner: Make, device: Any) -> None:
    warnings: list[str] = []
    runner = make_device_runner(warn=warnings.append)
    runner.prefill([[EOS]], [0])
    device.num_failures = 1
    runner.capture(list(runner.graphs.at_start())[-1])
    assert not warnings and not runner.graphs.is_disabled and device.num_left == 1
    runner.warm_up()
    assert runner.graphs.num_captured > 0


def test_where_memory_is_too_short_for_any_graph_steps_are_plain_and_whole(
    make_device_runner: Make, device: Any, buckets: Buckets
) -> None:
    """A graph takes memory beside what its step computes with; that it cannot be had says nothing about the step."""
    warnings: list[str] = []
    runner = make_device_runner(warn=warnings.append, is_ahead=False)
    device.capture_error = OutOfDeviceMemory("CUDA failure 2: out of memory ; expr=cudaGraphInstantiate(&graph_exec);")
    runner.warm_up()
    num_tried = len(buckets.rows) * len(buckets.candidates)
    assert runner.graphs.is_disabled and device.num_left == num_tried
    assert warnings == [str(device.capture_error)]
    num_runs = device.num_runs
    runner.prefill([[5, EOS]] * runner.max_rows, range(runner.max_rows))
    tokens = np.full(runner.max_rows, START)
    runner.step(tokens, np.zeros_like(tokens), 1)
    assert device.num_runs == num_runs + 2 and device.graph_ids[-1] == "-1", "all rows at once"


def test_one_graph_that_memory_is_too_short_for_leaves_the_others(make_device_runner: Make, device: Any, buckets: Buckets) -> None:
    warnings: list[str] = []
    runner = make_device_runner(warn=warnings.append, is_ahead=False)
    device.has_one_shortage = True
    runner.warm_up()
    assert runner.graphs.num_captured == len(buckets.rows) * len(buckets.candidates) - 1
    assert not warnings and not runner.graphs.is_disabled


def test_a_graph_that_cannot_be_captured_is_loaded_to_run_plainly(
    make_device_runner: Make, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, bool]] = []
    open_session = device.open_session

    def refuse(path: Path, *, max_arena_bytes: int, is_captured: bool) -> Any:
        opened.append((path.stem, is_captured))
        if is_captured:
            raise DeviceError("all the graph nodes have not been partitioned to the CUDA EP")
        return open_session(path, max_arena_bytes=max_arena_bytes, is_captured=False)

    monkeypatch.setattr(device, "open_session", refuse)
    warnings: list[str] = []
    runner = make_device_runner(warn=warnings.append)
    assert opened == [("encoder", False), ("decoder", True), ("decoder", False)]
    assert len(warnings) == 1 and "partitioned" in warnings[0]
    runner.warm_up()
    assert set(device.graph_ids) <= {"-1", None}


def test_cuda_is_brought_out_of_a_capture_that_failed(fake_cuda: Callable[..., Any]) -> None:
    runtime = fake_cuda()
    device = CudaDevice(0, runtime)
    device.leave_capture()
    runtime.is_capturing = True
    device.leave_capture()
    assert not runtime.is_capturing


def test_what_onnx_runtime_says_of_a_full_arena_makes_a_batch_smaller(fake_cuda: Callable[..., Any]) -> None:
    class Full:
        def run_with_iobinding(self, *_: Any) -> None:
            raise RuntimeError("BFCArena::AllocateRawInternal(...) Available memory of 0 is smaller than requested bytes of 2048")

    with pytest.raises(OutOfDeviceMemory, match="Available memory"):
        CudaDevice(0, fake_cuda()).run(Full(), None, None)  # type: ignore[arg-type]
