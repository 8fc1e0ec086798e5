"""A device runner and the CPU runner side by side, on one tiny model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.rewriting import keep_sums_apart
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.runtime.device.device import HostDevice, OutOfDeviceMemory
from dragoman.server.runtime.device.model import Buckets, DeviceModel
from dragoman.server.runtime.device.runner import DeviceRunner
from tests.export.conftest import export as export
from tests.export.conftest import make_checkpoint as make_checkpoint
from tests.export.conftest import tokenizers as tokenizers
from tests.shelf import Shelf

MAX_ROWS = 6


class FailingDevice(HostDevice):
    """A device whose next runs lack memory, as often as told, and whose captures fail if told to.

    Attributes:
        num_failures: Runs that are still to fail.
        has_one_shortage: Whether memory will be short for the next capture, and for no other.
        capture_error: Raised by runs that are to be captured or replayed.
        num_runs: Runs that did not fail.
        num_left: Captures that were left after an error.
        graph_ids: The graph that each run names, or None.
        shapes: Of the first output of each run.
        is_short: Whether memory is short for a run with such a first output.
        arenas: Memory that each session may take, by the name of its graph.
    """

    num_failures = num_runs = num_left = 0
    has_one_shortage = False
    capture_error: Exception | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.graph_ids: list[str | None] = []
        self.shapes: list[tuple[int, ...]] = []
        self.is_short: Callable[[tuple[int, ...]], bool] = lambda shape: False
        self.arenas: dict[str, int] = {}

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        self.arenas[path.stem] = max_arena_bytes
        return super().open_session(path, max_arena_bytes=max_arena_bytes, is_captured=is_captured)

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OutOfDeviceMemory("Failed to allocate memory")
        try:
            graph = options.get_run_config_entry("gpu_graph_id")
        except RuntimeError:  # it says nothing
            graph = None
        if graph not in (None, "-1"):
            if self.capture_error is not None:
                raise self.capture_error
            if self.has_one_shortage:
                self.has_one_shortage = False
                raise OutOfDeviceMemory("CUDA failure 2: out of memory")
        self.graph_ids.append(graph)
        self.num_runs += 1
        super().run(session, binding, options)
        self.shapes.append(shape := tuple(binding.get_outputs()[0].shape()))
        if self.is_short(shape):
            raise OutOfDeviceMemory("Available memory of 0 is smaller than requested bytes of 2048")

    def leave_capture(self) -> None:
        self.num_left += 1


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture(scope="module")
def model(bundle: Bundle, tiny_checkpoint: Checkpoint, shelf: Shelf) -> DeviceModel:
    """The bundle's graphs as a device takes them: its encoder takes sources padded, and is in single precision to compare bits."""

    def make(folder: Path) -> None:
        folder.mkdir()
        model = tiny_checkpoint.model
        graphs = [trace(module) for module in (EncoderGraph(model, False), StepGraph(model), ScorerGraph(model, False))]
        for graph in graphs:
            keep_sums_apart(graph)
        write_graphs(graphs, folder)

    return DeviceModel.of(shelf.get("tiny-device", make), bundle.manifest)


@pytest.fixture
def buckets(model: DeviceModel) -> Buckets:
    """Small ones, so that all of them are met."""
    sizes = model.target_vocab_size, model.max_target_tokens, model.max_source_tokens
    return Buckets.of(MAX_ROWS, *sizes, rows=(1, 2, 4), capacities=(4, 8))


@pytest.fixture
def device() -> FailingDevice:
    return FailingDevice()


@pytest.fixture
def make_device_runner(device: FailingDevice, model: DeviceModel, buckets: Buckets) -> Callable[..., DeviceRunner]:
    def make(**settings: Any) -> DeviceRunner:
        return DeviceRunner(device, model, buckets, **({"prefill_tokens": 48} | settings))

    return make
