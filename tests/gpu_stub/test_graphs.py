"""Every graph of both half precisions through the runner that serves it, on the real onnxruntime-gpu and a stub device.

What is shown: that CUDA's kernels take every node, where nodes are placed, which kernels are chosen, what is allocated, captured
and replayed. Numbers are not: nothing computes.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed
from tests.gpu_stub.conftest import FAMILIES

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
KINDS = [(family, precision) for family in FAMILIES for precision in ("fp16", "bf16")]
PARTS = ("load", "warm_up", "prefill", "steps", "replay", "wide_steps", "looks", "copies", "score")
OF_SHAPES = {"Cast", "Concat", "Gather", "Squeeze", "Unsqueeze", "Sub", "Add"}
ROWS, CANDIDATES = (1, 2, 4, 8, 12), (1, 16, 64)

Exercised = dict[str, Any]


@pytest.fixture(scope="session")
def exercised(bed: Bed, stub_bundle: Callable[[str, str], Path]) -> Callable[[str, str], Exercised]:
    """Return what was seen of a model of a family in a precision."""

    @cache
    def run(family: str, precision: str) -> Exercised:
        bundle = str(stub_bundle(family, precision))
        result = bed.run(["-m", "benchmarks.gpu_stub.exercise", bundle])
        assert result.stdout.startswith("{"), result.stderr
        found: Exercised = json.loads(result.stdout)[bundle]
        return found

    return run


@pytest.fixture(params=KINDS, ids=["-".join(kind) for kind in KINDS])
def found(request: pytest.FixtureRequest, exercised: Callable[[str, str], Exercised]) -> Exercised:
    return exercised(*request.param)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_computed_on_cuda(found: Exercised, part: str) -> None:
    assert found[part]["error"] == ""


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_asked_of_the_device_that_it_would_refuse(found: Exercised, part: str) -> None:
    assert found[part]["faults"] == {}


def test_only_shapes_are_worked_out_on_the_host(found: Exercised) -> None:
    """What is computed there are a few whole numbers, for which nothing is fetched from the device."""
    assert [Path(session["path"]).name for session in found["sessions"]] == ["encoder.onnx", "decoder.onnx", "scorer.onnx"]
    for session in found["sessions"]:
        assert set(session["nodes"]) == {CUDA, CPU} and session["num_copies"] == 0
        assert set(session["nodes"][CPU]) <= OF_SHAPES, session["path"]
        assert session["nodes"][CUDA]["GroupQueryAttention"] > 0


def test_each_bucket_is_captured_once(found: Exercised) -> None:
    graphs = found["warm_up"]["graphs"]
    assert graphs["num_captures"] == len(ROWS) * len(CANDIDATES)
    assert graphs["num_broken_captures"] == graphs["num_stray_works"] == 0


def test_a_step_of_a_known_size_is_one_launch(found: Exercised) -> None:
    replay = found["replay"]
    assert replay["graphs"]["num_launches"] == 16 and replay["graphs"]["num_captures"] == 0
    assert sum(kernel["run"] for kernel in replay["kernels"].values()) == 0
    assert replay["memory"]["num_allocations"] == replay["calls"].get("cudaMalloc", 0) == 0


def test_all_work_of_the_runner_is_in_one_order(found: Exercised) -> None:
    for part in ("warm_up", "prefill", "steps", "replay", "wide_steps", "looks", "copies"):
        assert sum(count > 0 for count in found[part]["streams"].values()) == 1 and found[part]["streams"]["0"] == 0


@pytest.mark.parametrize(("family", "kernel", "other"), [("marian", "flash_fwd", "Unfused"), ("t5", "UnfusedSoftmax", "flash_fwd")])
def test_attention_is_computed_by_the_kernel_that_is_documented(
    exercised: Callable[[str, str], Exercised], family: str, kernel: str, other: str
) -> None:
    """Flash, but with something added to scores: that takes products of cuBLAS and a softmax between them."""
    kernels = exercised(family, "fp16")["prefill"]["kernels"]
    assert any(kernel in name for name in kernels) and not any(other in name for name in kernels)
