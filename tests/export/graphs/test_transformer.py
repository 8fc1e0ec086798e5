"""Graphs as the server's speed needs them: axes, operators, weights, rewrites for the CPU, and the search for one candidate."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from numpy.typing import NDArray

from dragoman.export.graphs.transformer import StepGraph
from dragoman.export.proof.batching import check_one_candidate, drive
from dragoman.export.proof.cases import Row
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.sessions import OnnxRunner
from dragoman.export.quantize import quantize
from dragoman.export.recording import OPSET_VERSION
from dragoman.export.rewriting import block_size, choose_one_in_blocks, keep_sums_apart, keep_time_axis, skip_log_probs
from dragoman.export.session import open_session
from dragoman.export.tensors import LOG_PROBS_OUTPUT, Tensors
from dragoman.export.tracing import IR_VERSION, trace, write
from dragoman.model.checkpoint import Checkpoint


@pytest.fixture(scope="session", params=["encoder", "decoder", "scorer"])
def graph(request: pytest.FixtureRequest, exported: Path) -> onnx.ModelProto:
    return onnx.load(exported / f"{request.param}.onnx", load_external_data=False)


@pytest.fixture(scope="session")
def decoder(exported: Path) -> onnx.ModelProto:
    return onnx.load(exported / "decoder.onnx", load_external_data=False)


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def test_axes_are_dynamic_and_named(exported: Path) -> None:
    def axes(name: str) -> list[dict[str, list[str | int]]]:
        graph = onnx.load(exported / f"{name}.onnx", load_external_data=False).graph
        return [
            {value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
            for values in (graph.input, graph.output)
        ]

    packed = {"src_ids": ["P"], "positions": ["P"], "cells": ["P"], "grid": ["B", "S"], "src_lens": ["B"]}
    assert axes("encoder") == [packed, {"cross_kv": ["P", 4 * 4 * 8]}]
    inputs, outputs = axes("decoder")
    assert list(inputs) == Tensors.of_layers(2).decoder_inputs
    assert list(outputs) == [*Tensors.of_layers(2).decoder_outputs, LOG_PROBS_OUTPUT]
    assert outputs[LOG_PROBS_OUTPUT] == ["told_rows", "told_tokens"], "none where no candidate is asked for"
    assert inputs["prev_ids"] == inputs["positions"] == inputs["src_lens"] == ["N"] and inputs["num_candidates"] == [1]
    assert inputs["self_v_1"] == outputs["self_v_1_out"] == ["N", 4, "T", 8] and inputs["cross_k_0"] == ["N", 4, "S", 8]
    assert outputs["candidate_ids"] == outputs["candidate_log_probs"] == ["N", "K"]
    pairs = {"src_ids": ["B", "S"], "src_lens": ["B"], "tgt_ids": ["B", "T"], "tgt_lens": ["B"], "labels": ["B", "T"]}
    assert axes("scorer") == [pairs, {"label_log_probs": ["B", "T"], "attention": ["B", 2, "T", "S"]}]


def test_attention_is_one_operator_and_written_out_only_where_its_weights_are_asked_for(graph: onnx.ModelProto) -> None:
    operators = [node.op_type for node in graph.graph.node]
    assert attentions(graph) and not {"ScatterND", "Attention", "MultiHeadAttention"} & {*operators}
    assert operators.count("Softmax") == (2 if "attention" in [value.name for value in graph.graph.output] else 0)


def test_weights_are_not_reshaped_at_run_time(graph: onnx.ModelProto) -> None:
    """Guards against a Transpose of the tied embedding, or a Slice of the packed projections, in every step."""
    weights = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) > 1}
    for node in graph.graph.node:
        if node.op_type not in ("Gather", "Range"):
            assert node.input[0] not in weights, f"{node.op_type} of the weight {node.input[0]}"


def test_step_stores_a_tied_embedding_once_and_gives_no_keys_of_the_source(decoder: onnx.ModelProto) -> None:
    tables = [tensor.name for tensor in decoder.graph.initializer if 300 in tensor.dims and 32 in tensor.dims]
    assert tables == ["decoder.embedding.tokens.weight"]
    operators = [node.op_type for node in decoder.graph.node]
    assert operators[-4:] == ["Gemm", "Equal", "Equal", "If"], "padding costs no node"
    crosses = [node for node in attentions(decoder) if node.input[3].startswith("cross_")]
    assert [len(node.output) for node in crosses] == [1, 1]


def test_nothing_says_where_or_when_it_was_made(graph: onnx.ModelProto) -> None:
    assert (graph.ir_version, graph.producer_name, graph.producer_version) == (IR_VERSION, "dragoman", "")
    assert {entry.domain: entry.version for entry in graph.opset_import} == {"": OPSET_VERSION, "com.microsoft": 1}
    assert not graph.metadata_props and not graph.graph.metadata_props and not graph.doc_string and not graph.graph.doc_string
    for item in (*graph.graph.node, *graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        assert not item.doc_string and not item.metadata_props
    assert b".py" not in graph.SerializeToString()


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.fixture
def directory(exported: Path, tmp_path: Path) -> Path:
    """Return a copy of the graphs in single precision."""
    for name in ("scorer.onnx", "encoder.onnx", "encoder.weights", "decoder.onnx", "decoder.weights"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    return tmp_path


def digests(directory: Path, checkpoint: Checkpoint) -> list[str]:
    config = checkpoint.model.config
    random = np.random.default_rng(0)
    rows = [
        Row([*random.integers(3, 300, length).tolist(), config.eos_id], [config.decoder_start_id, *range(5, 4 + length)], length)
        for length in (3, 1, 9, 5)
    ]
    drive(OnnxRunner(directory, config), rows, 3, 20, False)
    return [row.digest for row in rows]


def test_exported_graphs_leave_nothing_to_fuse_with_a_layer_norm(exported: Path) -> None:
    for name in ("encoder.onnx", "decoder.onnx"):
        graph = onnx.load(exported / name, load_external_data=False).graph
        sums = {node.output[0] for node in graph.node if node.op_type == "Add"}
        assert not [node for node in graph.node if node.op_type == "LayerNormalization" and node.input[0] in sums]


def test_time_axis_gives_the_same_bits_with_fewer_nodes(checkpoint: Checkpoint, directory: Path) -> None:
    found = []
    for is_kept in (False, True):
        model = trace(StepGraph(checkpoint.model))
        keep_sums_apart(model)
        quantize(model, {})
        if is_kept:
            keep_time_axis(model)
        write(model, directory / "decoder.onnx", "step.weights")
        names = operators(directory / "decoder.onnx")
        found.append((digests(directory, checkpoint), names.count("Squeeze") + names.count("Unsqueeze")))
    (before, num_before), (after, num_after) = found
    assert before == after
    assert num_after == 3 < num_before == 8, "token ids, positions and the last hidden state"


def chooser(num_choices: int, is_normalized: bool = False, mask: int | None = None) -> onnx_ir.Model:
    """Return a graph that is a TopK of its input, or of its logarithmic softmax, for one row perhaps without a token."""
    shape, single = onnx_ir.Shape(["N", num_choices]), onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    given = onnx_ir.Value(name="x", shape=shape, type=single)
    count = onnx_ir.Value(name="num_candidates", shape=onnx_ir.Shape([1]), type=onnx_ir.TensorType(onnx_ir.DataType.INT64))
    softmax = onnx_ir.node("LogSoftmax", [given], {"axis": -1})
    log_probs = softmax.outputs[0]
    log_probs.name, log_probs.shape, log_probs.type = "log_probs", shape, single
    nodes, numbers, constants = [softmax] if is_normalized else [], log_probs if is_normalized else given, []
    if mask is not None:
        for name, array in (("place", np.array([[mask]], np.int64)), ("number", np.array([[-np.inf]], np.float32))):
            tensor = onnx_ir.tensor(array, name=name)
            constants.append(
                onnx_ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=onnx_ir.TensorType(tensor.dtype))
            )
        nodes.append(onnx_ir.node("ScatterElements", [numbers, *constants], {"axis": -1}))
        numbers = nodes[-1].outputs[0]
        numbers.name, numbers.shape, numbers.type = "masked", shape, single
    node = onnx_ir.node("TopK", [numbers, count], {"axis": -1}, num_outputs=2)
    for value, name, dtype in zip(node.outputs, ("v", "i"), (onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64), strict=True):
        value.name, value.shape, value.type = name, onnx_ir.Shape(["N", "K"]), onnx_ir.TensorType(dtype)
    inputs, opsets = [given, count], {"": 20}
    graph = onnx_ir.Graph(inputs, node.outputs, nodes=[*nodes, node], initializers=constants, opset_imports=opsets, name="main")
    return onnx_ir.Model(graph, ir_version=10)


def likeliest(log_probs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ids = log_probs.argmax(1, keepdims=True)
    return ids, np.take_along_axis(log_probs, ids, 1)


@pytest.mark.parametrize(("num_choices", "num_rows"), [(64, 1), (300, 5), (5000, 33), (32000, 3), (307, 4)])
def test_one_candidate_is_the_likeliest_and_of_equals_the_lowest(num_choices: int, num_rows: int, tmp_path: Path) -> None:
    model = chooser(num_choices)
    choose_one_in_blocks(model)
    onnx_ir.save(model, tmp_path / "choose.onnx")
    session = open_session(tmp_path / "choose.onnx", 2)
    random = np.random.default_rng(num_choices)
    log_probs = random.integers(-6, 0, (num_rows, num_choices)).astype(np.float32)  # hardly anything is the only one of its size
    log_probs[:, random.integers(0, num_choices, 9)] = -np.inf
    log_probs[0] = -np.inf
    log_probs[0, -1] = -100.0
    values, ids = session.run(None, {"x": log_probs, "num_candidates": np.array([1], np.int64)})
    expected_ids, expected = likeliest(log_probs)
    assert np.array_equal(ids, expected_ids) and np.array_equal(values, expected)
    values, ids = session.run(None, {"x": log_probs, "num_candidates": np.array([4], np.int64)})
    order = np.argsort(-log_probs, axis=1, kind="stable")[:, :4]
    assert np.array_equal(ids, order) and np.array_equal(values, np.take_along_axis(log_probs, order, 1))


def test_blocks_are_equal_and_about_as_many_as_they_are_long() -> None:
    assert [block_size(number) for number in (64, 5000, 32000)] == [8, 50, 160]
    assert block_size(307) is None  # a prime
    assert block_size(2 * 307) is None
    model = chooser(307)
    choose_one_in_blocks(model)
    assert [node.op_type for node in model.graph] == ["TopK"], "a vocabulary without equal blocks is searched as before"


@pytest.mark.parametrize("num_choices", [5000, 307])
def test_log_probabilities_are_computed_where_a_candidate_is_asked_for(num_choices: int, tmp_path: Path) -> None:
    model = chooser(num_choices, is_normalized=True)
    choose_one_in_blocks(model)
    skip_log_probs(model)
    onnx_ir.save(model, tmp_path / "choose.onnx")
    session = open_session(tmp_path / "choose.onnx", 2)
    assert [output.name for output in session.get_outputs()] == ["v", "i", LOG_PROBS_OUTPUT]
    logits = np.random.default_rng(0).normal(size=(4, num_choices)).astype(np.float32)
    logits[0] = -np.inf
    logits[0, -2:] = 2
    expected = torch.tensor(logits).log_softmax(1).numpy()
    order = np.argsort(-logits, axis=1, kind="stable")
    for count in (1, 4):
        values, ids, everything = session.run(None, {"x": logits, "num_candidates": np.array([count], np.int64)})
        assert np.array_equal(ids, order[:, :count]) and np.array_equal(values, np.take_along_axis(everything, ids, 1))
        assert np.allclose(everything, expected, atol=1e-5)
    values, ids, everything = session.run(None, {"x": logits, "num_candidates": np.array([0], np.int64)})
    assert np.array_equal(ids, order[:, :1]) and not values.any() and everything.size == 0


@pytest.mark.parametrize("num_choices", [5000, 307])
def test_masked_padding_is_no_candidate_where_no_log_probabilities_are_computed(num_choices: int, tmp_path: Path) -> None:
    model = chooser(num_choices, is_normalized=True, mask=9)
    choose_one_in_blocks(model)
    skip_log_probs(model)
    onnx_ir.save(model, tmp_path / "choose.onnx")
    session = open_session(tmp_path / "choose.onnx", 1)
    logits = np.zeros((1, num_choices), np.float32)
    logits[0, [9, 7, 8]] = 3, 2, 1
    for count in (0, 1, 2):
        _, ids, everything = session.run(None, {"x": logits, "num_candidates": np.array([count], np.int64)})
        assert ids.tolist() == [[7, 8][: max(1, count)]] and (not count or everything[0, 9] == -np.inf)


@pytest.mark.parametrize("what", ["id", "log-probability"])
def test_gate_finds_a_step_whose_one_candidate_is_another(exported: Path, checkpoint: Checkpoint, what: str) -> None:
    config = checkpoint.model.config
    runner = OnnxRunner(exported, config)
    row = Row([7, 8, config.eos_id], [config.decoder_start_id, 5, 6], 3)
    drive(runner, [row], 1, 5, False)
    check_one_candidate(runner, [row], 2)
    if what == "id":
        row.choices[1] ^= 1
    else:
        row.log_probs[2] = float(np.nextafter(np.float32(row.log_probs[2]), np.float32(0)))
    with pytest.raises(ParityError, match="another first candidate"):
        check_one_candidate(runner, [row], 2)
