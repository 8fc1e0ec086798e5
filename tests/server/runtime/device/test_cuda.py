"""What a session on CUDA is told; nothing of it needs CUDA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.attention_kernels import BITS, USUAL, kernel_bits
from dragoman.server.runtime.device import cuda
from dragoman.server.runtime.device.cuda import CudaDevice


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Settings of the provider, session by session."""
    settings: list[dict[str, str]] = []

    class Session:
        def __init__(self, path: Path, options: Any, providers: list[Any]) -> None:
            settings.append(providers[0][1])

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    monkeypatch.setattr(cuda.onnxruntime, "InferenceSession", Session)
    return settings


@pytest.mark.parametrize(("kernels", "bits"), [(USUAL, "3"), ("cudnn", "8"), ("auto", "0"), ("flash, math", "17")])
def test_attention_has_the_kernels_that_are_asked_for(
    fake_cuda: Callable[..., Any], told: list[dict[str, str]], kernels: str, bits: str
) -> None:
    CudaDevice(0, fake_cuda(), kernels).open_session(Path("encoder.onnx"), max_arena_bytes=7, is_captured=False)
    assert told[0]["sdpa_kernel"] == bits


def test_without_a_word_it_is_flash_and_memory_efficient_attention(
    fake_cuda: Callable[..., Any], told: list[dict[str, str]]
) -> None:
    device = CudaDevice(0, fake_cuda())
    device.open_session(Path("encoder.onnx"), max_arena_bytes=7, is_captured=False)
    device.open_session(Path("decoder.onnx"), max_arena_bytes=8, is_captured=True)
    assert [settings["sdpa_kernel"] for settings in told] == [str(BITS["flash"] | BITS["efficient"])] * 2
    assert [settings["gpu_mem_limit"] for settings in told] == ["7", "8"]
    assert [settings["enable_cuda_graph"] for settings in told] == ["0", "1"]
    assert {settings["user_compute_stream"] for settings in told} == {"77"}


@pytest.mark.parametrize("names", ["", "flash,", "xqa", "auto,flash"])
def test_what_is_no_kernel_is_refused(names: str) -> None:
    with pytest.raises(ValueError, match="is not auto, and none of flash, efficient, cudnn, math"):
        kernel_bits(names)
