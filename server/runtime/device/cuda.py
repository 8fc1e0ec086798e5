"""CUDA device: memory, sessions, and one stream for copies and ONNX Runtime's kernels."""

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.session import KERNEL_OPTIONS
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.memory import is_out_of_memory
from dragoman.server.runtime.providers import CUDA_PROVIDER

NUM_MARKS = 8
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaDevice:
    """A CUDA device as a `Device`; work runs asynchronously, in order, on one stream."""

    kind = "cuda"

    def __init__(self, ordinal: int, runtime: Any = None) -> None:
        """Open a device found usable by `providers.choose_device`; `runtime` is cuda-bindings' by default."""
        self.ordinal = ordinal
        self._runtime: Any = runtime or import_module("cuda.bindings.runtime")
        self._call("cudaSetDevice", ordinal)
        self._kinds = self._runtime.cudaMemcpyKind
        self._stream = int(self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))
        disable_timing = self._runtime.cudaEventDisableTiming
        self._events = [self._call("cudaEventCreateWithFlags", disable_timing) for _ in range(NUM_MARKS)]
        self._num_marks = 0
        properties = self._call("cudaGetDeviceProperties", ordinal)
        self.compute_capability: tuple[int, int] | None = (int(properties.major), int(properties.minor))
        self.name = f"cuda:{ordinal} ({bytes(properties.name).split(bytes(1))[0].decode(errors='replace')})"

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        settings = KERNEL_OPTIONS | {
            "device_id": str(self.ordinal),
            "user_compute_stream": str(self._stream),
            "arena_extend_strategy": "kSameAsRequested",
            "enable_cuda_graph": str(int(is_captured)),
            "use_tf32": "1",  # the only fp32 product, the logits, has half-precision operands
        }
        if max_arena_bytes:
            settings["gpu_mem_limit"] = str(max_arena_bytes)
        try:
            session = onnxruntime.InferenceSession(path, options, providers=[(CUDA_PROVIDER, settings), "CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors have no narrower base
            if is_out_of_memory(error):
                raise OutOfDeviceMemory(f"{path}: {error}") from error
            raise DeviceError(f"{path}: ONNX Runtime cannot load it on {self.name}: {error}") from error
        if CUDA_PROVIDER not in session.get_providers():
            raise DeviceError(f"{path}: ONNX Runtime left {self.name} for the CPU without an error; its log says why")
        return session

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions) -> None:
        try:
            session.run_with_iobinding(binding, options)
        except Exception as error:  # ONNX Runtime's errors have no narrower base
            if is_out_of_memory(error):
                raise OutOfDeviceMemory(str(error)) from error
            raise

    def leave_capture(self) -> None:
        """End a capture that ONNX Runtime left open, and clear CUDA's last error."""
        status, capture, *_ = self._runtime.cudaStreamIsCapturing(self._stream)
        if int(status) or int(capture):
            self._runtime.cudaStreamEndCapture(self._stream)
        self._runtime.cudaGetLastError()

    def available_bytes(self) -> int:
        return int(self._call("cudaMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        address = int(self._call("cudaMalloc", size))
        self._call("cudaMemsetAsync", address, 0, size, self._stream)
        return address

    def free(self, address: int) -> None:
        """Free memory after pending work has ended."""
        self.synchronize()
        self._call("cudaFree", address)

    def allocate_host(self, size: int) -> NDArray[np.uint8]:
        """Reserve page-locked memory."""
        address = int(self._call("cudaHostAlloc", size, 0))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, target: int, source: NDArray[np.generic]) -> None:
        assert source.flags.c_contiguous
        to_device = self._kinds.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", target, source.ctypes.data, source.nbytes, to_device, self._stream)

    def download(self, target: NDArray[np.generic], source: int) -> None:
        assert target.flags.c_contiguous
        to_host = self._kinds.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", target.ctypes.data, source, target.nbytes, to_host, self._stream)

    def copy(self, target: int, source: int, size: int) -> None:
        self._call("cudaMemcpyAsync", target, source, size, self._kinds.cudaMemcpyDeviceToDevice, self._stream)

    def copy_pieces(self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        within = self._kinds.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, size, count, within, self._stream)

    def mark(self) -> int:
        mark = self._num_marks
        self._num_marks += 1
        self._call("cudaEventRecord", self._events[mark % NUM_MARKS], self._stream)
        return mark

    def wait(self, mark: int) -> None:
        assert self._num_marks - mark <= NUM_MARKS, "the mark has been given to something later"
        self._call("cudaEventSynchronize", self._events[mark % NUM_MARKS])

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self._stream)

    def _call(self, name: str, *arguments: object) -> Any:
        """Call CUDA and return the results; raises `OutOfDeviceMemory` if memory is short, else `DeviceError`."""
        status, *results = getattr(self._runtime, name)(*arguments)
        if int(status) == _OUT_OF_MEMORY:
            self._runtime.cudaGetLastError()  # clear it, or a later call would report it again
            raise OutOfDeviceMemory(f"{name}: out of memory")
        if int(status):
            raise DeviceError(f"{name}: {getattr(status, 'name', status)}")
        return results[0] if len(results) == 1 else results
