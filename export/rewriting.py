"""Small tools for passes over ONNX graphs: read constants, write nodes. What a pass is for, it says itself."""

from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import DTypeLike, NDArray
from onnx_ir import Graph, Node, Value


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
