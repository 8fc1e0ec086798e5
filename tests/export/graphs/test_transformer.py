"""Facts about the graphs that the server's speed and its cache handling rest on."""

from pathlib import Path

import onnx
import pytest

from dragoman.export.bundle import Tensors
from dragoman.export.recording import OPSET_VERSION
from dragoman.export.tracing import IR_VERSION


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
    assert (list(inputs), list(outputs)) == (Tensors.of_layers(2).decoder_inputs, Tensors.of_layers(2).decoder_outputs)
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
    assert [node.op_type for node in decoder.graph.node][-4:] == ["Gemm", "LogSoftmax", "Equal", "If"], "padding costs no node"
    crosses = [node for node in attentions(decoder) if node.input[3].startswith("cross_")]
    assert [len(node.output) for node in crosses] == [1, 1]


def test_nothing_says_where_or_when_it_was_made(graph: onnx.ModelProto) -> None:
    assert (graph.ir_version, graph.producer_name, graph.producer_version) == (IR_VERSION, "dragoman", "")
    assert {entry.domain: entry.version for entry in graph.opset_import} == {"": OPSET_VERSION, "com.microsoft": 1}
    assert not graph.metadata_props and not graph.graph.metadata_props and not graph.doc_string and not graph.graph.doc_string
    for item in (*graph.graph.node, *graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        assert not item.doc_string and not item.metadata_props
    assert b".py" not in graph.SerializeToString()
