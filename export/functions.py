"""ONNX nodes of PyTorch functions on recorded tensors, and of a loop over the positions of a sequence."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dragoman.export.recording import Dim, Recorded, Size, UnknownOperation

POSITION_AXIS = 1
Step = Callable[[list[Any], list[Any]], tuple[Sequence[Any], Sequence[Any]]]


class Functions(TorchFunctionMode):
    """While entered, functions of recorded tensors and sizes write nodes; those of weights alone are computed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Write or compute one call.

        Raises:
            UnknownOperation: If the function is not known.
        """
        kwargs = kwargs or {}
        if not any(isinstance(x, Recorded | Size) for x in _leaves((args, *kwargs.values()))):
            return func(*args, **kwargs)
        write = WRITERS.get(func)
        if write is None:
            raise UnknownOperation(f"tracing does not know {getattr(func, '__name__', func)}")
        return write(*args, **kwargs)


def _leaves(x: object) -> Iterable[object]:
    if isinstance(x, tuple | list):
        for part in x:
            yield from _leaves(part)
    else:
        yield x


def _arange(size: Size, device: torch.device | None = None) -> Recorded:
    """Count from 0 up to the size of an axis."""
    recorder = size.owner.recorder
    zero, one = (torch.tensor(number, dtype=torch.int64) for number in (0, 1))
    stop = recorder.emit("Squeeze", [recorder.size(size)])[0]
    return Recorded(recorder, recorder.emit("Range", [zero, stop, one])[0], (size,), torch.int64)


def _embedding(ids: Recorded, weight: Tensor, *_: object, **__: object) -> Recorded:
    """Look up rows of a table."""
    return ids.emit("Gather", [weight, ids], (*ids.shape, weight.shape[1]), weight.dtype, axis=0)


def _linear(x: Recorded, weight: Tensor, bias: Tensor | None = None) -> Recorded:
    """Multiply by a transposed matrix: rows without a time axis by it as it is, others by a copy, which Gemm does not take."""
    shape = (*x.shape[:-1], weight.shape[0])
    if len(x.shape) == 2:
        return x.emit("Gemm", [x, weight] if bias is None else [x, weight, bias], shape, transB=1)
    product = x.emit("MatMul", [x, x.recorder.transposed(weight)], shape)
    return product if bias is None else product + bias


def _layer_norm(
    x: Recorded, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Recorded:
    """Normalise the last axis."""
    if len(normalized_shape) != 1 or weight is None or bias is None:
        raise UnknownOperation("tracing knows a layer norm of one axis, with weight and bias")
    return x.emit("LayerNormalization", [x, weight, bias], x.shape, axis=-1, epsilon=eps)


def _rms_norm(x: Recorded, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Recorded:
    """Normalise the last axis by its root mean square, with the runtime's own operator, which stands in ONNX's name space."""
    if len(normalized_shape) != 1 or weight is None or eps is None:
        raise UnknownOperation("tracing knows an RMS norm of one axis, with weight and epsilon")
    return x.emit("SimplifiedLayerNormalization", [x, weight], x.shape, axis=-1, epsilon=eps, stash_type=1)


def _elementwise(op_type: str) -> Callable[..., Recorded]:
    return lambda x, inplace=False: x.emit(op_type, [x], x.shape)


def _gelu(x: Recorded, approximate: str = "none") -> Recorded:
    return x.emit("Gelu", [x], x.shape, approximate=approximate)


def _silu(x: Recorded, inplace: bool = False) -> Recorded:
    return x.binary("Mul", x.emit("Sigmoid", [x], x.shape))


def _where(condition: Recorded, x: Recorded, y: Recorded) -> Recorded:
    """Take from one tensor where something holds, from the other, of the same shape, where it does not."""
    return x.emit("Where", [condition, x, y], x.shape)


def _cat(tensors: Sequence[Recorded], dim: int = 0) -> Recorded:
    """Put tensors side by side on an axis."""
    first = tensors[0]
    axis = dim % len(first.shape)
    if len(tensors) == 1:
        return first
    sizes = [x.shape[axis] for x in tensors]
    size = None if any(isinstance(size, Size) for size in sizes) else sum(sizes)
    return first.emit("Concat", tensors, (*first.shape[:axis], size, *first.shape[axis + 1 :]), axis=axis)


def _stack(tensors: Sequence[Recorded], dim: int = 0) -> Recorded:
    """Put tensors side by side on a new axis."""
    first = tensors[0]
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return first.emit("Concat", [x.unsqueeze(dim) for x in tensors], shape, axis=dim)


WRITERS: dict[Callable[..., Any], Callable[..., Recorded]] = {
    torch.arange: _arange,
    F.embedding: _embedding,
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.relu: _elementwise("Relu"),
    F.gelu: _gelu,
    F.silu: _silu,
    torch.tanh: _elementwise("Tanh"),
    torch.sigmoid: _elementwise("Sigmoid"),
    torch.where: _where,
    torch.cat: _cat,
    torch.stack: _stack,
}


def scan(step: Step, states: Sequence[Any], sequences: Sequence[Any]) -> list[Any]:
    """Run a step at one position after the other.

    Args:
        step: Takes states, and what each sequence has at a position, `[B, …]`; gives the states after it, and results. It may read
            whatever lies outside; what does not depend on the position is computed once, before the loop.
        states: Before the first position, recorded tensors though the graph modules take them for tensors, as the sequences.
        sequences: `[B, T, …]`, at least one.

    Returns:
        The results of all positions, `[B, T, …]` each.
    """
    recorder = sequences[0].recorder
    with recorder.body("step") as body:
        before = [_input(body, f"state.{place}", state, state.shape) for place, state in enumerate(states)]
        read = [_input(body, f"read.{place}", x, _without_positions(x)) for place, x in enumerate(sequences)]
        after, results = step(before, read)
    body.outputs.extend(x.value for x in (*after, *results))
    assert all(value.graph is body and not value.is_graph_input() for value in body.outputs), "a step computes what it gives"
    attributes = {
        "body": body,
        "num_scan_inputs": len(sequences),
        "scan_input_axes": [POSITION_AXIS] * len(sequences),
        "scan_output_axes": [POSITION_AXIS] * len(results),
    }
    values = recorder.emit("Scan", [*states, *sequences], len(body.outputs), **attributes)
    num_positions = sequences[0].shape[POSITION_AXIS]
    return [
        Recorded(recorder, value, [*map(_name, (x.shape[0], num_positions, *x.shape[1:]))], x.dtype)
        for value, x in zip(values[len(states) :], results, strict=True)
    ]


def _input(body: onnx_ir.Graph, name: str, x: Recorded, shape: Sequence[Dim]) -> Recorded:
    """Add an input to a body."""
    value = onnx_ir.Value(name=f"{body.name}.{name}", type=x.value.type)
    body.inputs.append(value)
    return Recorded(x.recorder, value, [_name(dim) for dim in shape], x.dtype)


def _without_positions(x: Recorded) -> tuple[Dim, ...]:
    return (*x.shape[:POSITION_AXIS], *x.shape[POSITION_AXIS + 1 :])


def _name(dim: Dim) -> int | str:
    """Return a size, or the name of one that is known at run time only."""
    return dim.name if isinstance(dim, Size) else dim
