"""What the device runner asks of the memory it computes in: reserve, fill and copy it, in one order, and wait.

Addresses are plain integers, sizes are bytes. All copies and all sessions of a device work in one order of their own: each begins
when the one asked for before it has ended, while the host may already be elsewhere.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.model.errors import InputError


class DeviceError(InputError):
    """A device that cannot be used as asked; the message says why."""


class OutOfDeviceMemory(MemoryError):
    """Something does not fit into the device's memory now."""


class Device(Protocol):
    """One device, used from one thread.

    Attributes:
        name: For the operator, for example `cuda:0 (NVIDIA H200)`.
        kind: ONNX Runtime's name for the memory: `cuda` or `cpu`.
        ordinal: Which of the kind.
        compute_capability: What NVIDIA counts its generations by; None for what is no such device.
    """

    name: str
    kind: str
    ordinal: int
    compute_capability: tuple[int, int] | None

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        """Load a graph.

        Args:
            path: Of the graph.
            max_arena_bytes: Memory that the session may take for weights and activations; 0 for any.
            is_captured: Whether its runs are to be captured and replayed, each `gpu_graph_id` by itself.

        Raises:
            DeviceError: If the graph does not run there.
            OutOfDeviceMemory: If it does not fit.
        """
        ...

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions) -> None:
        """Run a session on memory of the device.

        Raises:
            OutOfDeviceMemory: If what it computes with does not fit.
        """
        ...

    def leave_capture(self) -> None:
        """Let work be asked for again after a run that was to be captured has failed."""
        ...

    def available_bytes(self) -> int:
        """Return how much memory is free."""
        ...

    def allocate(self, size: int) -> int:
        """Reserve memory, all zero; return its address.

        Raises:
            OutOfDeviceMemory: If there is not so much.
        """
        ...

    def free(self, address: int) -> None:
        """Give memory back that `allocate` reserved."""
        ...

    def allocate_host(self, size: int) -> NDArray[np.uint8]:
        """Reserve bytes of host memory, `[size]`, that `upload` and `download` reach without waiting; they are never given back."""
        ...

    def upload(self, target: int, source: NDArray[np.generic]) -> None:
        """Copy an array of `allocate_host` to the device; it must stay as it is until the copy is done."""
        ...

    def download(self, target: NDArray[np.generic], source: int) -> None:
        """Copy from the device into an array of `allocate_host`, to be read once the copy is done."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device; the two do not overlap."""
        ...

    def copy_pieces(self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        """Copy `count` pieces of `size` bytes whose beginnings are a pitch apart; source and target do not overlap."""
        ...

    def mark(self) -> int:
        """Note that everything asked for so far is to be waited for; at most 8 marks are kept."""
        ...

    def wait(self, mark: int) -> None:
        """Wait until what was asked for before a mark is done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything is done."""
        ...
