"""The host's own memory as a device: the device runner on a CPU session, so that its logic runs where no GPU is.

It is for tests and rehearsals; `onnx.OnnxRunner` is what serves on a CPU.
"""

import itertools
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.session import open_session
from dragoman.server.runtime.device.device import OutOfDeviceMemory


class HostDevice:
    """See `device.Device`. Everything is done at once, so that there is nothing to wait for.

    Attributes:
        num_bytes: Memory that is reserved at present.
    """

    kind = "cpu"
    ordinal = 0
    compute_capability: tuple[int, int] | None = None

    def __init__(self, num_threads: int = 1, max_bytes: int = 2**40) -> None:
        """Make a device with so many threads and so much memory."""
        self.name = "cpu"
        self.num_bytes = 0
        self._num_threads, self._max_bytes = num_threads, max_bytes
        self._blocks: dict[int, NDArray[np.uint8]] = {}
        self._marks = itertools.count()

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        """See `Device`; a CPU captures nothing, and has no arena of its own here."""
        return open_session(str(path), self._num_threads)

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions) -> None:
        """See `Device`."""
        session.run_with_iobinding(binding, options)

    def leave_capture(self) -> None:
        """See `Device`."""

    def available_bytes(self) -> int:
        """See `Device`."""
        return self._max_bytes - self.num_bytes

    def allocate(self, size: int) -> int:
        """See `Device`."""
        if size > self.available_bytes():
            raise OutOfDeviceMemory(f"{size} bytes are asked for, {self.available_bytes()} are free")
        block = np.zeros(size, np.uint8)
        self._blocks[block.ctypes.data] = block
        self.num_bytes += size
        return block.ctypes.data

    def free(self, address: int) -> None:
        """See `Device`."""
        self.num_bytes -= self._blocks.pop(address).size

    def allocate_host(self, size: int) -> NDArray[np.uint8]:
        """See `Device`."""
        return np.zeros(size, np.uint8)

    def upload(self, target: int, source: NDArray[np.generic]) -> None:
        """See `Device`."""
        self._view(target, source.nbytes)[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

    def download(self, target: NDArray[np.generic], source: int) -> None:
        """See `Device`."""
        assert target.flags.c_contiguous
        target.reshape(-1).view(np.uint8)[:] = self._view(source, target.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        """See `Device`."""
        assert target + size <= source or source + size <= target, "source and target overlap"
        self._view(target, size)[:] = self._view(source, size)

    def copy_pieces(self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        """See `Device`."""
        assert size <= target_pitch and size <= source_pitch, "a piece is longer than its pitch"
        for piece in range(count):
            self.copy(target + piece * target_pitch, source + piece * source_pitch, size)

    def mark(self) -> int:
        """See `Device`."""
        return next(self._marks)

    def wait(self, mark: int) -> None:
        """See `Device`."""

    def synchronize(self) -> None:
        """See `Device`."""

    def _view(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return the bytes at an address, which must lie in one reserved block."""
        for start, block in self._blocks.items():
            if start <= address and address + size <= start + block.size:
                return block[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are in no reserved block")
