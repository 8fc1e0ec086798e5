"""What the server does when a capture fails, or memory is short, with the real onnxruntime-gpu and a stub device."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed

SCRIPT = str(Path(__file__).with_name("recovery.py"))
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, UNKNOWN, OUT_OF_MEMORY = 900, 901, 999, 2
CUBLAS_ALLOC_FAILED = 3


@pytest.fixture(scope="session")
def bundle(shipped_bundle: Callable[..., Path]) -> Path:
    return shipped_bundle("en-de", "fp16")


def recovered(bed: Bed, bundle: Path, function: str, status: int, after: int = 0) -> dict[str, Any]:
    result = bed.run([SCRIPT, str(bundle), function, str(status), str(after)])
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    warnings = [line for line in result.stderr.splitlines() if "CUDA graphs are off" in line]
    return found | {"num_warnings": len(warnings) + result.stdout.count("CUDA graphs are off")}


@pytest.mark.parametrize(
    ("function", "status", "after"),
    [
        ("cudaStreamBeginCapture", CAPTURE_UNSUPPORTED, 0),
        ("cudaStreamEndCapture", CAPTURE_INVALIDATED, 2),
        ("cudaGraphInstantiate", UNKNOWN, 1),
    ],
)
def test_a_failed_capture_leaves_plain_steps(bed: Bed, bundle: Path, function: str, status: int, after: int) -> None:
    found = recovered(bed, bundle, function, status, after)
    assert found["is_disabled"] and str(status) in found["reason"]
    assert found["num_launches"] == found["num_captures"] == 0 and found["num_kernels"] > 0
    assert found["num_warnings"] == 1


@pytest.mark.parametrize("function", ["cudaStreamBeginCapture", "cudaGraphInstantiate"])
def test_a_shortage_while_capturing_leaves_one_step_plain_and_all_rows_together(bed: Bed, bundle: Path, function: str) -> None:
    found = recovered(bed, bundle, function, OUT_OF_MEMORY)
    assert not found["is_disabled"] and found["rows_at_once"] == 4
    assert found["num_launches"] == 3 and found["num_warnings"] == 0 and found["faults"] == {}


def test_a_product_that_gets_no_memory_is_a_shortage(bed: Bed, bundle: Path) -> None:
    found = recovered(bed, bundle, "cublasGemmEx", CUBLAS_ALLOC_FAILED)
    assert found["num_launches"] == 3 and found["rows_at_once"] == 4 and found["faults"] == {}


def test_without_a_failure_steps_are_replayed(bed: Bed, bundle: Path) -> None:
    found = recovered(bed, bundle, "cudaNobodyCallsThis", UNKNOWN)
    assert not found["is_disabled"] and found["num_launches"] == 3 and found["num_warnings"] == 0
    assert found["faults"] == {}


def test_gpu_check_finds_everything_in_order(bed: Bed, bundle: Path) -> None:
    result = bed.run(["-m", "dragoman", "gpu-check", str(bundle), "--max-slots", "4"])
    lines = dict(re.findall(r"^(?:ok  |FAIL)  (\w+): (.*)$", result.stdout, re.MULTILINE))
    assert list(lines) == [
        *("driver", "libraries", "bundle", "device", "load", "encode", "step", "capture", "replay", "score", "attention", "memory"),
    ]
    # Nothing computes there: probabilities are whatever lay in memory.
    failed = re.findall(r"^FAIL  (\w+)", result.stdout, re.MULTILINE)
    assert set(failed) <= {"step", "replay", "score"}, result.stdout
    assert "FLASH_ATTENTION in" in lines["attention"] and "CUDNN" not in lines["attention"]
    assert "compute capability 9.0" in lines["device"]


def test_another_kernel_is_used_if_that_is_asked_for(bed: Bed, bundle: Path) -> None:
    result = bed.run(["-m", "dragoman", "gpu-check", str(bundle), "--max-slots", "4", "--gpu-attention-kernels", "efficient"])
    (line,) = re.findall(r"^ok    attention: (.*)$", result.stdout, re.MULTILINE)
    assert "EFFICIENT_ATTENTION in" in line and "FLASH_ATTENTION" not in line
