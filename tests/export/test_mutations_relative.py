"""Graphs of a network with relative positions, gates and RMS norms, broken on purpose: the gate finds out every one."""

from itertools import permutations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from dragoman.export.parity import ParityError
from dragoman.export.verify import verify
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import Padding
from tests.export.conftest import MakeCheckpoint, WriteGraphs
from tests.export.test_mutations import Change, insert_before, mutated, nodes, rewrite

T5 = {
    "norm": "pre",
    "norm_kind": "rms",
    "norm_epsilon": 0.05,
    "has_biases": False,
    "activation": "gelu_tanh",
    "is_ffn_gated": True,
    "attention_dim": 64,
    "is_attention_scaled": False,
    "positions": "relative",
    "relative_buckets": 8,
    "relative_max_distance": 12,
    "has_relative_bias_per_layer": True,
    "is_embedding_scaled": False,
    "is_output_scaled": True,
    "padding": "masked",
    "max_source_positions": 100,
    "max_target_positions": 100,
}


@pytest.fixture(scope="module")
def relative(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    """Return a model with all that T5's relatives have, whose scores are too small to be magnified."""
    checkpoint = make_checkpoint(**T5)
    for parameter in checkpoint.model.parameters():
        if parameter.dim() == 2 and len(parameter) != T5["relative_buckets"]:
            parameter.data *= 0.4
    return checkpoint


@pytest.fixture(scope="module")
def graphs(relative: Checkpoint, write_graphs: WriteGraphs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graphs(relative.model, tmp_path_factory.mktemp("mutations") / "graphs")


def of_distance(model: ModelProto) -> list[int]:
    """Return where the graph works out distances: the differences whose limits are put on them."""
    clipped = {node.input[0] for node in nodes(model, "Clip")}
    return [i for i, node in enumerate(model.graph.node) if node.output[0] in clipped]


def look_the_other_way(model: ModelProto) -> None:
    """Take keys after the query for keys before it."""
    for i in of_distance(model):
        node = model.graph.node[i]
        node.input[0], node.input[1] = node.input[1], node.input[0]


def be_one_further(model: ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "one_further"))
    clip = nodes(model, "Clip")[0]
    insert_before(model, clip, 0, [helper.make_node("Add", [clip.input[0], "one_further"], ["further"])])


def forget_the_bias(model: ModelProto) -> None:
    """Let the decoder's self-attention add nothing to its scores."""
    for attention in nodes(model, "GroupQueryAttention"):
        if len(attention.input) > 10 and helper.get_node_attr_value(attention, "causal"):
            del attention.input[7:]


def exchange_the_layers_tables(model: ModelProto) -> None:
    tables = [node for node in nodes(model, "GroupQueryAttention") if len(node.input) > 10]
    tables[0].input[10], tables[1].input[10] = tables[1].input[10], tables[0].input[10]


def exchange_gate_and_inner(model: ModelProto) -> None:
    first = {
        part: next(node for node in nodes(model, "Gemm") if f"layers.0.feed_forward.{part}" in node.input[1])
        for part in ("gate", "inner")
    }
    first["gate"].input[1], first["inner"].input[1] = first["inner"].input[1], first["gate"].input[1]


def forget_the_epsilon(model: ModelProto) -> None:
    for node in nodes(model, "SimplifiedLayerNormalization"):
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-6


def forget_the_output_scale(model: ModelProto) -> None:
    norm = nodes(model, "SimplifiedLayerNormalization")[-1]
    scale = next(node for node in nodes(model, "Mul") if node.input[0] == norm.output[0])
    rewrite(model, scale.input[1], np.ones_like)


def scale_the_scores(model: ModelProto) -> None:
    for attention in nodes(model, "GroupQueryAttention"):
        scale = next(i for i, attribute in enumerate(attention.attribute) if attribute.name == "scale")
        del attention.attribute[scale]


MUTATIONS: dict[str, tuple[str, Change, str]] = {
    "an encoder that takes after for before": ("encoder", look_the_other_way, "log-probabilities are off"),
    "a step that takes after for before": ("decoder", look_the_other_way, "log-probabilities are off"),
    "a scorer that takes after for before": ("scorer", look_the_other_way, "the scorer's log-probabilities are off"),
    "distances off by one": ("decoder", be_one_further, "log-probabilities are off"),
    "a step without its bias": ("decoder", forget_the_bias, "log-probabilities are off"),
    "a scorer without its bias": ("scorer", forget_the_bias, "the scorer's log-probabilities are off"),
    "two layers' tables exchanged": ("decoder", exchange_the_layers_tables, "log-probabilities are off"),
    "gate and inner exchanged": ("decoder", exchange_gate_and_inner, "log-probabilities are off"),
    "an encoder's norms with another epsilon": ("encoder", forget_the_epsilon, "log-probabilities are off"),
    "a step's norms with another epsilon": ("decoder", forget_the_epsilon, "log-probabilities are off"),
    "the output scale forgotten": ("decoder", forget_the_output_scale, "log-probabilities are off"),
    "scores scaled after all": ("decoder", scale_the_scores, "log-probabilities are off"),
}


@pytest.mark.parametrize(("graph", "change", "message"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_broken_graph_is_refused(
    graphs: Path, relative: Checkpoint, tmp_path: Path, graph: str, change: Change, message: str
) -> None:
    with pytest.raises(ParityError, match=message):
        verify(relative, mutated(graphs, tmp_path, graph, change))


def test_sound_graphs_pass(graphs: Path, relative: Checkpoint, tmp_path: Path) -> None:
    """What the others are refused for is the change; nothing here needs double precision."""
    report = verify(relative, mutated(graphs, tmp_path, "decoder", lambda model: None))
    assert report.tolerance == 1e-4
    assert report.max_position == 99


@pytest.fixture(scope="module")
def by_padding(
    make_checkpoint: MakeCheckpoint, write_graphs: WriteGraphs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Checkpoint, Path]]:
    """Return checkpoints that differ in what becomes of padding, and their graphs."""
    folder = tmp_path_factory.mktemp("padding")
    checkpoints = {kind: make_checkpoint(padding=kind, max_target_positions=6) for kind in get_args(Padding)}
    return {kind: (checkpoint, write_graphs(checkpoint.model, folder / kind)) for kind, checkpoint in checkpoints.items()}


@pytest.mark.parametrize(("meant", "done"), [*permutations(get_args(Padding), 2)])
def test_padding_of_another_kind_is_refused(by_padding: dict[str, tuple[Checkpoint, Path]], meant: str, done: str) -> None:
    with pytest.raises(ParityError, match="log-probabilit"):
        verify(by_padding[meant][0], by_padding[done][1])


@pytest.mark.parametrize("kind", get_args(Padding))
def test_padding_of_the_kind_that_is_meant_passes(by_padding: dict[str, tuple[Checkpoint, Path]], kind: str) -> None:
    assert verify(*by_padding[kind]).num_token_mismatches == 0


def test_where_single_precision_is_off_the_graphs_may_be_as_far_off(
    make_checkpoint: MakeCheckpoint, write_graphs: WriteGraphs, tmp_path: Path
) -> None:
    """Unscaled scores of large weights saturate the softmax, which magnifies what rounding leaves."""
    checkpoint = make_checkpoint(**T5 | {"attention_dim": 128, "max_target_positions": 12})
    for parameter in checkpoint.model.parameters():
        parameter.data *= 1.3
    directory = write_graphs(checkpoint.model, tmp_path / "graphs")
    report = verify(checkpoint, directory)
    assert report.tolerance > 1e-4 and report.max_log_prob_difference > 1e-4
    (tmp_path / "broken").mkdir()
    with pytest.raises(ParityError, match="log-probabilities are off"):
        verify(checkpoint, mutated(directory, tmp_path / "broken", "decoder", be_one_further))
