"""Nodes and tensors of a graph's file, read with protobuf alone: the server has no ONNX library.

Of ONNX's format only the fields are declared that are asked for here; the parser skips the others, weights among them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from dragoman.export.fields import BundleError
from dragoman.model.files import read_given

MAX_GRAPH_FILE_BYTES = 1 << 28
"""Of a graph without its weights; one of 512 layers takes a few megabytes."""

FLOAT, INT8, INT32, INT64, FLOAT16, BFLOAT16 = 1, 3, 6, 7, 10, 16
"""ONNX's numbers of some types."""
_BITS = {FLOAT: 32, 2: 8, INT8: 8, 4: 16, 5: 16, INT32: 32, INT64: 64, 9: 8, FLOAT16: 16, 11: 64, 12: 32, 13: 64, BFLOAT16: 16}
_ATTRIBUTE_FIELDS = {1: "f", 2: "i", 3: "s"}

_Kind = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Kind.TYPE_INT32,
    "int64": _Kind.TYPE_INT64,
    "float": _Kind.TYPE_FLOAT,
    "bytes": _Kind.TYPE_BYTES,
    "text": _Kind.TYPE_BYTES,
}
# Message: its fields by name, number and type; "*" marks those that may stand several times.
_MESSAGES: Mapping[str, str] = {
    "Model": "graph 7 Graph",
    "Graph": "node 1 *Node, initializer 5 *Tensor, input 11 *Value, output 12 *Value, value_info 13 *Value",
    "Node": "input 1 *text, output 2 *text, name 3 text, op_type 4 text, attribute 5 *Attribute, domain 7 text",
    "Attribute": "name 1 text, f 2 float, i 3 int64, s 4 bytes, g 6 Graph, graphs 11 *Graph, type 20 int32",
    "Tensor": "dims 1 *int64, data_type 2 int32, name 8 text",
    "Value": "name 1 text, type 2 Type",
    "Type": "tensor_type 1 TensorType",
    "TensorType": "elem_type 1 int32, shape 2 Shape",
    "Shape": "dim 1 *Dim",
    "Dim": "dim_value 1 int64, dim_param 2 text",
}
_PACKAGE = "dragoman_graph_file"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor."""

    dtype: int = 0  # ONNX's number of its type; 0 where the file does not say
    # Its sizes, names where they are known at run time only; None where the file does not say.
    shape: tuple[int | str, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node; an input that is left out has an empty name."""

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)  # its numbers and texts, by name


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A graph."""

    nodes: tuple[NodeInfo, ...]  # all of them, those of branches and loops too
    tensors: Mapping[str, TensorInfo]  # tensors by name
    num_weight_bytes: int  # size of its weights, wherever they are

    @classmethod
    def read(cls, path: Path) -> "GraphFile":
        """Read a file.

        Raises:
            BundleError: If it is not there, or no graph.
        """
        model = _Model()
        content = read_given(path, MAX_GRAPH_FILE_BYTES, BundleError)
        try:
            model.ParseFromString(content)
            return cls._of(model.graph)
        except (DecodeError, ValueError) as error:
            raise BundleError(f"{path}: not an ONNX graph") from error

    @classmethod
    def _of(cls, root: Any) -> "GraphFile":
        nodes: list[NodeInfo] = []
        tensors: dict[str, TensorInfo] = {}
        num_bits = 0
        for graph in _graphs(root):
            nodes += [_node(node) for node in graph.node]
            tensors |= {_text(value.name): _info(value) for value in (*graph.input, *graph.value_info, *graph.output)}
            for weight in graph.initializer:
                tensors[_text(weight.name)] = TensorInfo(weight.data_type, tuple(weight.dims))
                num_bits += _BITS.get(weight.data_type, 0) * math.prod(weight.dims)
        return cls(tuple(nodes), tensors, num_bits // 8)


def _graphs(root: Any) -> Iterator[Any]:
    """Yield a graph and those within its nodes."""
    yield root
    for node in root.node:
        for attribute in node.attribute:
            for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _graphs(graph)


def _node(node: Any) -> NodeInfo:
    attributes: dict[str, int | float | str] = {}
    for attribute in node.attribute:
        if (place := _ATTRIBUTE_FIELDS.get(attribute.type)) is not None:
            value = getattr(attribute, place)
            attributes[_text(attribute.name)] = _text(value) if isinstance(value, bytes) else value
    names = tuple(map(_text, node.input)), tuple(map(_text, node.output))
    return NodeInfo(_text(node.name), _text(node.op_type), _text(node.domain), *names, attributes)


def _info(value: Any) -> TensorInfo:
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else _text(dim.dim_param) for dim in tensor.shape.dim)
    return TensorInfo(tensor.elem_type, shape)


def _text(name: bytes) -> str:
    return name.decode("utf-8")


def _message_class() -> Any:
    """Return the class of a model's message, of a pool of its own: an ONNX library may have declared the format elsewhere."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message)
        for entry in fields.split(", "):
            name, number, kind = entry.split()
            label = _Kind.LABEL_REPEATED if kind.startswith("*") else _Kind.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            added = declared.field.add(name=name, number=int(number), label=label)
            if kind in _SCALARS:
                added.type = _SCALARS[kind]
            else:
                added.type, added.type_name = _Kind.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))


_Model = _message_class()
