"""Attention nodes as the models have them, and every way of breaking a rule of CUDA's kernel.

A node is described by its places: what the operator calls an input or output, its type and its shape. `model_of` makes a graph of
one, which a session can be asked about.
"""

from typing import Any, NamedTuple

import onnx_ir

from dragoman.export.graph_file import FLOAT, FLOAT16, INT32, INT64, NodeInfo, TensorInfo

INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"),
    *("position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight"),
)
OUTPUTS = ("output", "present_key", "present_value", "output_qk")
H, DH, WIDTH = 4, 8, 32

Places = dict[str, TensorInfo]


def tensor(*shape: int | str, dtype: int = FLOAT16) -> TensorInfo:
    return TensorInfo(dtype, shape)


def lengths(rows: str) -> Places:
    return {"seqlens_k": tensor(rows, dtype=INT32), "total_sequence_length": tensor(1, dtype=INT32)}


def caches(rows: str, positions: str, *places: str) -> Places:
    return {place: tensor(rows, H, positions, DH) for place in places}


ENCODER: Places = (
    {"query": tensor("B", "S", 3 * WIDTH), "output": tensor("B", "S", WIDTH)}
    | lengths("B")
    | caches("B", "S", "present_key", "present_value")
)
STEP: Places = (
    {"query": tensor("N", 1, 3 * WIDTH), "output": tensor("N", 1, WIDTH)}
    | lengths("N")
    | caches("N", "T", "past_key", "past_value", "present_key", "present_value")
)
CROSS: Places = (
    {"query": tensor("N", 1, WIDTH), "key": tensor("N", 0, WIDTH), "value": tensor("N", 0, WIDTH), "output": tensor("N", 1, WIDTH)}
    | lengths("N")
    | caches("N", "S", "past_key", "past_value")
)
BIAS: Places = {"attention_bias": tensor(1, H, "S", "S")}
GOOD: dict[str, Places] = {
    "encoder": ENCODER,
    "step": STEP,
    "cross": CROSS,
    "encoder with a bias": ENCODER | BIAS,
    "step with a bias": STEP | {"attention_bias": tensor("N", H, 1, "T")},
}


class Case(NamedTuple):
    """A node that breaks one rule: its places, some of the words of the fault, and attributes beside the usual ones."""

    name: str
    places: Places
    words: str
    attributes: dict[str, Any] = {}  # noqa: RUF012


def without(places: Places, *gone: str) -> Places:
    return {place: info for place, info in places.items() if place not in gone}


def retyped(places: Places, place: str, dtype: int) -> Places:
    return places | {place: TensorInfo(dtype, places[place].shape)}


_SINGLE = {place: TensorInfo(FLOAT if info.dtype == FLOAT16 else info.dtype, info.shape) for place, info in ENCODER.items()}
_PRESENTS = ("present_key", "present_value")
CASES = (
    Case("single precision", _SINGLE, "neither float16 nor bfloat16"),
    Case("heads that do not divide", ENCODER, "4 heads of queries do not go with 3", {"kv_num_heads": 3}),
    Case("more heads than threads", ENCODER, "2048 heads", {"num_heads": 2048, "kv_num_heads": 2048}),
    Case("narrow heads", ENCODER | {"query": tensor("B", "S", 3 * 16)}, "heads of 4 numbers"),
    Case("long lengths", retyped(ENCODER, "seqlens_k", INT64), "seqlens_k is not of 32-bit"),
    Case("no lengths", without(ENCODER, "total_sequence_length"), "total_sequence_length is not of 32-bit"),
    Case("keys without values", without(CROSS, "value"), "only one of key and value"),
    Case("half a past", without(STEP, "past_value"), "only one of past_key and past_value"),
    Case("no presents without a past", without(ENCODER, *_PRESENTS), "lacks present_key and present_value"),
    Case("no presents where a cache grows", without(STEP, *_PRESENTS), "lacks present_key and present_value"),
    Case("one present", without(ENCODER, "present_value"), "lacks present_key and present_value"),
    Case("half of them where a cache is read", CROSS | caches("N", "S", "present_key"), "lacks present_key and present_value"),
    Case("two queries on a past", STEP | {"query": tensor("N", 2, 3 * WIDTH)}, "more than one query a row"),
    Case("a past of other heads", STEP | {"past_key": tensor("N", 2, "T", DH)}, "past_key is not made of 4 heads"),
    Case("a past of wider heads", STEP | {"past_value": tensor("N", H, "T", 16)}, "past_value is not made of 4 heads of 8"),
    Case("a past of another type", retyped(STEP, "past_key", FLOAT), "past_key has another type"),
    Case("a bias of another type", ENCODER | {"attention_bias": tensor(1, H, "S", "S", dtype=FLOAT)}, "attention_bias has another"),
    Case("a bias with a sink", ENCODER | BIAS | {"head_sink": tensor(H)}, "neither sinks nor"),
    Case("a bias with a smooth softmax", ENCODER | BIAS, "neither sinks nor", {"smooth_softmax": 1}),
    Case("a bias of other heads", ENCODER | {"attention_bias": tensor(1, 2, "S", "S")}, "neither 1 nor 4 heads"),
    Case("a third way to look", ENCODER, "causal is neither 0 nor 1", {"causal": 2}),
    Case("a window in both directions", ENCODER, "a window and looks in both", {"causal": 0, "local_window_size": 4}),
    Case("rotations of nothing", ENCODER, "rotates without", {"do_rotary": 1}),
    Case("scores", ENCODER | {"output_qk": tensor("B", H, "S", "S")}, "gives its scores", {"qk_output": 1}),
)


def node_of(places: Places, **attributes: Any) -> tuple[NodeInfo, Places]:
    """Return a node with these places, each tensor called as its place, and what is known of the tensors."""

    def names(all_places: tuple[str, ...]) -> tuple[str, ...]:
        last = max((i for i, place in enumerate(all_places) if place in places), default=-1)
        return tuple(place if place in places else "" for place in all_places[: last + 1])

    known = {"num_heads": H, "kv_num_heads": H, "causal": 1} | attributes
    return NodeInfo("attention", "GroupQueryAttention", "com.microsoft", names(INPUTS), names(OUTPUTS), known), places


def model_of(places: Places, **attributes: Any) -> onnx_ir.Model:
    """Return a graph of one node, whose places are its inputs and outputs."""
    info, _ = node_of(places, **attributes)
    values = {
        place: onnx_ir.Value(
            name=place, shape=onnx_ir.Shape(known.shape or ()), type=onnx_ir.TensorType(onnx_ir.DataType(known.dtype))
        )
        for place, known in places.items()
    }
    node = onnx_ir.Node(
        info.domain,
        info.op_type,
        [values.get(name) for name in info.inputs],
        [onnx_ir.AttrInt64(name, value) for name, value in info.attributes.items()],
        outputs=[values[name] if name else onnx_ir.Value() for name in info.outputs],
        name=info.name,
    )
    inputs, outputs = ([values[name] for name in names if name] for names in (info.inputs, info.outputs))
    graph = onnx_ir.Graph(inputs, outputs, nodes=[node], opset_imports={"": 20, "com.microsoft": 1}, name="main")
    return onnx_ir.Model(graph, ir_version=10)
