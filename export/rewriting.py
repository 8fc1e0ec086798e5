"""Rewrites of traced graphs for ONNX Runtime on the CPU, with the same results, and helpers for rewriting graphs.

Where a decode step is asked for one candidate it searches in blocks. ONNX Runtime compares one number after the other in TopK and
ArgMax; its ReduceMax is several times as fast, but returns no place. So it returns the largest of every block, and ArgMax searches
those and one block: for 64 rows of 32,000 tokens that takes a seventh of the time. The result is the same: the likeliest token, of
equals the lowest id.
"""

from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import DTypeLike, NDArray
from onnx_ir import Graph, Model, Node, Value

from dragoman.export.tensors import LOG_PROBS_OUTPUT

# Blocks of fewer numbers, or fewer blocks, gain nothing.
MIN_BLOCK = 8


class Writer:
    """Writes nodes into a graph before a given one, and constants that are shared by name."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph = graph
        self.before = before

    def node(self, op_type: str, *inputs: Value | None, domain: str = "", **attributes: Any) -> Value:
        """Write a node with one output and return that."""
        node = onnx_ir.node(op_type, inputs, attributes, domain=domain)
        number = sum(1 for _ in self.graph)
        node.name = f"{op_type}_q{number}"
        node.outputs[0].name = f"{op_type}_q{number}_out"
        self.graph.insert_before(self.before, node)
        return node.outputs[0]

    def constant(self, name: str, array: NDArray[Any]) -> Value:
        """Return the initializer of this name, made with this content if it is not there."""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = onnx_ir.tensor(array, name=name)
        value = Value(name=name, const_value=tensor, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype))
        self.graph.register_initializer(value)
        return value

    def scalar(self, number: float, dtype: DTypeLike = np.float32) -> Value:
        """Return a scalar constant."""
        array = np.array(number, dtype)
        return self.constant(f"{array.dtype.name}.{array!s}", array)


def constant_of(value: Value) -> NDArray[Any] | None:
    """Return what an initializer holds, or None where a value is computed."""
    if not value.is_initializer() or value.const_value is None:
        return None
    array: NDArray[Any] = value.const_value.numpy()
    return array


def only_user(value: Value) -> Node | None:
    """Return the one node that reads a value, or None where there are others or the graph gives it out."""
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def keep_sums_apart(model: Model) -> None:
    """Write the residual sum before a layer norm as `Sum`, which ONNX Runtime does not fuse with it.

    The fused operator, SkipLayerNormalization, takes 8 times as long as the two on the CPU (ONNX Runtime 1.31: 165 µs instead of
    20 µs for 64 rows of 512, one thread).
    """
    for node in model.graph:
        if node.op_type == "LayerNormalization" and node.inputs[0] is not None:
            add = node.inputs[0].producer()
            if add is not None and add.op_type == "Add":
                add.op_type = "Sum"


def keep_time_axis(model: Model) -> None:
    """Give all rows of a decode step the time axis that attention asks for, `[N, 1, …]`, instead of adding and dropping it there.

    Every axis added or dropped is a node, and a node costs 2 µs even where it moves nothing. Products must be of a kind that takes
    inputs of any rank; Gemm does not.
    """
    graph = model.graph
    axis = _drop_axis_changes(graph)
    if axis is None:
        return
    longer: dict[Value, Value] = {}
    for node in list(graph):
        index = node.inputs[1] if node.op_type == "Gather" else None
        if index is None or index.shape is None or len(index.shape) != 1:
            continue
        if index not in longer:
            longer[index] = Writer(graph, node).node("Unsqueeze", index, axis)
        node.replace_input_with(1, longer[index])
    for node in list(graph):
        if node.op_type == "LogSoftmax":
            logits = node.inputs[0]
            assert logits is not None
            last = logits.producer()
            assert last is not None, "logits are computed"
            # The other factor of a row's scale must keep the scale's axis.
            reader = node if last.op_type == "Mul" else last
            longer_value = reader.inputs[0]
            assert longer_value is not None
            reader.replace_input_with(0, Writer(graph, reader).node("Squeeze", longer_value, axis))
    for node in graph:  # the shapes between inputs and outputs are no longer those that tracing saw
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None


def _drop_axis_changes(graph: Graph) -> Value | None:
    """Take out every node that adds or drops axis 1, but of positions; return the constant that says which axis."""
    axis = None
    for node in list(graph):
        if node.op_type not in ("Unsqueeze", "Squeeze"):
            continue
        if len(node.inputs) == 1:  # the size of an axis
            continue
        source, axes = node.inputs
        assert source is not None and axes is not None
        array = constant_of(axes)
        if array is not None and array.tolist() == [1] and not source.is_graph_input():
            axis = axes
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], source)
            graph.remove(node, safe=True)
    return axis


def choose_one_in_blocks(model: Model) -> None:
    """Give a decode step's TopK a second way, for K = 1; a vocabulary that cannot be cut into equal blocks is left as it is."""
    graph = model.graph
    top = next(node for node in graph if node.op_type == "TopK")
    log_probs, num_candidates = top.inputs
    assert log_probs is not None and num_candidates is not None and log_probs.shape is not None
    num_choices = log_probs.shape[1]
    assert isinstance(num_choices, int), "the vocabulary is known"
    size = block_size(num_choices)
    if size is None:
        return
    writer = Writer(graph, top)
    is_one = writer.node("Equal", num_candidates, writer.constant("one_candidate", np.array([1], np.int64)))
    one, many = _one(writer, log_probs, num_choices, size), _many(log_probs, num_candidates)
    choice = onnx_ir.node("If", [is_one], {"then_branch": one, "else_branch": many}, num_outputs=2, name="If_0")
    graph.insert_before(top, choice)
    for old, new in zip(top.outputs, choice.outputs, strict=True):
        _take_place(new, old)
    graph.remove(top, safe=True)


def skip_log_probs(model: Model) -> None:
    """Let a decode step with one candidate or more give the log-probabilities of all tokens, too, and compute none for 0.

    Then it gives the token with the largest logit, which saves all passes over the vocabulary but one.
    """
    graph = model.graph
    softmax = next(node for node in graph if node.op_type == "LogSoftmax")
    choice = next(node for node in graph if node.op_type in ("TopK", "If"))
    logits, log_probs = softmax.inputs[0], softmax.outputs[0]
    assert logits is not None
    masks = [user for user, _ in log_probs.uses() if user.op_type == "ScatterElements"]  # padding, which is no candidate
    writer, [number] = Writer(graph, softmax), [value for value in graph.inputs if value.name == "num_candidates"]
    is_none = writer.node("Equal", number, writer.constant("no_candidate", np.array([0], np.int64)))
    none = _Branch("none")
    for mask in masks:
        log_probs = mask.outputs[0]
        logits = none.node("ScatterElements", logits, *mask.inputs[1:], axis=-1)
    ids = _likeliest(none, writer, logits)[0] if "blocks" in graph.initializers else none.node("ArgMax", logits, axis=1)
    zeros = none.node("ConstantOfShape", none.node("Shape", ids))
    of_none = none.graph(zeros, ids, none.node("ConstantOfShape", writer.constant("empty", np.zeros(2, np.int64))))
    either = onnx_ir.node("If", [is_none], {"then_branch": of_none}, num_outputs=3, name="If_log_probs")
    graph.insert_before(choice, either)
    for new, old in zip(either.outputs, choice.outputs, strict=False):
        _take_place(new, old)
    told = either.outputs[2]
    told.name, told.type, told.shape = LOG_PROBS_OUTPUT, log_probs.type, onnx_ir.Shape(["told_rows", "told_tokens"])
    graph.outputs.append(told)
    moved = [softmax, *masks, choice]
    graph.remove(moved)
    some = Graph([], [*choice.outputs, log_probs], nodes=moved, name="some")
    either.attributes.add(onnx_ir.AttrGraph("else_branch", some))


def _take_place(new: Value, old: Value) -> None:
    """Let a value take the place and the name of another."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    old.name = f"{old.name}.former"
    onnx_ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def block_size(num_choices: int) -> int | None:
    """Return the divisor of the number of choices that is nearest to its root, or None where none is near enough."""
    divisors = [size for size in range(MIN_BLOCK, num_choices // MIN_BLOCK + 1) if num_choices % size == 0]
    return min(divisors, key=lambda size: size + num_choices // size, default=None)


def _one(writer: Writer, log_probs: Value, num_choices: int, size: int) -> Graph:
    """Return the graph that finds the likeliest token of each row `[N, V]`: its log-probability and its id, `[N, 1]` each."""
    writer.constant("blocks", np.array([0, num_choices // size, size], np.int64))
    writer.constant("block_size", np.array(size, np.int64))
    branch = _Branch("one")
    ids, within = _likeliest(branch, writer, log_probs)
    first = writer.constant("axis_1", np.array([1], np.int64))
    return branch.graph(branch.node("ReduceMax", within, first), ids)


def _likeliest(branch: "_Branch", writer: Writer, numbers: Value) -> tuple[Value, Value]:
    """Write the search in the blocks that the graph's constants describe; return the ids `[N, 1]`, and the block of each."""
    constants = writer.graph.initializers
    blocks = branch.node("Reshape", numbers, constants["blocks"])
    last = writer.constant("axis_2", np.array([2], np.int64))
    block = branch.node("ArgMax", branch.node("ReduceMax", blocks, last, keepdims=0), axis=1)
    within = branch.node("GatherND", blocks, block, batch_dims=1)
    place = branch.node("ArgMax", within, axis=1)
    return branch.node("Add", branch.node("Mul", block, constants["block_size"]), place), within


def _many(log_probs: Value, num_candidates: Value) -> Graph:
    """Return the graph that finds any number of candidates."""
    node = onnx_ir.node("TopK", [log_probs, num_candidates], {"axis": -1}, num_outputs=2, name="TopK_0")
    for output, name in zip(node.outputs, ("values", "ids"), strict=True):
        output.name = f"many.{name}"
    return _typed(Graph([], list(node.outputs), nodes=[node], name="many"))


class _Branch:
    """Writes the nodes of one branch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []

    def node(self, op_type: str, *inputs: Value | None, **attributes: int) -> Value:
        """Write a node with one output and return that."""
        name = f"{self.name}.{len(self.nodes)}"
        node = onnx_ir.node(op_type, inputs, attributes, name=name)
        node.outputs[0].name = f"{name}.out"
        self.nodes.append(node)
        return node.outputs[0]

    def graph(self, log_probs: Value, ids: Value, *more: Value) -> Graph:
        """Return the branch, which gives log-probabilities and ids, and more log-probabilities."""
        return _typed(Graph([], [log_probs, ids, *more], nodes=self.nodes, name=self.name))


def _typed(graph: Graph) -> Graph:
    """Say of what type a branch's outputs are; a branch has to."""
    for place, value in enumerate(graph.outputs):
        value.type = onnx_ir.TensorType(onnx_ir.DataType.INT64 if place == 1 else onnx_ir.DataType.FLOAT)
    return graph
