"""CUDA without a GPU: the real onnxruntime-gpu on stub libraries, which check every call and compute nothing.

They show the placement of nodes, the kernels that are chosen, memory, captures and replays, and what happens when they fail, but no
numbers. `make cuda-stub` fetches the wheel, without which these tests skip.
"""

import ctypes
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.exporter import export_checkpoint
from dragoman.server.runtime.device.cuda import CudaDevice
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from tests.export.attention_nodes import CASES, GOOD, model_of
from tests.export.conftest import MakeCheckpoint
from tests.export.conftest import make_checkpoint as make_checkpoint
from tests.export.conftest import tokenizers as tokenizers
from tests.shelf import Shelf
from tests.system.cuda_stub.bed import Bed, StubError, build, prepare
from tests.system.cuda_stub.symbols import Library

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
NORMS = {"norm": "pre", "norm_kind": "rms", "norm_epsilon": 0.05, "has_biases": False, "is_ffn_gated": True}
RELATIVE = {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 12, "is_attention_scaled": False}
OUTPUT = {"activation": "gelu_tanh", "is_embedding_scaled": False, "is_output_scaled": True, "padding": "masked"}
FAMILIES: dict[str, dict[str, Any]] = {
    "marian": {"activation": "silu", "has_output_bias": True},
    "t5": NORMS | RELATIVE | OUTPUT,
}
KINDS = [(family, precision) for family in FAMILIES for precision in ("fp16", "bf16")]
PARTS = ("load", "warm_up", "prefill", "steps", "replay", "wide_steps", "looks", "copies", "score")
OF_SHAPES = {"Cast", "Concat", "Gather", "Squeeze", "Unsqueeze", "Sub", "Add"}
NUM_ROW_BUCKETS, NUM_CANDIDATE_BUCKETS = 5, 3
OUT_OF_MEMORY, ALLOC_FAILED, UNSUPPORTED, INVALIDATED, UNKNOWN = 2, 3, 900, 901, 999

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def bed() -> Bed:
    try:
        return prepare()
    except StubError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def run(bed: Bed) -> Run:
    def program(*arguments: object) -> tuple[Any, list[str]]:
        result = bed.run("-m", "tests.system.cuda_stub.programs", *map(str, arguments))
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr.splitlines()

    return program


@pytest.fixture(scope="session")
def stub_bundle(shelf: Shelf, make_checkpoint: MakeCheckpoint) -> Callable[[str, str], Path]:
    def export(folder: Path, family: str, precision: str) -> None:
        sizes = {"d_model": 128, "num_heads": 2, "max_source_positions": 100, "max_target_positions": 100}
        checkpoint = make_checkpoint(**sizes, **FAMILIES[family])
        for name, parameter in checkpoint.model.named_parameters():
            if parameter.dim() == 2 and "bias" not in name:
                parameter.data *= 0.4
        checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle", precision)

    return lambda family, precision: (
        shelf.get(f"stub-{family}-{precision}", lambda folder: export(folder, family, precision)) / "bundle"
    )


@pytest.fixture(scope="session")
def exercised(run: Run, stub_bundle: Callable[[str, str], Path]) -> Callable[[str, str], Any]:
    return cache(lambda family, precision: run("exercise", stub_bundle(family, precision))[0])


@pytest.mark.parametrize(("family", "precision"), KINDS)
def test_every_graph_is_computed_on_cuda(exercised: Callable[[str, str], Any], family: str, precision: str) -> None:
    found = exercised(family, precision)
    assert {name: (found[name]["error"], found[name]["faults"]) for name in PARTS} == dict.fromkeys(PARTS, ("", {}))
    # The host computes a few whole numbers, for which nothing is copied from the device.
    assert [Path(session["path"]).name for session in found["sessions"]] == ["encoder.onnx", "decoder.onnx", "scorer.onnx"]
    for session in found["sessions"]:
        assert set(session["nodes"]) == {CUDA, CPU} and session["num_copies"] == 0
        assert set(session["nodes"][CPU]) <= OF_SHAPES, session["path"]
        assert session["nodes"][CUDA]["GroupQueryAttention"] > 0
    # Each bucket is captured once; then a step of a known size is one launch and nothing else.
    graphs, replay = found["warm_up"]["graphs"], found["replay"]
    assert graphs["num_captures"] == NUM_ROW_BUCKETS * NUM_CANDIDATE_BUCKETS
    assert graphs["num_broken_captures"] == graphs["num_stray_works"] == 0
    assert replay["graphs"]["num_launches"] == 16 and replay["graphs"]["num_captures"] == 0
    assert sum(kernel["run"] for kernel in replay["kernels"].values()) == 0
    assert replay["memory"]["num_allocations"] == replay["calls"].get("cudaMalloc", 0) == 0
    # All of the runner's work is on one stream, in one order.
    for part in PARTS[1:-1]:
        assert sum(count > 0 for count in found[part]["streams"].values()) == 1 and found[part]["streams"]["0"] == 0


@pytest.mark.parametrize(("family", "kernel", "other"), [("marian", "flash_fwd", "Unfused"), ("t5", "UnfusedSoftmax", "flash_fwd")])
def test_attention_is_computed_by_the_kernel_that_is_documented(
    exercised: Callable[[str, str], Any], family: str, kernel: str, other: str
) -> None:
    """Flash; with something added to scores, products of cuBLAS and a softmax between them."""
    kernels = exercised(family, "fp16")["prefill"]["kernels"]
    assert any(kernel in name for name in kernels) and not any(other in name for name in kernels)


def test_rules_of_attention_are_those_of_the_kernel(run: Run, tmp_path: Path) -> None:
    import onnx_ir

    for name, places in GOOD.items():
        onnx_ir.save(model_of(places), tmp_path / f"{name}.onnx")
    for case in CASES:
        onnx_ir.save(model_of(case.places, **case.attributes), tmp_path / f"{case.name}.onnx")
    answers, _ = run("nodes", tmp_path)
    on_cuda = {name for name, answer in answers.items() if answer == {"refusal": "", "provider": CUDA}}
    assert on_cuda == set(GOOD)


def test_a_full_arena_is_met_with_smaller_parts(run: Run, stub_bundle: Callable[[str, str], Path]) -> None:
    tries, _ = run("shortage", stub_bundle("marian", "fp16"))
    assert (tries[0]["num_refusals"], tries[0]["error"]) == (0, "")
    assert [attempt for attempt in tries if attempt["num_refusals"] and not attempt["error"]]
    errors = [attempt["error"] for attempt in tries if attempt["error"]]
    assert errors and all(error.startswith("OutOfDeviceMemory: ") for error in errors)
    texts = [text for attempt in tries for text in attempt["texts"]]
    assert texts and all("is smaller than requested bytes of" in text for text in texts)


@pytest.fixture(scope="session")
def bundle(shipped_bundle: Callable[..., Path]) -> Path:
    return shipped_bundle("en-de", "fp16")


@pytest.mark.parametrize(
    ("function", "status", "after", "is_disabled"),
    [
        ("cudaStreamBeginCapture", UNSUPPORTED, 0, True),
        ("cudaStreamEndCapture", INVALIDATED, 2, True),
        ("cudaGraphInstantiate", UNKNOWN, 1, True),
        # A shortage leaves one step without a graph, and all rows together.
        ("cudaStreamBeginCapture", OUT_OF_MEMORY, 0, False),
        ("cudaGraphInstantiate", OUT_OF_MEMORY, 0, False),
        ("cublasGemmEx", ALLOC_FAILED, 0, False),
        ("cudaNobodyCallsThis", UNKNOWN, 0, False),
    ],
)
def test_a_failed_capture_disables_graphs_and_a_shortage_does_not(
    run: Run, bundle: Path, function: str, status: int, after: int, is_disabled: bool
) -> None:
    found, log = run("recover", bundle, function, status, after)
    assert found["is_disabled"] == is_disabled and (str(status) in found["reason"]) == is_disabled
    assert sum("CUDA graphs are off" in line for line in log) == is_disabled
    assert found["graphs"]["num_launches"] == (0 if is_disabled else 3)
    if is_disabled:
        assert found["graphs"]["num_captures"] == 0 and found["num_kernels"] > 0
    else:
        assert (found["rows_at_once"], found["faults"]) == (4, {})


def test_gpu_check_finds_everything_in_order(bed: Bed, bundle: Path) -> None:
    result = bed.run("-m", "dragoman", "gpu-check", str(bundle), "--max-slots", "4")
    lines = dict(re.findall(r"^(?:ok  |FAIL)  (\w+): (.*)$", result.stdout, re.MULTILINE))
    assert " ".join(lines) == "driver libraries bundle device load encode step capture replay score attention memory"
    # Nothing computes there: probabilities are whatever lay in memory.
    assert set(re.findall(r"^FAIL  (\w+)", result.stdout, re.MULTILINE)) <= {"step", "replay", "score"}, result.stdout
    assert set(re.findall(r"(\w+)_ATTENTION in", lines["attention"])) == {"FLASH"}
    assert "compute capability 9.0" in lines["device"]


def test_the_device_of_the_server_computes_on_memory_that_checks_every_copy(shelf: Shelf) -> None:
    """This needs gcc, and no wheel."""
    if missing := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        pytest.skip(f"there is no {', '.join(missing)}")
    if "libcudart.so" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        pytest.skip("NVIDIA's own libcudart is in this process")
    wanted = [Library("libcudart.so.13", (("libcudart.so.13", ("cudaFree", "cudaMalloc")),))]
    libraries = build(wanted, shelf.get("gpu-stub-libraries", lambda folder: build(wanted, folder)))
    for name in ("libgpu_stub.so", "libcudart.so.13"):
        ctypes.CDLL(str(libraries / name))
    from tests.system.cuda_stub import bindings
    from tests.system.cuda_stub.watch import Watch

    Watch().set_bytes(2**30)
    cuda: Any = bindings
    device = CudaDevice(0, cuda)
    assert device.name == "cuda:0 (Stub GPU)" and device.available_bytes() <= 2**30
    there, here = device.allocate(1000), device.allocate_host(1000)
    here[:] = 7
    device.upload(there, here)
    device.copy_pieces(there + 500, 100, there, 100, 50, 5)
    device.wait(device.mark())
    with pytest.raises(DeviceError, match="cudaMemcpyAsync: cudaErrorInvalidValue"):
        device.copy(there + 900, there, 200)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(2**31)
    assert cuda.cudaGetLastError() == (0,), "a failure that was handled is not reported again"
    device.free(there)
