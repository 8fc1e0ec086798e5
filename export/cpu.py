"""Rewrites that make a traced graph faster on ONNX Runtime's CPU provider, and leave what it computes alone."""

import onnx_ir
from onnx_ir import Graph, Model, Value

from dragoman.export.rewriting import Writer, constant_of


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
            # What a row's own scale is multiplied with has to keep the axis that the scale has.
            reader = node if last.op_type == "Mul" else last
            longer_value = reader.inputs[0]
            assert longer_value is not None
            reader.replace_input_with(0, Writer(graph, reader).node("Squeeze", longer_value, axis))
    _forget_shapes(graph)


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


def _forget_shapes(graph: Graph) -> None:
    """Drop the shapes of what lies between inputs and outputs, which are no longer those that tracing saw."""
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
