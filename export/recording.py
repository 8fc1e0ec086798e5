"""Recorded tensors: what a graph module computes with while it is traced, so that its own `forward` writes an ONNX graph.

A `Recorded` stands for a tensor that will be there when the graph runs. Whatever is done with it writes a node; what is done with
weights alone is done at once, in PyTorch. Sizes that are known at run time only are `Size`s. What is not known here is refused by
name, never guessed, and the gate compares every graph with PyTorch (see `proof.verify`).

PyTorch's own exporter writes the same graphs in 25 times as long: it takes each operator apart, checks every size with a computer
algebra system, and optimises what it has made by matching patterns.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import onnx_ir
import torch
from torch import Tensor, nn

OPSET_VERSION = 20
DTYPES = {
    torch.float32: onnx_ir.DataType.FLOAT,
    torch.float16: onnx_ir.DataType.FLOAT16,
    torch.bfloat16: onnx_ir.DataType.BFLOAT16,
    torch.int64: onnx_ir.DataType.INT64,
    torch.int32: onnx_ir.DataType.INT32,
    torch.bool: onnx_ir.DataType.BOOL,
}


class UnknownOperation(NotImplementedError):
    """Something that tracing cannot write; the message names it."""


class Size(int):
    """Size of a recorded tensor's axis, known at run time only; arithmetic with it raises, for it would make it a constant."""

    def __new__(cls, owner: "Recorded", axis: int, name: str | None = None) -> "Size":
        """Refer to an axis; the number that PyTorch's parsers see means nothing."""
        size = super().__new__(cls, 2)
        size.owner, size.axis, size.name = owner, axis, name or f"{owner.value.name}.{axis}"
        return size

    owner: "Recorded"
    axis: int
    name: str  # of the axis: an input's, or one made from who has it first

    def _refuse(self, *_: object) -> NoReturn:
        raise UnknownOperation(f"the size of axis {self.axis} is known at run time only, and cannot be reckoned with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _refuse
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = _refuse
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


Dim = int  # a Size where it is known at run time only


class Recorder:
    """Writes one graph."""

    def __init__(self, module: nn.Module) -> None:
        """Name constants as the module names its parameters and buffers."""
        self.graph = onnx_ir.Graph([], [], nodes=[], opset_imports={"": OPSET_VERSION, "com.microsoft": 1}, name="main")
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self._names = {_identity(tensor): name for name, tensor in tensors}
        self._constants: dict[object, onnx_ir.Value] = {}
        self._kept: list[Tensor] = []  # an identity is an address, which must not be given away
        self._written: dict[object, list[onnx_ir.Value]] = {}
        self._counts: dict[str, int] = {}
        self._body: onnx_ir.Graph | None = None

    def input(self, name: str, axes: Sequence[int | str], dtype: torch.dtype = torch.int64) -> "Recorded":
        """Add an input; axes whose size is known at run time only are given by name."""
        value = onnx_ir.Value(name=name, shape=onnx_ir.Shape(axes), type=onnx_ir.TensorType(DTYPES[dtype]))
        self.graph.inputs.append(value)
        return Recorded(self, value, axes, dtype)

    @contextmanager
    def body(self, name: str) -> Iterator[onnx_ir.Graph]:
        """Write into the body of a loop what depends on the body's inputs; what does not is written before the loop, once."""
        assert self._body is None, "a body has no body"
        self._body = onnx_ir.Graph([], [], nodes=[], name=name)
        try:
            yield self._body
        finally:
            self._body = None

    def output(self, name: str, result: "Recorded") -> None:
        """Add an output."""
        shape = [size.name if isinstance(size, Size) else size for size in result.shape]
        value = result.value
        assert not value.is_graph_output() and not value.is_graph_input() and not value.is_initializer(), "computed, and once"
        value.name, value.shape = name, onnx_ir.Shape(shape)
        self.graph.outputs.append(value)

    def emit(
        self, op_type: str, inputs: Sequence[Any], count: int = 1, *, domain: str = "", **attributes: Any
    ) -> list[onnx_ir.Value]:
        """Write a node, unless the same has been written; return its outputs.

        Args:
            op_type: The operator.
            inputs: Recorded tensors, constant tensors, values, and None where one is left out.
            count: How many outputs it has.
            domain: Of the operator.
            attributes: Of the node.
        """
        values = [self._value(x) for x in inputs]
        key = domain, op_type, tuple(map(id, values)), repr(sorted(attributes.items())), count
        if key not in self._written:
            number = self._counts[op_type] = self._counts.get(op_type, -1) + 1
            node = onnx_ir.node(op_type, values, attributes, domain=domain, num_outputs=count, name=f"{op_type}_{number}")
            for place, output in enumerate(node.outputs):
                output.name = f"{node.name}.out" if count == 1 else f"{node.name}.out.{place}"
            is_inside = self._body is not None and any(value is not None and value.graph is self._body for value in values)
            (self._body if self._body is not None and is_inside else self.graph).append(node)
            self._written[key] = list(node.outputs)
        return self._written[key]

    def constant(self, tensor: Tensor) -> onnx_ir.Value:
        """Return the initializer of a tensor; one of the same memory or, if it is small, content is shared."""
        key = _identity(tensor) if tensor.numel() > 8 else (str(tensor.dtype), tuple(tensor.shape), str(tensor.tolist()))
        if key not in self._constants:
            # A slice or a transposed matrix has no name of its own: it gets one from the node that reads it, see `tracing`.
            name = self._names.get(_identity(tensor)) or f"constant_{len(self._constants)}"
            dtype = DTYPES[tensor.dtype]
            value = onnx_ir.Value(
                name=name,
                const_value=onnx_ir.Tensor(_as_numpy(tensor.detach()), dtype=dtype, name=name),
                shape=onnx_ir.Shape(tensor.shape),
                type=onnx_ir.TensorType(dtype),
            )
            self.graph.register_initializer(value)
            self._kept.append(tensor)
            self._constants[key] = value
        return self._constants[key]

    def transposed(self, weight: Tensor) -> onnx_ir.Value:
        """Return the initializer of a matrix's transpose."""
        key = "transposed", _identity(weight)
        if key not in self._constants:
            self._kept.append(weight)
            self._constants[key] = self.constant(weight.detach().T.contiguous())
        return self._constants[key]

    def ints(self, *numbers: int) -> onnx_ir.Value:
        """Return a constant `[n]`."""
        return self.constant(torch.tensor(numbers, dtype=torch.int64))

    def size(self, size: Size) -> onnx_ir.Value:
        """Write a node that reads the size of an axis, `[1]` int64."""
        return self.emit("Shape", [size.owner], start=size.axis, end=size.axis + 1)[0]

    def shape(self, dims: Sequence[Dim]) -> onnx_ir.Value:
        """Write what makes a shape, `[rank]` int64."""
        if not any(isinstance(dim, Size) for dim in dims):
            return self.ints(*dims)
        parts: list[onnx_ir.Value | list[int]] = []
        for dim in dims:
            if isinstance(dim, Size):
                parts.append(self.size(dim))
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(dim)
            else:
                parts.append([dim])
        return self.emit("Concat", [self.ints(*part) if isinstance(part, list) else part for part in parts], axis=0)[0]

    def _value(self, x: Any) -> onnx_ir.Value | None:
        if isinstance(x, Recorded):
            assert x.recorder is self, "a graph reads its own values"
            return x.value
        return self.constant(x) if isinstance(x, Tensor) else x


class Recorded:
    """A tensor that will be there when the graph runs: as much of `torch.Tensor` as the graph modules use.

    Attributes:
        recorder: Of its graph.
        value: Its place in it.
        shape: Sizes of its axes, `Size`s where they are known at run time only.
        dtype: Of its elements.
        device: Where PyTorch would make tensors that are computed with it.
    """

    device = torch.device("cpu")

    def __init__(self, recorder: Recorder, value: onnx_ir.Value, shape: Sequence[Dim | str | None], dtype: torch.dtype) -> None:
        """Wrap a value; an axis that is a name, or None, is one whose size is known at run time only."""
        self.recorder = recorder
        self.value = value
        self.shape = tuple(Size(self, axis, dim) if dim is None or isinstance(dim, str) else dim for axis, dim in enumerate(shape))
        self.dtype = dtype
        if value.shape is None:  # ONNX Runtime fuses operators whose shapes it knows to agree
            value.shape = onnx_ir.Shape([dim.name if isinstance(dim, Size) else dim for dim in self.shape])
            value.dtype = DTYPES[dtype]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Be taken for a tensor by PyTorch's parsers; `functions.Functions` sees the call first."""
        raise UnknownOperation(f"{getattr(func, '__name__', func)} outside of tracing")

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what is not known."""
        raise (AttributeError if name.startswith("__") else UnknownOperation)(f"tracing does not know Tensor.{name}")

    def emit(
        self, op_type: str, inputs: Sequence[Any], shape: Sequence[Dim | None], dtype: torch.dtype | None = None, **attributes: Any
    ) -> "Recorded":
        """Write a node with one output, of this tensor's type unless another is given."""
        value = self.recorder.emit(op_type, inputs, **attributes)[0]
        return Recorded(self.recorder, value, shape, dtype or self.dtype)

    # Arithmetic

    def __add__(self, other: Any) -> "Recorded":
        """Add; nothing is written for 0."""
        return self if _is_number(other, 0) else self.binary("Add", other)

    def __sub__(self, other: Any) -> "Recorded":
        return self.binary("Sub", other)

    def __mul__(self, other: Any) -> "Recorded":
        """Multiply; nothing is written for 1."""
        return self if _is_number(other, 1) else self.binary("Mul", other)

    def __mod__(self, other: Any) -> "Recorded":
        """Divide whole numbers, and keep what is left over."""
        return self.binary("Mod", other)

    def __lt__(self, other: Any) -> "Recorded":
        return self.binary("Less", other, torch.bool)

    def __invert__(self) -> "Recorded":
        """Negate what is true or false."""
        assert self.dtype is torch.bool
        return self.emit("Not", [self], self.shape)

    def __matmul__(self, other: "Recorded | Tensor") -> "Recorded":
        """Multiply matrices, or matrices by a vector."""
        if len(other.shape) == 1:
            return self.emit("MatMul", [self, other], self.shape[:-1])
        batch = _broadcast(self.shape[:-2], other.shape[:-2])
        return self.emit("MatMul", [self, other], (*batch, self.shape[-2], other.shape[-1]))

    def to(self, dtype: torch.dtype) -> "Recorded":
        return self if dtype is self.dtype else self.emit("Cast", [self], self.shape, dtype, to=int(DTYPES[dtype]))

    def softmax(self, dim: int) -> "Recorded":
        return self.emit("Softmax", [self], self.shape, axis=dim)

    def log_softmax(self, dim: int) -> "Recorded":
        return self.emit("LogSoftmax", [self], self.shape, axis=dim)

    def mean(self, dim: int) -> "Recorded":
        """Average over an axis, which goes."""
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return self.emit("ReduceMean", [self, self.recorder.ints(dim)], shape, keepdims=0)

    def masked_fill(self, mask: "Recorded", number: float) -> "Recorded":
        filling = torch.tensor(number, dtype=self.dtype)
        return self.emit("Where", [mask, filling, self], _broadcast(self.shape, mask.shape))

    def index_fill(self, dim: int, index: Tensor, number: float) -> "Recorded":
        """Put a number at one place of the last axis; the runtime does it in the memory of the tensor it is done to."""
        assert dim == -1 and index.numel() == 1
        shape = (*self.shape[:-1], 1)
        constants = index.view(1), torch.tensor([number], dtype=self.dtype)
        places, numbers = (self.recorder.emit("Expand", [x, self.recorder.shape(shape)])[0] for x in constants)
        return self.emit("ScatterElements", [self, places, numbers], self.shape, axis=dim)

    def clamp(self, low: int, high: int) -> "Recorded":
        limits = (torch.tensor(number, dtype=self.dtype) for number in (low, high))
        return self.emit("Clip", [self, *limits], self.shape)

    def gather(self, dim: int, index: "Recorded") -> "Recorded":
        return self.emit("GatherElements", [self, index], index.shape, axis=dim)

    def scatter(self, dim: int, index: "Recorded", source: "Recorded") -> "Recorded":
        """Put elements at places along an axis, as many as there are places."""
        return self.emit("ScatterElements", [self, index, source], self.shape, axis=dim)

    # Shapes

    def transpose(self, first: int, second: int) -> "Recorded":
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self.permute(*order)

    def permute(self, *dims: int) -> "Recorded":
        return self.emit("Transpose", [self], [self.shape[axis] for axis in dims], perm=list(dims))

    def unsqueeze(self, dim: int) -> "Recorded":
        axis = dim % (len(self.shape) + 1)
        return self.emit("Unsqueeze", [self, self.recorder.ints(axis)], (*self.shape[:axis], 1, *self.shape[axis:]))

    def squeeze(self, dim: int) -> "Recorded":
        axis = dim % len(self.shape)
        assert self.shape[axis] == 1
        return self.emit("Squeeze", [self, self.recorder.ints(axis)], (*self.shape[:axis], *self.shape[axis + 1 :]))

    def expand(self, shape: Sequence[Dim]) -> "Recorded":
        return self.emit("Expand", [self, self.recorder.shape(shape)], shape)

    def view(self, shape: Sequence[Dim | None]) -> "Recorded":
        """Take another shape with as many elements, of which one size may be None: axes that stay are 0, and one is worked out."""
        dims: list[Dim] = []
        for axis, dim in enumerate(shape):
            is_kept = isinstance(dim, Size) and axis < len(self.shape) and dim is self.shape[axis] and axis == len(dims)
            is_left = (dim is None or isinstance(dim, Size)) and not is_kept and -1 not in dims
            assert dim is not None or is_left, "one size at the most is to be worked out"
            dims.append(0 if is_kept else -1 if is_left or dim is None else dim)
        return self.emit("Reshape", [self, self.recorder.shape(dims)], shape)

    def flatten(self, first: int = 0, last: int = -1) -> "Recorded":
        rank = len(self.shape)
        first, last = first % rank, last % rank
        merged = self.shape[first : last + 1]
        size = None if any(isinstance(dim, Size) for dim in merged) else int(np.prod(merged))
        return self.view((*self.shape[:first], size, *self.shape[last + 1 :]))

    def unflatten(self, dim: int, sizes: Sequence[Dim]) -> "Recorded":
        """Make several axes of one, of which one may be -1 if the size is known."""
        dim %= len(self.shape)
        split = list(sizes)
        if not isinstance(self.shape[dim], Size) and -1 in split:
            split[split.index(-1)] = self.shape[dim] // int(np.prod([size for size in split if size != -1]))
        return self.view((*self.shape[:dim], *split, *self.shape[dim + 1 :]))

    def chunk(self, chunks: int, dim: int) -> list["Recorded"]:
        """Split an axis of known size into equal parts."""
        axis = dim % len(self.shape)
        assert self.shape[axis] % chunks == 0
        shape = (*self.shape[:axis], self.shape[axis] // chunks, *self.shape[axis + 1 :])
        values = self.recorder.emit("Split", [self], chunks, axis=axis, num_outputs=chunks)
        return [Recorded(self.recorder, value, shape, self.dtype) for value in values]

    def __getitem__(self, places: Any) -> "Recorded":
        """Take whole axes, beginnings of axes, and new axes of size 1."""
        result = self
        for axis, place in enumerate(places if isinstance(places, tuple) else (places,)):
            if place is None:
                result = result.unsqueeze(axis)
            elif not isinstance(place, slice) or place.start is not None or place.step is not None:
                raise UnknownOperation(f"tracing does not know Tensor[{place}]")
            elif place.stop is not None:
                ints = result.recorder.ints
                shape = (*result.shape[:axis], place.stop, *result.shape[axis + 1 :])
                result = result.emit("Slice", [result, ints(0), ints(place.stop), ints(axis)], shape)
        return result

    def binary(self, op_type: str, other: Any, dtype: torch.dtype | None = None) -> "Recorded":
        """Write a node of two operands of one type; a number becomes a constant of this tensor's."""
        if isinstance(other, int | float) and not isinstance(other, Size):
            other = torch.tensor(other, dtype=self.dtype)
        if not isinstance(other, Tensor | Recorded) or other.dtype is not self.dtype:
            raise UnknownOperation(f"{op_type} of {self.dtype} and {getattr(other, 'dtype', type(other))}")
        return self.emit(op_type, [self, other], _broadcast(self.shape, tuple(other.shape)), dtype)


def write_node(
    op_type: str,
    inputs: Sequence[Any],
    shapes: Sequence[Sequence[Dim | str]],
    dtypes: Sequence[torch.dtype],
    *,
    domain: str = "",
    **attributes: int | float | str,
) -> list[Any]:
    """Write a node that PyTorch has no function for; return its outputs.

    Args:
        op_type: The operator.
        inputs: Recorded tensors, though the graph modules take them for tensors; None where one is left out.
        shapes: Of the outputs; an axis whose size only this node knows is given a name.
        dtypes: Of the outputs.
        domain: Of the operator.
        attributes: Of the node.
    """
    recorder = next(x.recorder for x in inputs if isinstance(x, Recorded))
    values = recorder.emit(op_type, inputs, len(shapes), domain=domain, **attributes)
    return [Recorded(recorder, *fields) for fields in zip(values, shapes, dtypes, strict=True)]


def axis_size(x: Tensor, axis: int) -> Any:
    """Write a node that reads the size of one axis, `[1]` int32."""
    assert isinstance(x, Recorded)
    size = Recorded(x.recorder, x.recorder.emit("Shape", [x], start=axis, end=axis + 1)[0], (1,), torch.int64)
    return size.to(torch.int32)


def _is_number(x: object, number: int) -> bool:
    return isinstance(x, int | float) and not isinstance(x, Size) and x == number


def _broadcast(left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the shape of what comes of two; sizes known at run time only are taken to agree."""
    rank = max(len(left), len(right))
    pairs = zip((1,) * (rank - len(left)) + tuple(left), (1,) * (rank - len(right)) + tuple(right), strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what two views of the same numbers have in common."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _as_numpy(tensor: Tensor) -> Any:
    """Return an array on the same memory; NumPy has bfloat16 from another library."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(DTYPES[tensor.dtype].numpy())
    return tensor.numpy()
