"""Device interface of the device runner, and host memory as a device for tests and rehearsals.

Addresses are integers, sizes are bytes. Copies and runs execute in the order of their calls, asynchronously to the host.
"""

import itertools
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.session import open_session
from dragoman.model.errors import InputError


class DeviceError(InputError):
    """A device cannot be used as requested; the message says why."""


class OutOfDeviceMemory(MemoryError):
    """Something does not fit into the device's free memory."""


class Device(Protocol):
    """A device, used from one thread; `kind` is ONNX Runtime's name for the memory, `cuda` or `cpu`."""

    name: str
    kind: str
    ordinal: int
    compute_capability: tuple[int, int] | None

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        """Load a graph with at most `max_arena_bytes` for weights and activations, 0 for no limit.

        `is_captured`: runs may be captured and replayed, by their `gpu_graph_id`. Raises `DeviceError` if the graph does not run
        on the device, `OutOfDeviceMemory` if it does not fit.
        """

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions) -> None:
        """Run a session on device memory; raise `OutOfDeviceMemory` if its activations do not fit."""

    def leave_capture(self) -> None:
        """Return to normal operation after a failed capture."""

    def available_bytes(self) -> int:
        """Return the free memory."""

    def allocate(self, size: int) -> int:
        """Reserve zeroed memory and return its address; raise `OutOfDeviceMemory` if too little is free."""

    def free(self, address: int) -> None:
        """Free memory of `allocate`."""

    def allocate_host(self, size: int) -> NDArray[np.uint8]:
        """Reserve page-locked bytes `[size]` for `upload` and `download`; they are never freed."""

    def upload(self, target: int, source: NDArray[np.generic]) -> None:
        """Copy an array of `allocate_host` to the device; it must not change until the copy is done."""

    def download(self, target: NDArray[np.generic], source: int) -> None:
        """Copy from the device into an array of `allocate_host`, to be read once the copy is done."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device; source and target do not overlap."""

    def copy_pieces(self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        """Copy `count` pieces of `size` bytes whose starts are a pitch apart; source and target do not overlap."""

    def mark(self) -> int:
        """Return a mark of all work issued so far, for `wait`; the last 8 marks are valid."""

    def wait(self, mark: int) -> None:
        """Wait until all work before a mark is done."""

    def synchronize(self) -> None:
        """Wait until all work is done."""


class HostDevice:
    """Host memory as a synchronous `Device`: the device runner's logic without a GPU; `num_bytes` are reserved."""

    kind = "cpu"
    ordinal = 0
    compute_capability: tuple[int, int] | None = None

    def __init__(self, num_threads: int = 1, max_bytes: int = 2**40) -> None:
        self.name = "cpu"
        self.num_bytes = 0
        self._num_threads, self._max_bytes = num_threads, max_bytes
        self._blocks: dict[int, NDArray[np.uint8]] = {}
        self._marks = itertools.count()

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        """Load a graph on the CPU; nothing is captured."""
        return open_session(str(path), self._num_threads)

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions) -> None:
        session.run_with_iobinding(binding, options)

    def leave_capture(self) -> None:
        pass

    def available_bytes(self) -> int:
        return self._max_bytes - self.num_bytes

    def allocate(self, size: int) -> int:
        if size > self.available_bytes():
            raise OutOfDeviceMemory(f"{size} bytes are asked for, {self.available_bytes()} are free")
        block = np.zeros(size, np.uint8)
        self._blocks[block.ctypes.data] = block
        self.num_bytes += size
        return block.ctypes.data

    def free(self, address: int) -> None:
        self.num_bytes -= self._blocks.pop(address).size

    def allocate_host(self, size: int) -> NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def upload(self, target: int, source: NDArray[np.generic]) -> None:
        self._view(target, source.nbytes)[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

    def download(self, target: NDArray[np.generic], source: int) -> None:
        assert target.flags.c_contiguous
        target.reshape(-1).view(np.uint8)[:] = self._view(source, target.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        assert target + size <= source or source + size <= target, "source and target overlap"
        self._view(target, size)[:] = self._view(source, size)

    def copy_pieces(self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        assert size <= target_pitch and size <= source_pitch, "a piece is longer than its pitch"
        for piece in range(count):
            self.copy(target + piece * target_pitch, source + piece * source_pitch, size)

    def mark(self) -> int:
        return next(self._marks)

    def wait(self, mark: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def _view(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return the bytes at an address, within one reserved block."""
        for start, block in self._blocks.items():
            if start <= address and address + size <= start + block.size:
                return block[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are in no reserved block")
