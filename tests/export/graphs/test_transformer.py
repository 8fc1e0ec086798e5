"""Facts about the graphs that the server's speed and its cache handling rest on."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from dragoman.export.bundle import Tensors
from dragoman.export.recording import OPSET_VERSION
from dragoman.export.running import OnnxRunner
from dragoman.export.tracing import IR_VERSION
from dragoman.model.checkpoint import Checkpoint


@pytest.fixture(scope="session", params=["encoder", "decoder", "scorer"])
def graph(request: pytest.FixtureRequest, exported: Path) -> onnx.ModelProto:
    return onnx.load(exported / f"{request.param}.onnx", load_external_data=False)


@pytest.fixture(scope="session")
def scorer(exported: Path) -> onnx.ModelProto:
    return onnx.load(exported / "scorer.onnx", load_external_data=False)


@pytest.fixture(scope="session")
def decoder(exported: Path) -> onnx.ModelProto:
    return onnx.load(exported / "decoder.onnx", load_external_data=False)


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


def test_axes_are_dynamic_and_named(exported: Path) -> None:
    def axes(values: object) -> dict[str, list[str | int]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}  # type: ignore[attr-defined]

    encoder = onnx.load(exported / "encoder.onnx", load_external_data=False).graph
    decoder = onnx.load(exported / "decoder.onnx", load_external_data=False).graph
    assert axes(encoder.input) == {"src_ids": ["P"], "positions": ["P"], "cells": ["P"], "grid": ["B", "S"], "src_lens": ["B"]}
    assert axes(encoder.output) == {"cross_kv": ["P", 4 * 4 * 8]}
    inputs, outputs = axes(decoder.input), axes(decoder.output)
    assert list(inputs) == Tensors.of_layers(2).decoder_inputs
    assert inputs["prev_ids"] == inputs["positions"] == inputs["src_lens"] == ["N"]
    assert inputs["num_candidates"] == [1]
    assert inputs["self_v_1"] == outputs["self_v_1_out"] == ["N", 4, "T", 8]
    assert inputs["cross_k_0"] == ["N", 4, "S", 8]
    assert outputs["candidate_ids"] == outputs["candidate_log_probs"] == ["N", "K"]


def test_scorer_takes_pairs_of_any_size_and_lets_no_logits_out(scorer: onnx.ModelProto) -> None:
    def axes(values: object) -> dict[str, list[str | int]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}  # type: ignore[attr-defined]

    pair, lengths = ["B", "T"], ["B"]
    assert axes(scorer.graph.input) == {
        "src_ids": ["B", "S"], "src_lens": lengths, "tgt_ids": pair, "tgt_lens": lengths, "labels": pair,
    }  # fmt: skip
    assert axes(scorer.graph.output) == {"label_log_probs": pair, "attention": ["B", 2, "T", "S"]}


def test_scorer_has_no_weights_of_its_own(scorer: onnx.ModelProto, exported: Path) -> None:
    """Every weight is read from the very bytes that another graph reads, and a bundle does not double for it."""

    def places(name: str) -> set[tuple[tuple[str, str], ...]]:
        model = onnx.load(exported / f"{name}.onnx", load_external_data=False)
        stored = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
        return {tuple(sorted((entry.key, entry.value) for entry in tensor.external_data)) for tensor in stored}

    assert len(places("scorer")) > 20
    assert places("scorer") <= places("encoder") | places("decoder")
    assert all(len(tensor.raw_data) <= 256 for tensor in scorer.graph.initializer)


def test_cross_keys_and_values_are_never_an_output(decoder: onnx.ModelProto) -> None:
    assert [value.name for value in decoder.graph.output] == Tensors.of_layers(2).decoder_outputs
    crosses = [node for node in attentions(decoder) if node.input[3].startswith("cross_")]
    assert len(crosses) == 2
    assert all(len(node.output) == 1 for node in crosses)


def test_attention_is_one_operator_everywhere(graph: onnx.ModelProto) -> None:
    assert attentions(graph)
    assert not {"ScatterND", "Attention", "MultiHeadAttention"} & {node.op_type for node in graph.graph.node}


def test_attention_is_written_out_only_where_its_weights_are_asked_for(graph: onnx.ModelProto) -> None:
    num_softmaxes = [node.op_type for node in graph.graph.node].count("Softmax")
    assert num_softmaxes == (2 if "attention" in [value.name for value in graph.graph.output] else 0)


def test_weights_are_not_reshaped_at_run_time(graph: onnx.ModelProto) -> None:
    """Guards against a Transpose of the tied embedding, or a Slice of the packed projections, in every step."""
    weights = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) > 1}
    for node in graph.graph.node:
        if node.op_type not in ("Gather", "Range"):
            assert node.input[0] not in weights, f"{node.op_type} of the weight {node.input[0]}"


def test_tied_embedding_is_stored_once(decoder: onnx.ModelProto) -> None:
    assert [tensor.name for tensor in decoder.graph.initializer if 300 in tensor.dims and 32 in tensor.dims] == [
        "decoder.embedding.tokens.weight"
    ]


def test_padding_costs_no_node_of_its_own(decoder: onnx.ModelProto) -> None:
    assert [node.op_type for node in decoder.graph.node][-4:] == ["Gemm", "LogSoftmax", "Equal", "If"]


def test_weights_lie_beside_the_graph(graph: onnx.ModelProto) -> None:
    for tensor in graph.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            assert {entry.key: entry.value for entry in tensor.external_data}["location"] in ("encoder.weights", "decoder.weights")
        else:
            assert len(tensor.raw_data) <= 256


def test_nothing_says_where_or_when_it_was_made(graph: onnx.ModelProto) -> None:
    assert (graph.ir_version, graph.producer_name, graph.producer_version) == (IR_VERSION, "dragoman", "")
    assert {entry.domain: entry.version for entry in graph.opset_import} == {"": OPSET_VERSION, "com.microsoft": 1}
    assert not graph.metadata_props and not graph.graph.metadata_props and not graph.doc_string and not graph.graph.doc_string
    for item in (*graph.graph.node, *graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        assert not item.doc_string and not item.metadata_props
    assert b".py" not in graph.SerializeToString()


def test_step_updates_the_bound_cache_at_each_row_s_own_position_and_nowhere_else(exported: Path, checkpoint: Checkpoint) -> None:
    slots = OnnxRunner(exported, checkpoint.model.config).slots(4, 9, 5)
    before = {name: buffer.copy() for name, buffer in slots.buffers.items()}
    positions = np.array([0, 8, 3])
    slots.step(np.array([4, 5, 6]), positions, np.array([1, 5, 2]), 2)
    for cache in slots.caches:
        changed = (slots.buffers[cache.name] != before[cache.name]).any((1, 3))
        expected = np.zeros_like(changed)
        if cache.role == "self":
            expected[[0, 1, 2], positions] = True
        np.testing.assert_array_equal(changed, expected)


def test_number_of_candidates_is_chosen_at_run_time(exported: Path, checkpoint: Checkpoint) -> None:
    slots = OnnxRunner(exported, checkpoint.model.config).slots(2, 4, 3)
    call = (np.array([4, 5]), np.array([0, 0]), np.array([3, 1]))
    all_ids, all_log_probs = slots.step(*call, 300)
    for count in (1, 2, 7):
        ids, log_probs = slots.step(*call, count)
        np.testing.assert_array_equal(ids, all_ids[:, :count])
        np.testing.assert_array_equal(log_probs, all_log_probs[:, :count])
    np.testing.assert_allclose(np.exp(all_log_probs.astype(np.float64)).sum(1), 1, rtol=1e-5)
    assert all_ids[:, -1].tolist() == [0, 0], "padding comes last"
