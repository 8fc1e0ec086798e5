"""The files of a bundle's graphs: each graph has a file of its own weights and reads what another has already from that one's.

Graphs are left with tensors that are mapped from what was written, so that nothing of a large model stays in memory twice.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir
from numpy.typing import NDArray
from onnx_ir import ExternalTensor, TensorProtocol
from onnx_ir.external_data import convert_tensors_to_external

from dragoman.export.bundle import (
    DECODER_FILE,
    DECODER_WEIGHTS_FILE,
    ENCODER_FILE,
    ENCODER_WEIGHTS_FILE,
    SCORER_FILE,
    SCORER_WEIGHTS_FILE,
)
from dragoman.export.tracing import MAX_INLINE_BYTES

FILES = (
    (ENCODER_FILE, ENCODER_WEIGHTS_FILE),
    (DECODER_FILE, DECODER_WEIGHTS_FILE),
    (SCORER_FILE, SCORER_WEIGHTS_FILE),
)
# Tensors that begin a page of memory are mapped as they are, at any offset; those of a page's size are worth the gap before them.
ALIGNMENT = 4096
COMPARED_BYTES = 1 << 24

Key = tuple[str, tuple[object, ...], bytes]


def write_graphs(graphs: Iterable[onnx_ir.Model], directory: Path) -> list[onnx_ir.Model]:
    """Write encoder, decode step and scorer, in this order; a graph that needs no weights of its own has no file of them.

    Args:
        graphs: Each is asked for when the one before is written, so that one at a time need be in memory.
        directory: Where to; nothing of theirs is there.

    Returns:
        The graphs.
    """
    stored: dict[Key, list[ExternalTensor]] = {}
    written: list[onnx_ir.Model] = []
    for graph, (graph_name, weights_name) in zip(graphs, FILES, strict=True):
        _write(graph, directory, graph_name, weights_name, stored)
        written.append(graph)
    return written


def _write(
    model: onnx_ir.Model, directory: Path, graph_name: str, weights_name: str, stored: dict[Key, list[ExternalTensor]]
) -> None:
    """Write a graph, and what of its weights is not stored yet."""
    new: list[onnx_ir.Value] = []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes <= MAX_INLINE_BYTES:
            value.const_value = onnx_ir.tensor(tensor.numpy().copy(), tensor.dtype, name=str(value.name))
        elif (found := next((other for other in stored.get(_key(tensor), []) if _is_same(tensor, other)), None)) is not None:
            value.const_value = _reference(found, str(value.name))
        else:
            new.append(value)
    given = [tensor for value in new if (tensor := value.const_value) is not None]
    written: list[ExternalTensor] = []
    if given:
        written = convert_tensors_to_external(given, directory, weights_name, alignment=ALIGNMENT, align_threshold=ALIGNMENT)
    for value, tensor in zip(new, written, strict=True):
        value.const_value = tensor
        stored.setdefault(_key(tensor), []).append(tensor)
    onnx_ir.save(model, directory / graph_name)


def _reference(stored: ExternalTensor, name: str) -> ExternalTensor:
    """Return what is stored under another graph's name for it."""
    return ExternalTensor(
        stored.location, stored.offset, stored.length, stored.dtype, shape=stored.shape, name=name, base_dir=stored.base_dir
    )


def _key(tensor: TensorProtocol) -> Key:
    """Return what is quickly told of a tensor, the same for two that are the same: its type, its shape and its first numbers."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.numpy().reshape(-1)[:16].tobytes()


def _is_same(tensor: TensorProtocol, other: TensorProtocol) -> bool:
    """Compare two tensors of one type and shape, a piece at a time: neither is held in memory a second time."""
    ours, theirs = _bytes_of(tensor), _bytes_of(other)
    return all(
        np.array_equal(ours[start : start + COMPARED_BYTES], theirs[start : start + COMPARED_BYTES])
        for start in range(0, len(ours), COMPARED_BYTES)
    )


def _bytes_of(tensor: TensorProtocol) -> NDArray[np.uint8]:
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
