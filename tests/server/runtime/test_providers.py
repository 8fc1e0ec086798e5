"""The choice of a device, and what is said when CUDA cannot be it."""

from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.extras import install_command
from dragoman.server.runtime import providers
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.providers import CUDA_PROVIDER, choose_device, cuda_obstacle


def there(ordinal: int) -> str:
    return ""


def absent(ordinal: int) -> str:
    return "the NVIDIA driver sees no device"


@pytest.mark.parametrize(
    ("request_", "precision", "check", "ordinal"),
    [
        ("auto", "fp16", there, 0),
        ("auto", "bf16", there, 0),
        ("auto", "fp16", absent, None),
        ("auto", "fp32", there, None),
        ("auto", "int8", there, None),
        ("cpu", "fp16", there, None),
        ("cuda", "fp16", there, 0),
        ("cuda:3", "bf16", there, 3),
    ],
)
def test_a_device_is_chosen_with_a_reason(request_: str, precision: str, check: Any, ordinal: int | None) -> None:
    choice = choose_device(request_, precision, check)
    assert choice.ordinal == ordinal and choice.is_cuda == (ordinal is not None) and choice.reason


@pytest.mark.parametrize(
    ("request_", "precision", "check", "message"),
    [
        ("cuda", "fp16", absent, "--device cuda: the NVIDIA driver sees no device"),
        ("cuda:1", "bf16", absent, "--device cuda:1: the NVIDIA driver sees no device"),
        ("cuda", "fp32", there, "--device cuda: CUDA runs fp16 and bf16 bundles, and this one is fp32"),
        ("cuda", "int8", there, "this one is int8"),
        ("cpu", "bf16", there, "--device cpu: the CPU does not run bf16 bundles"),
        ("auto", "bf16", absent, "the CPU does not run bf16 bundles, and there is no CUDA device: the NVIDIA"),
        ("gpu", "fp16", there, "--device must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        ("cuda:x", "fp16", there, "not 'cuda:x'"),
    ],
)
def test_a_device_that_cannot_be_used_is_an_error_that_says_why(request_: str, precision: str, check: Any, message: str) -> None:
    with pytest.raises(DeviceError) as error:
        choose_device(request_, precision, check)
    assert message in str(error.value)


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
    ("versions", "has_cuda", "runtime", "message"),
    [
        ({"onnxruntime": "1.31.1"}, False, None, "the installed onnxruntime 1.31.1 is the CPU build; in its place: "),
        (GPU | {"onnxruntime": "1.31.0"}, False, None, "onnxruntime 1.31.0, the CPU build, lies over onnxruntime-gpu 1.31.1"),
        (GPU, True, None, f"(No module named 'cuda.bindings.runtime'); {install_command('gpu')}"),
        (GPU, True, FakeRuntime("cudaErrorInsufficientDriver", None), "there is no NVIDIA driver, or it is older"),
        (GPU, True, FakeRuntime("cudaErrorNoDevice", 0), "the NVIDIA driver sees no device"),
        (GPU, True, FakeRuntime("cudaSuccess", 0), "the NVIDIA driver sees no device"),
        (GPU, True, FakeRuntime("cudaSuccess", 1), "there is no cuda:1; the driver sees 1 device"),
        (GPU, True, FakeRuntime("cudaErrorSystemNotReady", None), "CUDA does not start: cudaErrorSystemNotReady"),
        (GPU, True, FakeRuntime("cudaSuccess", 2), ""),
    ],
)
def test_what_keeps_cuda_from_being_used_is_named(pose: Any, versions: Any, has_cuda: bool, runtime: Any, message: str) -> None:
    pose(versions, has_cuda, runtime)
    found = cuda_obstacle(1)
    assert message in found and bool(found) == bool(message)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Failed to load libcublas.so.13: cannot open shared object file", "libcublas.so.13 cannot be loaded"),
        ("Failed to load libcufft.so.12: cannot open shared object file", ""),
    ],
)
def test_a_library_that_is_needed_is_named(pose: Any, capsys: pytest.CaptureFixture[str], said: str, expected: str) -> None:
    pose(GPU, runtime=FakeRuntime("cudaSuccess", 1), said=said)
    found = cuda_obstacle(0)
    assert expected in found and bool(found) == bool(expected)
    assert not capsys.readouterr().out


def test_the_cpu_build_is_seen_for_what_it_is() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("this is the GPU build")
    assert "CPU build" in cuda_obstacle(0)
