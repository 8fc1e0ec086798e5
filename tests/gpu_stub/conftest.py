"""The stub device: its libraries in this process, and a bed in which programs have it, where the wheel is."""

import ctypes
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed, prepare
from benchmarks.gpu_stub.build import StubError, build
from benchmarks.gpu_stub.symbols import Library
from tests.shelf import Shelf

# What a provider asks for, in little.
WANTED = (
    Library("libcudart.so.13", {"libcudart.so.13": ["cudaFree", "cudaMalloc", "cudaNobodyWroteThis"]}),
    Library("libcublas.so.13", {"libcublas.so.13": ["cublasCreate_v2", "cublasGemmEx", "cublasSetNothing"]}),
    Library("libcuda.so.1", {"": ["cuInit", "cuNobodyWroteThis"]}),
)


@pytest.fixture(scope="session")
def libraries(shelf: Shelf) -> Path:
    """Folder of stub libraries, which need no wheel."""
    if missing := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        pytest.skip(f"there is no {', '.join(missing)}")
    return shelf.get("gpu-stub-libraries", lambda folder: build(WANTED, folder)) / "lib"


@pytest.fixture(scope="session")
def loaded(libraries: Path) -> SimpleNamespace:
    """The libraries in this process, by their names without the numbers."""
    if "libcudart.so" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        pytest.skip("NVIDIA's own libcudart is in this process")
    paths = [libraries / "libgpu_stub.so", *(libraries / library.name for library in WANTED)]
    return SimpleNamespace(**{path.name.split(".")[0]: ctypes.CDLL(str(path)) for path in paths})


@pytest.fixture
def watch(loaded: SimpleNamespace) -> Any:
    """What is seen, from here on."""
    from benchmarks.gpu_stub.watch import Watch

    watch = Watch()
    watch.set_bytes(2**30)
    watch.reset()
    return watch


@pytest.fixture
def cuda(watch: Any) -> Any:
    """CUDA's runtime, as cuda-bindings would show it."""
    from benchmarks.gpu_stub import bindings

    return bindings


@pytest.fixture(scope="session")
def bed() -> Bed:
    """Where programs see the stub device with the real onnxruntime-gpu."""
    try:
        return prepare()
    except StubError as error:
        pytest.skip(str(error))
