"""A CUDA device on a runtime made of host memory: options of sessions, errors, and captures that failed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.attention_kernels import USUAL, kernel_bits
from dragoman.server.runtime.device import cuda
from dragoman.server.runtime.device.cuda import CUDA_PROVIDER, CudaDevice
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory


@pytest.mark.parametrize(("kernels", "bits"), [(USUAL, "3"), ("cudnn", "8"), ("auto", "0"), ("flash, math", "17")])
def test_sessions_get_kernels_memory_and_graphs_as_asked(
    fake_cuda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kernels: str, bits: str
) -> None:
    class Session:
        def __init__(self, path: Path, options: Any, providers: Any) -> None:
            self.settings = providers[0][1]

        def get_providers(self) -> list[str]:
            return [CUDA_PROVIDER]

    monkeypatch.setattr(cuda.onnxruntime, "InferenceSession", Session)
    device = CudaDevice(0, fake_cuda(), kernels)
    for limit, is_captured in ((7, False), (8, True)):
        settings: Any = device.open_session(Path("a.onnx"), max_arena_bytes=limit, is_captured=is_captured).settings  # type: ignore[attr-defined]
        assert (settings["sdpa_kernel"], settings["gpu_mem_limit"]) == (bits, str(limit))
        assert (settings["enable_cuda_graph"], settings["user_compute_stream"]) == (str(int(is_captured)), "77")


@pytest.mark.parametrize("names", ["", "flash,", "xqa", "auto,flash"])
def test_unknown_kernels_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match="is not auto, and none of flash, efficient, cudnn, math"):
        kernel_bits(names)


def test_shortage_of_memory_has_an_error_of_its_own(fake_cuda: Callable[..., Any]) -> None:
    class Full:
        def run_with_iobinding(self, *_: Any) -> None:
            raise RuntimeError("BFCArena::AllocateRawInternal(...) Available memory of 0 is smaller than requested bytes of 2048")

    device = CudaDevice(0, fake_cuda(num_bytes=100))
    assert (device.available_bytes(), device.name) == (100, "cuda:0 (Fake GPU)")
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(101)
    with pytest.raises(DeviceError, match="cudaErrorInvalidValue"):
        device.copy_pieces(0, 1, 0, 1, 2, 1)
    with pytest.raises(OutOfDeviceMemory, match="Available memory"):
        device.run(Full(), None, None)  # type: ignore[arg-type]


def test_device_is_brought_out_of_a_capture_that_failed(fake_cuda: Callable[..., Any]) -> None:
    runtime = fake_cuda()
    device = CudaDevice(0, runtime)
    device.leave_capture()
    runtime.is_capturing = True
    device.leave_capture()
    assert not runtime.is_capturing
