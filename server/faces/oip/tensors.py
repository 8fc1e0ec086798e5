"""Input tensors as they come: their datatypes, shapes and elements, checked one by one before anything is made of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.oip.asked import Input
from dragoman.server.faces.oip.datatypes import DATATYPES

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
