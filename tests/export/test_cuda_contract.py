"""The rules of CUDA's attention kernel, one by one; tests/gpu_stub asks the kernel itself whether they are its rules."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.cuda_contract import RULES, Attention, check_for_cuda, fault_of
from dragoman.export.graph_file import TensorInfo
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.half import halved
from dragoman.export.tracing import trace, write
from dragoman.model.checkpoint import Checkpoint
from tests.export.attention_nodes import CASES, ENCODER, GOOD, Case, node_of
from tests.export.conftest import Export, seal


@pytest.fixture
def half_bundle(export: Export, tmp_path: Path) -> Path:
    """Return a copy of an fp16 bundle, to be damaged."""
    return Path(shutil.copytree(export("tiny", "fp16").directory, tmp_path / "bundle"))


def test_nodes_of_the_models_are_accepted_and_shapes_that_a_file_does_not_say_are_no_fault() -> None:
    assert {name: fault_of(Attention(*node_of(places))) for name, places in GOOD.items()} == dict.fromkeys(GOOD, "")
    node, tensors = node_of(ENCODER)
    assert fault_of(Attention(node, {name: TensorInfo(info.dtype) for name, info in tensors.items()})) == ""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_broken_rule_is_named(case: Case) -> None:
    assert case.words in fault_of(Attention(*node_of(case.places, **case.attributes)))


def test_every_rule_has_a_case() -> None:
    nodes = [Attention(*node_of(case.places, **case.attributes)) for case in CASES]
    assert all(any(map(rule, nodes)) for rule in RULES)
    for name in ("num_heads", "kv_num_heads"):
        for number in (float("inf"), float("nan"), 4.0, "4"):
            assert "do not go with" in fault_of(Attention(*node_of(ENCODER, **{name: number})))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("module", [lambda model: EncoderGraph(model, False), StepGraph, lambda model: ScorerGraph(model, False)])
def test_exported_graphs_keep_to_the_rules(checkpoint, tmp_path: Path, dtype: torch.dtype, module: Callable[..., Any]) -> None:
    path = tmp_path / "graph.onnx"
    write(trace(module(halved(checkpoint.model, dtype))), path, "graph.weights")
    check_for_cuda(path)


def test_single_precision_gets_no_outputs_that_nobody_reads(checkpoint: Checkpoint) -> None:
    graph = trace(EncoderGraph(checkpoint.model, False)).graph
    assert {len(node.outputs) for node in graph if node.op_type == "GroupQueryAttention"} == {1}


def without_presents(path: Path) -> str:
    """Make a graph what export wrote before; return the name of the first node."""
    model = onnx_ir.load(path)
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    for node in nodes:
        node.resize_outputs(1)
    onnx_ir.save(model, path)
    return str(nodes[0].name)


@pytest.mark.parametrize("name", ["encoder", "scorer"])
def test_bundle_of_an_older_release_is_refused(half_bundle: Path, name: str) -> None:
    Bundle.open(half_bundle)
    path = half_bundle / f"{name}.onnx"
    node = without_presents(path)
    seal(half_bundle, path.name)
    expected = rf"{name}.onnx: {node} cannot be computed on CUDA: it lacks present_key and .*; export the checkpoint again"
    with pytest.raises(BundleError, match=expected):
        Bundle.open(half_bundle)
