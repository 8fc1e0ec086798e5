"""A CUDA device: options of sessions, its errors, and captures that failed. What it copies is tested in `test_cuda_stub`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.runtime.device import cuda
from dragoman.server.runtime.device.cuda import CUDA_PROVIDER, CudaDevice
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.memory import is_out_of_memory


class FakeCuda:
    """CUDA's runtime as cuda-bindings shows it: each call gives its status and results."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamNonBlocking = cudaEventDisableTiming = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.results: dict[str, tuple[int, ...]] = {"cudaStreamIsCapturing": (0, 0), "cudaMalloc": (2, 0)}

    def __getattr__(self, name: str) -> Any:
        properties = SimpleNamespace(name=b"Fake GPU\0\0\0", major=9, minor=0)
        made: Any = {
            "cudaGetDeviceProperties": (0, properties),
            "cudaStreamCreateWithFlags": (0, 77),
            "cudaEventCreateWithFlags": (0, 1),
        }
        return lambda *_: self.calls.append(name) or self.results.get(name) or made.get(name, (0,))


def test_sessions_get_kernels_memory_and_graphs_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def __init__(self, path: Path, options: Any, providers: Any) -> None:
            self.settings = providers[0][1]

        def get_providers(self) -> list[str]:
            return [CUDA_PROVIDER]

    monkeypatch.setattr(cuda.onnxruntime, "InferenceSession", Session)
    device = CudaDevice(0, FakeCuda())
    for limit, is_captured in ((7, False), (8, True)):
        settings: Any = device.open_session(Path("a.onnx"), max_arena_bytes=limit, is_captured=is_captured).settings  # type: ignore[attr-defined]
        assert (settings["sdpa_kernel"], settings["gpu_mem_limit"]) == ("3", str(limit))
        assert (settings["enable_cuda_graph"], settings["user_compute_stream"]) == (str(int(is_captured)), "77")


def test_errors_and_failed_captures_of_the_runtime() -> None:
    class Full:
        def run_with_iobinding(self, *_: Any) -> None:
            raise RuntimeError("BFCArena::AllocateRawInternal(...) Available memory of 0 is smaller than requested bytes of 2048")

    runtime = FakeCuda()
    device = CudaDevice(0, runtime)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(101)
    runtime.results["cudaMemcpyAsync"] = (1,)
    with pytest.raises(DeviceError, match="cudaMemcpyAsync: 1"):
        device.copy(0, 1, 2)
    with pytest.raises(OutOfDeviceMemory, match="Available memory"):
        device.run(Full(), None, None)  # type: ignore[arg-type]
    for state, is_ended in (((0, 0), False), ((0, 1), True), ((1, 0), True)):
        runtime.calls.clear()
        runtime.results["cudaStreamIsCapturing"] = state
        device.leave_capture()
        assert ("cudaStreamEndCapture" in runtime.calls) == is_ended


@pytest.mark.parametrize(
    ("text", "is_short"),
    [
        ("BFCArena::AllocateRawInternal(...) Available memory of 0 is smaller than requested bytes of 135383040", True),
        ("BFCArena::AllocateRawInternal(...) Failed to allocate memory for requested buffer of size 8388608000", True),
        ("[with ERRTYPE = cudaError] CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);", True),
        ("CUBLAS failure 3: the resource allocation failed ; GPU=0 ; expr=cublasGemmHelper(handle);", True),
        ("CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0 ; expr=cudnnCreate(&cudnn_handle_);", True),
        ("CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0 ;", True),
        ("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : not enough space: expected 318080, got 314240", False),
        ("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0 ; hostname=node ; line=121", False),
        ("CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR ; GPU=0 ; expr=cudnnCreate();", False),
        ("CUDA failure 900: operation not permitted when stream is capturing ; GPU=0 ; hostname=node ;", False),
    ],
)
def test_shortage_of_memory_is_known_by_the_words_of_onnx_runtime(text: str, is_short: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) is is_short
