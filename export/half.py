"""A model in half precision: which of its tensors are halved, which stay single, and how its logits' weights are stored.

Halved: token tables, projections and norms, and with them activations and caches. Single: what little a half spoils — the sum of
token and position embeddings, the norm after it, the output bias, the product that gives the logits, log-probabilities. What that
product multiplies are halves, so that a GPU computes it in TF32 without rounding them again.

Between RMS norms the residual stream is single, too, and so are the products that add to it most, those that leave the feed-forward
layers: in large T5 models both are beyond what a half can hold (Transformers keeps the same products single).
"""

import copy

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray

from dragoman.model.errors import InputError
from dragoman.model.networks.transformer import Transformer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_STORED = {torch.float16: onnx_ir.DataType.FLOAT16, torch.bfloat16: onnx_ir.DataType.BFLOAT16}
_SINGLE_BETWEEN_RMS_NORMS = ("feed_forward.outer.weight", "feed_forward.outer.bias")
_SINGLE = ("embedding.positions", "embedding.norm.weight", "embedding.norm.bias", "output_bias")


class HalfError(InputError):
    """A model that half precision cannot hold; the message names the tensor."""


def halved(model: Transformer, dtype: torch.dtype) -> Transformer:
    """Return a copy that computes in half precision; what needs single precision, the Transformer computes so by itself.

    Args:
        model: In single precision, which is left as it is.
        dtype: `torch.float16` or `torch.bfloat16`.

    Raises:
        HalfError: If a weight is beyond the type's range.
    """
    half = copy.deepcopy(model)
    single = _SINGLE + (_SINGLE_BETWEEN_RMS_NORMS if model.encoder.embedding.is_stream_single else ())
    for name, parameter in half.named_parameters():
        if name.endswith(single):
            continue
        values = parameter.detach().to(dtype)
        if not torch.isfinite(values).all():
            raise HalfError(f"{name} has values beyond {torch.finfo(dtype).max:g}, the largest number of {dtype}; try bf16")
        parameter.data = values
    return half.eval()


def store_halved(model: onnx_ir.Model, dtype: torch.dtype) -> None:
    """Store single-precision matrices that are halves in truth as halves; the runtime widens them once, when it loads them.

    One that the graph has as halves already, as a token table that is the output projection too, is not stored again.
    """
    graph, stored = model.graph, _STORED[dtype]
    halves = [value for value in graph.initializers.values() if _tensor_of(value).dtype == stored]
    for value in list(graph.initializers.values()):
        if _tensor_of(value).dtype != onnx_ir.DataType.FLOAT or len(_tensor_of(value).shape) != 2:
            continue
        single = torch.from_numpy(_tensor_of(value).numpy().copy())
        if not torch.equal(single.to(dtype).float(), single):
            continue
        bits = single.to(dtype).view(torch.uint16).numpy()
        narrow = next((half for half in halves if _has_bits(half, bits)), None)
        if narrow is None:
            tensor = onnx_ir.Tensor(bits.view(stored.numpy()), dtype=stored)
            narrow = onnx_ir.Value(
                name=f"{value.name}.half", const_value=tensor, shape=value.shape, type=onnx_ir.TensorType(stored)
            )
            graph.register_initializer(narrow)
        _widen(graph, narrow, value)


def _widen(graph: onnx_ir.Graph, narrow: onnx_ir.Value, value: onnx_ir.Value) -> None:
    """Let everything read a cast of a halved weight instead of the single one, which goes."""
    cast = onnx_ir.node("Cast", [narrow], {"to": onnx_ir.DataType.FLOAT})
    wide = cast.outputs[0]
    wide.name, wide.shape, wide.dtype = f"{value.name}.single", value.shape, onnx_ir.DataType.FLOAT
    onnx_ir.convenience.replace_all_uses_with(value, wide)
    graph.insert_before(graph[0], cast)
    del graph.initializers[str(value.name)]


def _tensor_of(value: onnx_ir.Value) -> onnx_ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def _has_bits(value: onnx_ir.Value, bits: NDArray[np.uint16]) -> bool:
    """Tell whether a weight's halves are these; NumPy has no bfloat16, so both types go by their bits."""
    tensor = _tensor_of(value)
    return tuple(tensor.shape) == bits.shape and tensor.tobytes() == bits.tobytes()
