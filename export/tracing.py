"""From a graph module to an ONNX file: record what it computes, fold the output bias, name everything by its place.

The bytes written depend on the weights and the libraries' versions alone: no time, no path and no stack trace is left in them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from onnx_ir.traversal import RecursiveGraphIterator
from torch import nn

from dragoman.export.cuda_contract import INPUTS, OPERATOR
from dragoman.export.functions import Functions
from dragoman.export.recording import Recorder
from dragoman.export.tensors import Tensors

IR_VERSION = 10
# Tensors of at most this many bytes stay in the graph's own file: shapes and scalars.
MAX_INLINE_BYTES = 256
HALVES = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
PAST_KEY = INPUTS.index("past_key")
"""Where an attention node has its past keys, if it has any."""


class GraphModule(nn.Module):
    """A traced module, which computes the same as its graph."""

    part: Literal["encoder", "decoder", "scorer"]  # which of the graphs of its model it is
    tensors: Tensors  # names of the inputs and outputs of all of them
    axes: Mapping[str, Sequence[int | str]]  # of inputs that `forward` takes by their names; names of axes are sizes at run time

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs."""
        names: list[str] = getattr(self.tensors, f"{self.part}_inputs")
        return names

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs."""
        names: list[str] = getattr(self.tensors, f"{self.part}_outputs")
        return names

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        """Add the graph's inputs; return them as `forward` takes them."""
        return {name: recorder.input(name, self.axes[name]) for name in self.input_names}


def trace(module: GraphModule) -> onnx_ir.Model:
    """Return a module's ONNX graph, its weights still shared with the module.

    Raises:
        UnknownOperation: If the module does something that `recording` cannot write.
    """
    recorder = Recorder(module.eval())
    with torch.no_grad(), Functions():
        results = module(**module.inputs(recorder))
    for name, result in zip(module.output_names, results, strict=True):
        recorder.output(name, result)
    model = onnx_ir.Model(recorder.graph, ir_version=IR_VERSION, producer_name="dragoman")
    _fold_output_bias(model.graph)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    _drop_unused_outputs(model.graph)
    _name_nodes(model.graph)
    assert input_output_names(model) == (module.input_names, module.output_names), "tracing dropped an input or an output"
    return model


def input_output_names(model: onnx_ir.Model) -> tuple[list[str], list[str]]:
    """Return the names of a graph's inputs and of its outputs."""
    return [str(value.name) for value in model.graph.inputs], [str(value.name) for value in model.graph.outputs]


def write(model: onnx_ir.Model, graph_path: Path, weights_name: str) -> None:
    """Write a graph and, in one file beside it, its weights."""
    onnx_ir.save(model, graph_path, external_data=weights_name, size_threshold_bytes=MAX_INLINE_BYTES)


def _fold_output_bias(graph: onnx_ir.Graph) -> None:
    """Turn a Gemm and the constant added to its result into one Gemm: the padding logits join the output bias."""
    for node in list(graph):
        if node.op_type != "Add" or node.domain:
            continue
        left, constant = node.inputs
        assert left is not None and constant is not None
        gemm = left.producer()
        if gemm is None or gemm.op_type != "Gemm" or len(left.uses()) != 1 or constant.const_value is None:
            continue
        array = constant.const_value.numpy()
        if len(gemm.inputs) == 3 and gemm.inputs[2] is not None:
            bias = gemm.inputs[2].const_value
            assert bias is not None, "the output bias is a weight"
            array = bias.numpy() + array
        folded = onnx_ir.Value(name=f"{constant.name}.folded", const_value=onnx_ir.tensor(np.ascontiguousarray(array)))
        folded.shape, folded.dtype = onnx_ir.Shape(array.shape), onnx_ir.DataType.FLOAT
        graph.register_initializer(folded)
        gemm.resize_inputs(3)
        gemm.replace_input_with(2, folded)
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], left)
        graph.remove(node, safe=True)


def _drop_unused_outputs(graph: onnx_ir.Graph) -> None:
    """Drop trailing outputs that nothing reads, so that the operator does not compute and allocate them.

    Attention in halves keeps its present keys and values where it has no past: CUDA's kernel computes with them.
    """
    for node in graph:
        if node.op_type == OPERATOR and node.inputs[PAST_KEY] is None and node.outputs[0].dtype in HALVES:
            continue
        used = [i for i, value in enumerate(node.outputs) if value.uses() or value.is_graph_output()]
        node.resize_outputs(max(used, default=0) + 1)


def _name_nodes(graph: onnx_ir.Graph) -> None:
    """Name nodes by their operator and place, and weights that have no name of their own by the node that reads them."""
    counts: dict[str, int] = {}
    for node in RecursiveGraphIterator(graph):
        index = counts[node.op_type] = counts.get(node.op_type, -1) + 1
        node.name = f"{node.op_type}_{index}"
        for place, source in enumerate(node.inputs):
            if source is not None and source.is_initializer() and "." not in str(source.name):
                source.name = f"{node.name}.{place}"
