"""Graphs that are broken on purpose, each in another way: the gate finds every one.

Without these a gate that compares less could still pass all sound graphs.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, NodeProto, helper, numpy_helper

from dragoman.export.bundle import BundleError
from dragoman.export.exporter import export_checkpoint
from dragoman.export.proof.quality import verify_quantized
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.verify import verify
from dragoman.export.quantize import ScaleCounts
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import Padding
from tests.export.conftest import KINDS, Export, MakeCheckpoint, WriteGraphs
from tests.model.conftest import T5 as SMALL_T5

Change = Callable[[ModelProto], None]
T5 = SMALL_T5 | {"norm_epsilon": 0.05, "activation": "gelu_tanh", "is_ffn_gated": True, "attention_dim": 64}
T5 |= {"has_relative_bias_per_layer": True, "is_output_scaled": True, "padding": "masked"}
T5 |= {"max_source_positions": 100, "max_target_positions": 100}
Made = tuple[Checkpoint, Path]


@pytest.fixture(scope="module")
def long(export: Export, make_checkpoint: MakeCheckpoint) -> Made:
    """Return a model with more positions than a row is driven through whole, and its graphs."""
    return make_checkpoint(**KINDS["long"]), export("long").directory


@pytest.fixture(scope="module")
def relative(make_checkpoint: MakeCheckpoint, write_graphs: WriteGraphs, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a model with all that T5's relatives have, whose scores are too small to be magnified, and its graphs."""
    checkpoint = make_checkpoint(**T5)
    for parameter in checkpoint.model.parameters():
        if parameter.dim() == 2 and len(parameter) != T5["relative_buckets"]:
            parameter.data *= 0.4
    return checkpoint, write_graphs(checkpoint.model, tmp_path_factory.mktemp("mutations") / "graphs")


def mutated(bundle: Path, folder: Path, graph: str, change: Change) -> Path:
    """Copy a bundle's graphs, with the weights inside the graph that is changed."""
    for path in bundle.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    model = onnx.load(bundle / f"{graph}.onnx")
    change(model)
    (folder / f"{graph}.onnx").write_bytes(model.SerializeToString())
    return folder


def nodes(model: ModelProto, kind: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def constant(model: ModelProto, name: str, value: float, dtype: Any = np.float32) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
    return name


def rewrite(model: ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:  # type: ignore[type-arg]
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()).astype(np.float32), name))


def insert_before(model: ModelProto, node: NodeProto, place: int, new: list[NodeProto]) -> None:
    """Let a node read the last of new nodes instead of its input."""
    index = list(model.graph.node).index(node)
    for offset, added in enumerate(new):
        model.graph.node.insert(index + offset, added)
    model.graph.node[index + len(new)].input[place] = new[-1].output[0]


def change_one_weight(model: ModelProto) -> None:
    rewrite(model, "decoder.layers.1.self_attention.output.weight", lambda w: w + 0.3 * (np.arange(w.size).reshape(w.shape) == 7))


def attend_one_key_too_few(model: ModelProto) -> None:
    attention = nodes(model, "GroupQueryAttention")[1]  # the first layer's encoder-decoder attention
    less, least = (constant(model, f"number_{number}", number, np.int32) for number in (1, 0))
    new = [helper.make_node("Sub", [attention.input[5], less], ["fewer"]), helper.make_node("Max", ["fewer", least], ["kept"])]
    insert_before(model, attention, 5, new)


def ignore_source_lengths(model: ModelProto) -> None:
    """Take every source of a batch for as long as the longest."""
    for attention in nodes(model, "GroupQueryAttention"):
        if len(attention.output) == 1:
            name = f"{attention.name}_longest"
            new = [
                helper.make_node("ReduceMax", [attention.input[5]], [f"{name}_max"], keepdims=1),
                helper.make_node("Shape", [attention.input[5]], [f"{name}_shape"]),
                helper.make_node("Expand", [f"{name}_max", f"{name}_shape"], [name]),
            ]
            insert_before(model, attention, 5, new)


def leak(model: ModelProto, value: str, of: str) -> list[NodeProto]:
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "rows"))
    return [
        helper.make_node("ReduceMean", [of, "rows"], ["mean_of_rows"], keepdims=1),
        helper.make_node("Mul", ["mean_of_rows", constant(model, "a_trace", 1e-6)], ["leak"]),
        helper.make_node("Add", [value, "leak"], ["leaky"]),
    ]


def leak_into_the_neighbour(model: ModelProto) -> None:
    """Add a trace of all rows' mean to every row: far below the tolerance, but not the same bits."""
    product = nodes(model, "Gemm")[-1]
    logits, product.output[0] = product.output[0], "given"
    finite = helper.make_node("Max", ["given", constant(model, "lowest", -100)], ["finite"])
    *new, last = [finite, *leak(model, "given", "finite")]
    last.output[0] = logits
    index = list(model.graph.node).index(product) + 1
    for offset, added in enumerate([*new, last]):
        model.graph.node.insert(index + offset, added)


def leak_into_the_next_source(model: ModelProto) -> None:
    """Add a trace of the mean over all tokens of a batch to what is projected: far below the tolerance, but not the same bits."""
    product = nodes(model, "Gemm")[-1]
    insert_before(model, product, 0, leak(model, product.input[0], product.input[0]))


def take_the_next_token_s_place(model: ModelProto) -> None:
    """Bring what attention gives back to the tokens as they stood in another order."""
    gather = nodes(model, "Gather")[-1]
    insert_before(model, gather, 1, [helper.make_node("Neg", [gather.input[1]], ["backwards"])])


def spoil_late_positions(model: ModelProto) -> None:
    """Spoil one position in the middle of those that are not driven step by step: 100 of 150."""
    rewrite(model, "decoder.embedding.positions", lambda table: table + (np.arange(len(table)) == 100)[:, None] * np.float32(0.5))


def spoil_the_last_position(model: ModelProto) -> None:
    rewrite(model, "decoder.embedding.positions", lambda table: table + (np.arange(len(table)) == 149)[:, None] * np.float32(0.5))


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
    clip, one = nodes(model, "Clip")[0], constant(model, "one_further", 1, np.int64)
    insert_before(model, clip, 0, [helper.make_node("Add", [clip.input[0], one], ["further"])])


def forget_the_bias(model: ModelProto) -> None:
    """Let the decoder's self-attention add nothing to its scores."""
    for attention in nodes(model, "GroupQueryAttention"):
        if len(attention.input) > 10 and helper.get_node_attr_value(attention, "causal"):
            del attention.input[7:]


def forget_the_epsilon(model: ModelProto) -> None:
    for node in nodes(model, "SimplifiedLayerNormalization"):
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-6


OFF, SCORER, SOURCE = "log-probabilities are off", "the scorer's log-probabilities are off", "not encoded to the same bits"
MUTATIONS: dict[str, tuple[str, Change, str]] = {
    "a wrong weight in one layer": ("decoder", change_one_weight, OFF),
    "the last position alone": ("decoder", spoil_the_last_position, "log-probabilities are off .* at position 149"),
    "a key too few": ("decoder", attend_one_key_too_few, OFF),
    "a step that ignores src_lens": ("decoder", ignore_source_lengths, OFF),
    "an encoder that ignores src_lens": ("encoder", ignore_source_lengths, SOURCE),
    "a source that leaks into the next": ("encoder", leak_into_the_next_source, SOURCE),
    "tokens in each other's places": ("encoder", take_the_next_token_s_place, SOURCE),
    "a row that leaks into its neighbours": ("decoder", leak_into_the_neighbour, "same bits alone"),
    "a position that only the scorer reaches": ("scorer", spoil_late_positions, SCORER),
    "a scorer that ignores src_lens": ("scorer", ignore_source_lengths, "the scorer"),
}
RELATIVE_MUTATIONS: dict[str, tuple[str, Change, str]] = {
    "an encoder that takes after for before": ("encoder", look_the_other_way, OFF),
    "a step that takes after for before": ("decoder", look_the_other_way, OFF),
    "distances off by one": ("decoder", be_one_further, OFF),
    "a scorer without its bias": ("scorer", forget_the_bias, SCORER),
    "a step's norms with another epsilon": ("decoder", forget_the_epsilon, OFF),
}


@pytest.mark.parametrize("name", [*MUTATIONS, *RELATIVE_MUTATIONS])
def test_broken_graph_is_refused(long: Made, relative: Made, tmp_path: Path, name: str) -> None:
    checkpoint, directory = long if name in MUTATIONS else relative
    graph, change, message = (MUTATIONS | RELATIVE_MUTATIONS)[name]
    with pytest.raises(ParityError, match=message):
        verify(checkpoint, mutated(directory, tmp_path, graph, change))


def test_sound_graphs_with_weights_inside_pass(long: Made, relative: Made, tmp_path: Path) -> None:
    """The others are refused for the change alone; nothing here needs double precision."""
    report = verify(long[0], mutated(long[1], tmp_path, "decoder", lambda model: None))
    assert report.max_position == 149 and report.num_rows == 24
    assert report.num_positions < 24 * 32 + 64, "the long row was not driven from its beginning to its end"
    report = verify(relative[0], mutated(relative[1], tmp_path, "decoder", lambda model: None))
    assert (report.tolerance, report.max_position) == (1e-4, 99)


def exchange_scales(model: ModelProto) -> None:
    """Multiply the scale of one product's weights by 3."""
    name = next(node for node in nodes(model, "MatMulIntegerToFloat") if "feed_forward.inner" in node.input[1]).input[3]
    rewrite(model, name, lambda scales: scales * np.float32(3))


def share_one_scale(model: ModelProto) -> None:
    """Let the loudest row of a batch scale all others: ONNX Runtime's own dynamic quantisation, of one product."""
    product, level = nodes(model, "QuantizeLinear")[0], constant(model, "level", 1 / 120)
    new = [
        helper.make_node("Abs", [product.input[0]], ["magnitudes"]),
        helper.make_node("ReduceMax", ["magnitudes"], ["loudest"], keepdims=0),
        helper.make_node("Mul", ["loudest", level], ["shared_scale"]),
    ]
    insert_before(model, product, 1, new)


@pytest.mark.parametrize(
    ("graph", "change", "message"),
    [
        ("decoder", exchange_scales, "too much harm|log-probabilities"),
        ("decoder", share_one_scale, "same bits in every batch"),
        ("encoder", share_one_scale, "not encoded to the same bits in every batch"),
    ],
    ids=["a scale error in one product", "a scale that rows share", "a scale that sources share"],
)
def test_broken_quantised_graph_is_refused(export: Export, long: Made, tmp_path, graph: str, change: Change, message: str) -> None:
    with pytest.raises((ParityError, BundleError), match=message):
        verify_quantized(long[0], mutated(export("long", "int8").directory, tmp_path, graph, change), ScaleCounts(1, 0))


@pytest.mark.parametrize("kind", ["tiny", "llama"])
def test_weights_that_tracing_gets_wrong_are_found(export: Export, make_checkpoint, kind: str, tmp_path: Path) -> None:
    """The gate compares with the checkpoint, not with the traced graph: of a prompt's reader, the key of a later layer's."""
    checkpoint = make_checkpoint(**KINDS[kind])
    other = copy.deepcopy(checkpoint)
    layer: Any = other.model.decoder.layers[0]  # type: ignore[union-attr,index]
    with torch.no_grad():
        (layer.cross_attention if kind == "tiny" else layer.self_attention).input.weight[70 % 96, 3] += 0.5
    with pytest.raises(ParityError, match="log-probabilities are off"):
        verify(other, export(kind).directory)
    if kind == "llama":  # the reader alone is another model's
        other.save(tmp_path / "checkpoint")
        changed = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle").directory
        for name in ("decoder.onnx", "decoder.weights", "scorer.onnx"):
            (changed / name).write_bytes((export(kind).directory / name).read_bytes())
        with pytest.raises(ParityError):
            verify(checkpoint, changed)


def test_padding_of_another_kind_is_refused(make_checkpoint: MakeCheckpoint, write_graphs: WriteGraphs, tmp_path: Path) -> None:
    checkpoints = {kind: make_checkpoint(padding=kind, max_target_positions=6) for kind in get_args(Padding)}
    for done, other in checkpoints.items():
        graphs = write_graphs(other.model, tmp_path / done)
        for meant, checkpoint in checkpoints.items():
            if meant == done:
                assert verify(checkpoint, graphs).num_token_mismatches == 0
                continue
            with pytest.raises(ParityError, match="log-probabilit"):
                verify(checkpoint, graphs)


def test_where_single_precision_is_off_the_graphs_may_be_as_far_off(make_checkpoint, write_graphs: WriteGraphs, tmp_path) -> None:
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
