"""Tensors of the Open Inference Protocol: datatypes, raw and typed content, and checks of input tensors."""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dragoman.server.errors import InvalidRequest

MAX_DIMENSIONS = 2
# Quoted characters of an unknown name in an error.
MAX_SHOWN_CHARACTERS = 64
# Length prefix of a BYTES element.
_LENGTH = struct.Struct("<I")


class Datatype(NamedTuple):
    """A datatype: name, `struct` code (empty for BYTES), and field of `InferTensorContents` (empty for none)."""

    name: str
    code: str
    contents: str

    @property
    def num_bytes(self) -> int:
        """Size of an element."""
        return struct.calcsize(f"<{self.code}")


DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", "?", "bool_contents"),
        Datatype("INT8", "b", "int_contents"),
        Datatype("INT16", "h", "int_contents"),
        Datatype("INT32", "i", "int_contents"),
        Datatype("INT64", "q", "int64_contents"),
        Datatype("UINT8", "B", "uint_contents"),
        Datatype("UINT16", "H", "uint_contents"),
        Datatype("UINT32", "I", "uint_contents"),
        Datatype("UINT64", "Q", "uint64_contents"),
        Datatype("FP16", "e", ""),
        Datatype("FP32", "f", "fp32_contents"),
        Datatype("FP64", "d", "fp64_contents"),
        Datatype("BYTES", "", "bytes_contents"),
    )
}
INTEGERS = frozenset(name for name in DATATYPES if "INT" in name)
FLOATS = frozenset(name for name in DATATYPES if name.startswith("FP"))


class Input(NamedTuple):
    """An input tensor from gRPC or JSON before checks."""

    name: str
    datatype: str
    shape: Sequence[int]
    parameters: Sequence[str]  # names
    content: Callable[[Datatype, int], Sequence[Any]]  # returns so many elements, or raises `InvalidRequest` for another number


class Tensor(NamedTuple):
    """A checked input tensor, 1-D or 2-D; elements in row-major order, BYTES as bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: Sequence[Any]


def read_tensors(inputs: Sequence[Input], known: Sequence[str], max_elements: int) -> dict[str, Tensor]:
    """Return a request's inputs by name; raise `InvalidRequest` for unknown, repeated or inconsistent tensors."""
    tensors: dict[str, Tensor] = {}
    for each in inputs:
        if each.name not in known:
            raise InvalidRequest("inputs", f"{shown(each.name)} is not known; there are {', '.join(known)}")
        if each.name in tensors:
            raise InvalidRequest(each.name, "is given twice")
        if "shared_memory_region" in each.parameters:
            raise InvalidRequest(each.name, "shared memory is not offered; send its content with it")
        for key in each.parameters:
            raise InvalidRequest(each.name, f"parameter {shown(key)} of an input is not known")
        datatype = DATATYPES.get(each.datatype)
        if datatype is None:
            raise InvalidRequest(each.name, f"datatype {shown(each.datatype)} is not known; there are {', '.join(DATATYPES)}")
        count = _num_elements(each.name, each.shape, max_elements)
        tensors[each.name] = Tensor(each.name, datatype.name, tuple(each.shape), each.content(datatype, count))
    return tensors


def shown(name: str) -> str:
    """Quote a caller's name for an error, truncated."""
    return repr(name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "...")


def from_raw(name: str, datatype: Datatype, raw: bytes, count: int) -> Sequence[Any]:
    """Return the `count` elements of raw content; raise `InvalidRequest` if it has more or fewer."""
    if datatype.code:
        if len(raw) != count * datatype.num_bytes:
            needed = f"{count} of {datatype.name} take {count * datatype.num_bytes}"
            raise InvalidRequest(name, f"its raw content has {len(raw)} bytes; {needed}")
        return struct.unpack(f"<{count}{datatype.code}", raw)
    elements, position = [], 0
    for number in range(count):
        begin = position + _LENGTH.size
        if begin > len(raw):
            raise InvalidRequest(name, f"its raw content ends before element {number} of {count}")
        position = begin + _LENGTH.unpack_from(raw, position)[0]
        if position > len(raw):
            raise InvalidRequest(name, f"element {number} ends behind its raw content")
        elements.append(raw[begin:position])
    if position < len(raw):
        raise InvalidRequest(name, f"its raw content has {len(raw) - position} bytes more than {count} elements")
    return elements


def from_contents(name: str, datatype: Datatype, contents: Any, count: int) -> Sequence[Any]:
    """Return the elements of an `InferTensorContents`; errors as `from_raw`."""
    _check_typed(name, datatype)
    fields = {field.name: values for field, values in contents.ListFields()}
    values = fields.pop(datatype.contents, ())
    if fields:
        raise InvalidRequest(name, f"its content is in {', '.join(sorted(fields))}; that of {datatype.name} is {datatype.contents}")
    return from_values(name, datatype, values, count)


def from_values(name: str, datatype: Datatype, values: Sequence[Any], count: int) -> Sequence[Any]:
    """Return a list of elements, BYTES unchecked; errors as `from_raw`."""
    _check_typed(name, datatype)
    if len(values) != count:
        raise InvalidRequest(name, f"its content has {len(values)} elements, and its shape {count}")
    if datatype.code:
        try:
            struct.pack(f"<{count}{datatype.code}", *values)
        except (struct.error, OverflowError):
            raise InvalidRequest(name, f"an element is no {datatype.name}") from None
    return list(values)


def to_raw(datatype: Datatype, elements: Sequence[Any]) -> bytes:
    """Encode elements as raw content; BYTES elements are bytes."""
    if datatype.code:
        return struct.pack(f"<{len(elements)}{datatype.code}", *elements)
    parts: list[bytes] = []
    for element in elements:
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def _check_typed(name: str, datatype: Datatype) -> None:
    if not datatype.contents:
        raise InvalidRequest(name, f"{datatype.name} has no typed content; send it raw")


def _num_elements(name: str, shape: Sequence[int], max_elements: int) -> int:
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise InvalidRequest(name, f"its shape has {len(shape)} dimensions, and may have 1 to {MAX_DIMENSIONS}")
    if min(shape) < 0:
        raise InvalidRequest(name, f"its shape {list(shape)} has a negative dimension")
    count = math.prod(shape)
    if count > max_elements:
        raise InvalidRequest(name, f"its shape {list(shape)} has {count} elements; at most {max_elements} are allowed")
    return count
