"""Datatypes and input tensors of the Open Inference Protocol."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dragoman.server.errors import InvalidRequest

# Bytes before an element of BYTES, little-endian, that say its length.
_LENGTH = struct.Struct("<I")


class Datatype(NamedTuple):
    """A datatype.

    Attributes:
        name: The protocol's.
        code: As `struct` has it, little-endian; empty where each element has a length of its own.
        contents: Field of `InferTensorContents` that has its elements; empty where none does.
    """

    name: str
    code: str
    contents: str

    @property
    def num_bytes(self) -> int:
        """Bytes of an element."""
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


def from_raw(name: str, datatype: Datatype, raw: bytes, count: int) -> Sequence[Any]:
    """Return the elements that bytes hold.

    Args:
        name: Of the tensor.
        datatype: Of its elements.
        raw: The bytes.
        count: How many elements there have to be.

    Raises:
        InvalidRequest: If there are more or fewer.
    """
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
    """Return the elements that typed fields hold; arguments and errors as `from_raw`, with `InferTensorContents`."""
    _check_typed(name, datatype)
    fields = {field.name: values for field, values in contents.ListFields()}
    values = fields.pop(datatype.contents, ())
    if fields:
        raise InvalidRequest(name, f"its content is in {', '.join(sorted(fields))}; that of {datatype.name} is {datatype.contents}")
    return from_values(name, datatype, values, count)


def from_values(name: str, datatype: Datatype, values: Sequence[Any], count: int) -> Sequence[Any]:
    """Return elements that are written one by one; arguments and errors as `from_raw`. What those of BYTES are is not looked at."""
    _check_typed(name, datatype)
    if len(values) != count:
        raise InvalidRequest(name, f"its content has {len(values)} elements, and its shape {count}")
    if datatype.code:
        try:
            struct.pack(f"<{count}{datatype.code}", *values)
        except (struct.error, OverflowError):
            raise InvalidRequest(name, f"an element is no {datatype.name}") from None
    return list(values)


def _check_typed(name: str, datatype: Datatype) -> None:
    if not datatype.contents:
        raise InvalidRequest(name, f"{datatype.name} has no typed content; send it raw")


def elements_of(datatype: Datatype, raw: bytes) -> Sequence[Any]:
    """Return the elements that bytes of our own hold, as many as they are."""
    if datatype.code:
        return struct.unpack(f"<{len(raw) // datatype.num_bytes}{datatype.code}", raw)
    elements, position = [], 0
    while position < len(raw):
        begin = position + _LENGTH.size
        position = begin + _LENGTH.unpack_from(raw, position)[0]
        elements.append(raw[begin:position])
    return elements


def to_raw(datatype: Datatype, elements: Sequence[Any]) -> bytes:
    """Return the bytes of elements; those of BYTES are bytes."""
    if datatype.code:
        return struct.pack(f"<{len(elements)}{datatype.code}", *elements)
    parts: list[bytes] = []
    for element in elements:
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


class Input(NamedTuple):
    """An input tensor that nothing has been checked of.

    Attributes:
        name: Which it is.
        datatype: Of its elements, by its name.
        shape: Its dimensions.
        parameters: Names of what else is said of it.
        content: Returns so many elements of a datatype; it raises `InvalidRequest` if there are not just these.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    parameters: Sequence[str]
    content: Callable[[Datatype, int], Sequence[Any]]


class Wanted(NamedTuple):
    """An output that is asked for.

    Attributes:
        name: Which it is.
        parameters: Names of what else is said of it.
    """

    name: str
    parameters: Sequence[str] = ()


class Asked(NamedTuple):
    """A request.

    Attributes:
        request_id: Its id, checked; empty if it has none.
        model: Name of the model.
        version: Of the model; empty for the one that is served.
        parameters: What is said of it as a whole.
        inputs: Its tensors.
        outputs: Those that are wanted; empty for all.
    """

    request_id: str
    model: str
    version: str
    parameters: Mapping[str, Any]
    inputs: Sequence[Input]
    outputs: Sequence[Wanted] = ()


MAX_DIMENSIONS = 2
# Of a name that nobody knows, so much is repeated.
MAX_SHOWN_CHARACTERS = 64


class Tensor(NamedTuple):
    """An input.

    Attributes:
        name: Which it is.
        datatype: Of its elements.
        shape: One or two dimensions.
        elements: As many as the shape says, row by row; those of BYTES are bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: Sequence[Any]


def shown(name: str) -> str:
    """Return a caller's name for something, as it is repeated."""
    return repr(name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "...")


def read_tensors(inputs: Sequence[Input], known: Sequence[str], max_elements: int) -> dict[str, Tensor]:
    """Return the inputs of a request, by name.

    Args:
        inputs: As they came.
        known: Names that inputs may have.
        max_elements: Of a tensor.

    Raises:
        InvalidRequest: If there is one that is not known, comes twice, or is not what it says.
    """
    tensors: dict[str, Tensor] = {}
    for given in inputs:
        if given.name not in known:
            raise InvalidRequest("inputs", f"{shown(given.name)} is not known; there are {', '.join(known)}")
        if given.name in tensors:
            raise InvalidRequest(given.name, "is given twice")
        tensors[given.name] = _read(given, max_elements)
    return tensors


def _read(given: Input, max_elements: int) -> Tensor:
    name = given.name
    if "shared_memory_region" in given.parameters:
        raise InvalidRequest(name, "shared memory is not offered; send its content with it")
    for key in given.parameters:
        raise InvalidRequest(name, f"parameter {shown(key)} of an input is not known")
    datatype = DATATYPES.get(given.datatype)
    if datatype is None:
        raise InvalidRequest(name, f"datatype {shown(given.datatype)} is not known; there are {', '.join(DATATYPES)}")
    count = _count(name, given.shape, max_elements)
    return Tensor(name, datatype.name, tuple(given.shape), given.content(datatype, count))


def _count(name: str, shape: Sequence[int], max_elements: int) -> int:
    """Return how many elements a shape says there are."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise InvalidRequest(name, f"its shape has {len(shape)} dimensions, and may have 1 to {MAX_DIMENSIONS}")
    if min(shape) < 0:
        raise InvalidRequest(name, f"its shape {list(shape)} has a negative dimension")
    count = math.prod(shape)
    if count > max_elements:
        raise InvalidRequest(name, f"its shape {list(shape)} has {count} elements; at most {max_elements} are allowed")
    return count
