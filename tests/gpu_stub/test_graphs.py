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
from dragoman.export.exporter import export_checkpoint
from tests.export.conftest import MakeCheckpoint
from tests.export.conftest import make_checkpoint as make_checkpoint
from tests.export.conftest import tokenizers as tokenizers
from tests.shelf import Shelf

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
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
KINDS = [(family, precision) for family in FAMILIES for precision in ("fp16", "bf16")]
PARTS = ("load", "warm_up", "prefill", "steps", "replay", "wide_steps", "looks", "copies", "score")
ROWS, CANDIDATES = (1, 2, 4, 8, 12), (1, 16, 64)

Exercised = dict[str, Any]


@pytest.fixture(scope="session")
def exercised(bed: Bed, shelf: Shelf, make_checkpoint: MakeCheckpoint) -> Callable[[str, str], Exercised]:
    """Return what was seen of a model of a family in a precision."""

    def export(folder: Path, family: str, precision: str) -> None:
        checkpoint = make_checkpoint(**(SMALL | FAMILIES[family]))
        for name, parameter in checkpoint.model.named_parameters():
            if parameter.dim() == 2 and "bias" not in name:
                parameter.data *= 0.4
        checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle", precision)

    @cache
    def run(family: str, precision: str) -> Exercised:
        bundle = shelf.get(f"stub-{family}-{precision}", lambda folder: export(folder, family, precision)) / "bundle"
        result = bed.run(["-m", "benchmarks.gpu_stub.exercise", str(bundle)])
        assert result.stdout.startswith("{"), result.stderr
        found: Exercised = json.loads(result.stdout)[str(bundle)]
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


def test_every_node_of_a_step_is_on_cuda(found: Exercised) -> None:
    decoder = next(session for session in found["sessions"] if session["path"].endswith("decoder.onnx"))
    assert set(decoder["nodes"]) == {CUDA} and decoder["num_copies"] == 0


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
