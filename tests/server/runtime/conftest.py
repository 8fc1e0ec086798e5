"""A device runner and the CPU runner side by side, on one tiny model, and a CUDA runtime that is made of host memory."""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.cpu import keep_sums_apart
from dragoman.export.graphs.transformer_encoder import EncoderGraph
from dragoman.export.graphs.transformer_scorer import ScorerGraph
from dragoman.export.graphs.transformer_step import StepGraph
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.runtime.device.buckets import Buckets
from dragoman.server.runtime.device.device import OutOfDeviceMemory
from dragoman.server.runtime.device.host import HostDevice
from dragoman.server.runtime.device.model import DeviceModel
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
        arenas: Memory that each session may take, by the name of its graph.
    """

    num_failures = num_runs = num_left = 0
    has_one_shortage = False
    capture_error: Exception | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.graph_ids: list[str | None] = []
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

    def leave_capture(self) -> None:
        self.num_left += 1


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidValue = 1


class FakeCuda:
    """CUDA's runtime as cuda-bindings shows it, with host memory for device memory; strict about addresses and the stream."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2
    STREAM = 77

    def __init__(self, num_bytes: int = 2**40) -> None:
        self.blocks: dict[int, Any] = {}
        self.host: list[Any] = []
        self.num_bytes = num_bytes
        self.is_capturing = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a call without effect in host memory."""
        results: dict[str, list[Any]] = {
            "cudaStreamCreateWithFlags": [self.STREAM],
            "cudaEventCreateWithFlags": [500],
            "cudaGetDeviceProperties": [SimpleNamespace(name=b"Fake GPU\0\0\0", major=9, minor=0)],
            "cudaMemGetInfo": [self.num_bytes, 2 * self.num_bytes],
            "cudaStreamIsCapturing": [int(self.is_capturing)],
        }
        return lambda *_: (Status.cudaSuccess, *results.get(name, []))

    def cudaMalloc(self, size: int) -> tuple[Status, int]:
        if size > self.num_bytes:
            return Status.cudaErrorMemoryAllocation, 0
        block = np.full(size, 0xAB, np.uint8)  # what is not cleared shows
        self.blocks[block.ctypes.data] = block
        return Status.cudaSuccess, block.ctypes.data

    def cudaFree(self, address: int) -> tuple[Status]:
        del self.blocks[address]
        return (Status.cudaSuccess,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Status, int]:
        block = np.zeros(size, np.uint8)
        self.host.append(block)
        return Status.cudaSuccess, block.ctypes.data

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[Status]:
        self._check(stream, address, size)
        ctypes.memset(address, value, size)
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[Status]:
        self._check(stream, *((target, size) if kind in (1, 3) else (source, size)))
        ctypes.memmove(target, source, size)
        return (Status.cudaSuccess,)

    def cudaMemcpy2DAsync(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> tuple[Status]:
        if width > target_pitch or width > source_pitch:
            return (Status.cudaErrorInvalidValue,)
        for row in range(height):
            self._check(stream, target + row * target_pitch, width)
            self._check(stream, source + row * source_pitch, width)
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Status, int]:
        assert stream == self.STREAM and self.is_capturing
        self.is_capturing = False
        return Status.cudaErrorInvalidValue, 0

    def _check(self, stream: int, address: int, size: int) -> None:
        assert stream == self.STREAM, "work on another stream is not in order"
        assert any(start <= address and address + size <= start + block.size for start, block in self.blocks.items())


@pytest.fixture
def fake_cuda() -> Callable[..., FakeCuda]:
    return FakeCuda


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
