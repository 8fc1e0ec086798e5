"""Graphs that are broken on purpose, each in another way: the gate finds out every one.

Without these a gate that compares less could still pass all sound graphs.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, NodeProto, helper, numpy_helper

from dragoman.export.bundle import BundleError
from dragoman.export.exporter import export_checkpoint
from dragoman.export.parity import ParityError
from dragoman.export.quality import verify_quantized
from dragoman.export.quantize import ScaleCounts
from dragoman.export.verify import verify
from dragoman.model.checkpoint import Checkpoint

MakeCheckpoint = Callable[..., Checkpoint]
Change = Callable[[ModelProto], None]


@pytest.fixture(scope="module")
def long(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    """Return a model with more positions than a row is driven through whole."""
    return make_checkpoint(max_source_positions=150, max_target_positions=150)


@pytest.fixture(scope="module")
def bundles(long: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mutations")
    long.save(folder / "checkpoint")
    for precision in ("fp32", "int8"):
        export_checkpoint(folder / "checkpoint", folder / precision, precision)
    return {precision: folder / precision for precision in ("fp32", "int8")}


def mutated(bundle: Path, folder: Path, graph: str, change: Change) -> Path:
    """Copy a bundle, with the weights inside the graph that is changed."""
    for path in bundle.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    model = onnx.load(bundle / f"{graph}.onnx")
    change(model)
    (folder / f"{graph}.onnx").write_bytes(model.SerializeToString())
    return folder


def nodes(model: ModelProto, kind: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


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


def swap_two_layers_weights(model: ModelProto) -> None:
    first, second = (node for node in nodes(model, "Gemm") if "feed_forward.outer" in node.input[1])
    first.input[1], second.input[1] = second.input[1], first.input[1]


def read_the_next_position(model: ModelProto) -> None:
    one = numpy_helper.from_array(np.array(1, np.int64), "off_by_one")
    model.graph.initializer.append(one)
    gather = next(node for node in nodes(model, "Gather") if "positions" in node.input[0])
    insert_before(model, gather, 1, [helper.make_node("Add", [gather.input[1], one.name], ["later"])])


def attend_one_key_too_few(model: ModelProto) -> None:
    attention = nodes(model, "GroupQueryAttention")[1]  # the first layer's encoder-decoder attention
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.int32), "one_less"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int32), "at_least"))
    new = [
        helper.make_node("Sub", [attention.input[5], "one_less"], ["fewer"]),
        helper.make_node("Max", ["fewer", "at_least"], ["kept"]),
    ]
    insert_before(model, attention, 5, new)


def swap_keys_and_values(model: ModelProto) -> None:
    attention = nodes(model, "GroupQueryAttention")[-1]
    attention.input[3], attention.input[4] = attention.input[4], attention.input[3]


def ignore_source_lengths(model: ModelProto) -> None:
    """Take every source of a batch for as long as the longest."""
    for attention in nodes(model, "GroupQueryAttention"):
        if len(attention.output) == 1:
            name = f"{attention.name}_longest"
            insert_before(
                model,
                attention,
                5,
                [
                    helper.make_node("ReduceMax", [attention.input[5]], [f"{name}_max"], keepdims=1),
                    helper.make_node("Shape", [attention.input[5]], [f"{name}_shape"]),
                    helper.make_node("Expand", [f"{name}_max", f"{name}_shape"], [name]),
                ],
            )


def leak_into_the_neighbour(model: ModelProto) -> None:
    """Add a trace of all rows' mean to every row: far below the tolerance, but not the same bits."""
    softmax = nodes(model, "LogSoftmax")[0]
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e-6, np.float32), "a_trace"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "rows"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(-100, np.float32), "lowest"))
    new = [
        helper.make_node("Max", [softmax.input[0], "lowest"], ["finite"]),
        helper.make_node("ReduceMean", ["finite", "rows"], ["mean_of_rows"], keepdims=1),
        helper.make_node("Mul", ["mean_of_rows", "a_trace"], ["leak"]),
        helper.make_node("Add", [softmax.input[0], "leak"], ["leaky"]),
    ]
    insert_before(model, softmax, 0, new)


def leak_into_the_next_source(model: ModelProto) -> None:
    """Add a trace of the mean over all tokens of a batch to what is projected: far below the tolerance, but not the same bits."""
    product = nodes(model, "Gemm")[-1]
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e-6, np.float32), "a_trace"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "rows"))
    new = [
        helper.make_node("ReduceMean", [product.input[0], "rows"], ["mean_of_rows"], keepdims=1),
        helper.make_node("Mul", ["mean_of_rows", "a_trace"], ["leak"]),
        helper.make_node("Add", [product.input[0], "leak"], ["leaky"]),
    ]
    insert_before(model, product, 0, new)


def take_the_next_token_s_place(model: ModelProto) -> None:
    """Bring what attention gives back to the tokens as they stood in another order."""
    gather = nodes(model, "Gather")[-1]
    insert_before(model, gather, 1, [helper.make_node("Neg", [gather.input[1]], ["backwards"])])


def spoil_late_positions(model: ModelProto) -> None:
    """Spoil one position in the middle of those that are not driven step by step: 100 of 150."""
    rewrite(model, "decoder.embedding.positions", lambda table: table + (np.arange(len(table)) == 100)[:, None] * np.float32(0.5))


def spoil_the_last_position(model: ModelProto) -> None:
    rewrite(model, "decoder.embedding.positions", lambda table: table + (np.arange(len(table)) == 149)[:, None] * np.float32(0.5))


MUTATIONS: dict[str, tuple[str, Change, str]] = {
    "a wrong weight in one layer": ("decoder", change_one_weight, "log-probabilities are off"),
    "two layers' weights exchanged": ("decoder", swap_two_layers_weights, "log-probabilities are off"),
    "positions off by one": ("decoder", read_the_next_position, "log-probabilities are off"),
    "the last position alone": ("decoder", spoil_the_last_position, "log-probabilities are off .* at position 149"),
    "a key too few": ("decoder", attend_one_key_too_few, "log-probabilities are off"),
    "keys for values": ("decoder", swap_keys_and_values, "log-probabilities are off"),
    "a step that ignores src_lens": ("decoder", ignore_source_lengths, "log-probabilities are off"),
    "an encoder that ignores src_lens": ("encoder", ignore_source_lengths, "not encoded to the same bits"),
    "a source that leaks into the next": ("encoder", leak_into_the_next_source, "not encoded to the same bits"),
    "tokens in each other's places": ("encoder", take_the_next_token_s_place, "not encoded to the same bits"),
    "a row that leaks into its neighbours": ("decoder", leak_into_the_neighbour, "same bits alone"),
    "a position that only the scorer reaches": ("scorer", spoil_late_positions, "the scorer's log-probabilities are off"),
    "a scorer that ignores src_lens": ("scorer", ignore_source_lengths, "the scorer"),
}


@pytest.mark.parametrize(("graph", "change", "message"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_broken_graph_is_refused(
    bundles: dict[str, Path], long: Checkpoint, tmp_path: Path, graph: str, change: Change, message: str
) -> None:
    with pytest.raises(ParityError, match=message):
        verify(long, mutated(bundles["fp32"], tmp_path, graph, change))


def test_sound_graph_with_its_weights_inside_passes(bundles: dict[str, Path], long: Checkpoint, tmp_path: Path) -> None:
    """What the others are refused for is the change."""
    report = verify(long, mutated(bundles["fp32"], tmp_path, "decoder", lambda model: None))
    assert report.max_position == 149 and report.num_rows == 24
    assert report.num_positions < 24 * 32 + 64, "the long row was not driven from its beginning to its end"


def exchange_scales(model: ModelProto) -> None:
    """Multiply the scale of one product's weights by 3."""
    name = next(node for node in nodes(model, "MatMulIntegerToFloat") if "feed_forward.inner" in node.input[1]).input[3]
    rewrite(model, name, lambda scales: scales * np.float32(3))


def share_one_scale(model: ModelProto) -> None:
    """Let the loudest row of a batch scale all others: ONNX Runtime's own dynamic quantisation, of one product."""
    product = nodes(model, "QuantizeLinear")[0]
    model.graph.initializer.append(numpy_helper.from_array(np.array(1 / 120, np.float32), "level"))
    new = [
        helper.make_node("Abs", [product.input[0]], ["magnitudes"]),
        helper.make_node("ReduceMax", ["magnitudes"], ["loudest"], keepdims=0),
        helper.make_node("Mul", ["loudest", "level"], ["shared_scale"]),
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
def test_broken_quantised_graph_is_refused(
    bundles: dict[str, Path], long: Checkpoint, tmp_path: Path, graph: str, change: Change, message: str
) -> None:
    with pytest.raises((ParityError, BundleError), match=message):
        verify_quantized(long, mutated(bundles["int8"], tmp_path, graph, change), ScaleCounts(1, 0))


def test_weights_that_tracing_gets_wrong_are_found(bundles: dict[str, Path], long: Checkpoint) -> None:
    """The gate compares with the checkpoint, not with what was traced."""
    other = copy.deepcopy(long)
    with torch.no_grad():
        other.model.decoder.layers[0].cross_attention.input.weight[0] += 0.5
    with pytest.raises(ParityError, match="log-probabilities are off"):
        verify(other, bundles["fp32"])
