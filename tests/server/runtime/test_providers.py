"""The choice of a device, and the obstacles to CUDA."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.extras import install_command
from dragoman.server.runtime import providers
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.providers import CUDA_PROVIDER, choose_device, cuda_obstacle

ABSENT = "the NVIDIA driver sees no device"
CHOICES: list[tuple[str, str, str, int | str | None]] = [
    ("auto", "fp16", "", 0),
    ("auto", "fp16", ABSENT, None),
    ("auto", "fp32", "", None),
    ("auto", "int8", "", None),
    ("cpu", "fp16", "", None),
    ("cuda", "fp16", "", 0),
    ("cuda:3", "bf16", "", 3),
    ("cuda", "fp16", ABSENT, f"--device cuda: {ABSENT}"),
    ("cuda", "fp32", "", "CUDA runs fp16 and bf16 bundles, and this one is fp32"),
    ("cpu", "bf16", "", "--device cpu: the CPU does not run bf16 bundles"),
    ("auto", "bf16", ABSENT, "the CPU does not run bf16 bundles, and there is no CUDA device: the NVIDIA"),
    ("gpu", "fp16", "", "--device must be auto, cpu, cuda or cuda:N, not 'gpu'"),
    ("cuda:x", "fp16", "", "not 'cuda:x'"),
]


@pytest.mark.parametrize(("asked", "precision", "obstacle", "expected"), CHOICES)
def test_device_is_chosen_or_the_obstacle_is_named(asked: str, precision: str, obstacle: str, expected: int | str | None) -> None:
    if isinstance(expected, str):
        with pytest.raises(DeviceError, match=re.escape(expected)):
            choose_device(asked, precision, lambda ordinal: obstacle)
    else:
        choice = choose_device(asked, precision, lambda ordinal: obstacle)
        assert choice.ordinal == expected and choice.reason


class FakeRuntime:
    """cuda-bindings' runtime, as far as devices are counted."""

    def __init__(self, status: str, count: int | None) -> None:
        self.answer = SimpleNamespace(name=status), count

    def cudaGetDeviceCount(self) -> Any:
        return self.answer


@pytest.fixture
def pose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pose as a machine with these packages, this provider and this driver."""

    def pose(versions: dict[str, str], has_cuda: bool = True, runtime: Any = None, said: str = "") -> None:
        onnxruntime = SimpleNamespace(
            __version__="1.31.1",
            get_available_providers=lambda: [CUDA_PROVIDER] * has_cuda + ["CPUExecutionProvider"],
            preload_dlls=lambda: print(said),
        )
        modules = {"onnxruntime": onnxruntime, "cuda.bindings.runtime": runtime}

        def load(name: str) -> Any:
            if modules.get(name) is None:
                raise ImportError(f"No module named '{name}'")
            return modules[name]

        monkeypatch.setattr(providers, "import_module", load)
        monkeypatch.setattr(providers, "installed_version", versions.get)

    return pose


GPU = {"onnxruntime-gpu": "1.31.1"}


@pytest.mark.parametrize(
    ("versions", "has_cuda", "runtime", "said", "message"),
    [
        ({"onnxruntime": "1.31.1"}, False, None, "", "the installed onnxruntime 1.31.1 is the CPU build; in its place: "),
        (GPU | {"onnxruntime": "1.31.0"}, False, None, "", "onnxruntime 1.31.0, the CPU build, lies over onnxruntime-gpu 1.31.1"),
        (GPU, True, None, "", f"(No module named 'cuda.bindings.runtime'); {install_command('gpu')}"),
        (GPU, True, FakeRuntime("cudaErrorInsufficientDriver", None), "", "there is no NVIDIA driver, or it is older"),
        (GPU, True, FakeRuntime("cudaSuccess", 0), "", "the NVIDIA driver sees no device"),
        (GPU, True, FakeRuntime("cudaSuccess", 1), "", "there is no cuda:1; the driver sees 1 device"),
        (GPU, True, FakeRuntime("cudaErrorSystemNotReady", None), "", "CUDA does not start: cudaErrorSystemNotReady"),
        (GPU, True, FakeRuntime("cudaSuccess", 2), "", ""),
        (GPU, True, FakeRuntime("cudaSuccess", 2), "Failed to load libcublas.so.13: a", "libcublas.so.13 cannot be loaded"),
        (GPU, True, FakeRuntime("cudaSuccess", 2), "Failed to load libcufft.so.12: a", ""),
    ],
)
def test_obstacle_to_cuda_is_named(
    pose: Any, capsys: pytest.CaptureFixture[str], versions: dict[str, str], has_cuda: bool, runtime: Any, said: str, message: str
) -> None:
    pose(versions, has_cuda, runtime, said)
    found = cuda_obstacle(1)
    assert message in found and bool(found) == bool(message)
    assert not capsys.readouterr().out
