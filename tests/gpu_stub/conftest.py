"""The stub device: its libraries in this process, and a bed in which programs have it, where the wheel is."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed, prepare
from benchmarks.gpu_stub.build import StubError, build
from benchmarks.gpu_stub.symbols import Library
from dragoman.export.exporter import export_checkpoint
from tests.export.conftest import MakeCheckpoint
from tests.export.conftest import make_checkpoint as make_checkpoint
from tests.export.conftest import tokenizers as tokenizers
from tests.shelf import Shelf

SMALL = {"d_model": 128, "num_heads": 2, "max_source_positions": 100, "max_target_positions": 100}
FAMILIES: dict[str, dict[str, Any]] = {
    "marian": {"activation": "silu", "has_output_bias": True},
    "t5": {
        "norm": "pre",
        "norm_kind": "rms",
        "norm_epsilon": 0.05,
        "has_biases": False,
        "activation": "gelu_tanh",
        "is_ffn_gated": True,
        "is_attention_scaled": False,
        "positions": "relative",
        "relative_buckets": 8,
        "relative_max_distance": 12,
        "is_embedding_scaled": False,
        "is_output_scaled": True,
        "padding": "masked",
    },
}
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
    return build(WANTED, shelf.get("gpu-stub-libraries", lambda folder: build(WANTED, folder)))


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


@pytest.fixture(scope="session")
def stub_bundle(shelf: Shelf, make_checkpoint: MakeCheckpoint) -> Callable[[str, str], Path]:
    """Return the bundle of a small model, by family and precision."""

    def export(folder: Path, family: str, precision: str) -> None:
        checkpoint = make_checkpoint(**(SMALL | FAMILIES[family]))
        for name, parameter in checkpoint.model.named_parameters():
            if parameter.dim() == 2 and "bias" not in name:
                parameter.data *= 0.4
        checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle", precision)

    def bundle(family: str, precision: str) -> Path:
        return shelf.get(f"stub-{family}-{precision}", lambda folder: export(folder, family, precision)) / "bundle"

    return bundle
