"""A request for inference as it comes, whichever encoding says it: what protobuf and JSON have in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dragoman.server.faces.oip.datatypes import Datatype


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
