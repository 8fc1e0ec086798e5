"""What a message says of its requests, gathered from tensors, parameters and JSON; nothing may be said twice."""

from collections.abc import Sequence
from typing import Any

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.oip.fields import FIELDS, SYNONYMS, Field, check_datatype, from_json, from_parameter, to_text, to_value
from dragoman.server.faces.oip.tensors import Tensor, shown

SAMPLING_PARAMETERS = "sampling_parameters"
# What is said of a message as a whole, beside the fields of its requests; only as tensors or parameters.
STREAM, EXCLUDE_INPUT = "stream", "exclude_input_in_output"
FLAGS = {name: Field(name, "flag", "BOOL") for name in (STREAM, EXCLUDE_INPUT)}
# Only as parameters. `timeout` is in microseconds. The last response of a request always says that it is the last, so the other one
# changes nothing.
TIMEOUT, EMPTY_FINAL = "timeout", "triton_enable_empty_final_response"
PARAMETERS = {TIMEOUT: Field(TIMEOUT, "integer", ""), EMPTY_FINAL: Field(EMPTY_FINAL, "flag", "")}
NAMED = FIELDS | FLAGS


class Given:
    """Values by name: of all requests of a message, and of each.

    Attributes:
        shared: Values that hold for all.
        each: Values of each request.
    """

    def __init__(self, num_texts: int) -> None:
        """Start with nothing said of so many requests."""
        self.shared: dict[str, Any] = {}
        self.each: list[dict[str, Any]] = [{} for _ in range(num_texts)]
        self._where: dict[str, str] = {}

    def add_tensor(self, tensor: Tensor) -> None:
        """Take what a tensor says: of all requests, or of each.

        Raises:
            InvalidRequest: If it cannot say that.
        """
        if tensor.name == SAMPLING_PARAMETERS:
            check_datatype(tensor.name, "text", tensor.datatype)
            self._add_documents(self._for_each(tensor))
            return
        field = NAMED[tensor.name]
        check_datatype(field.name, field.kind, tensor.datatype)
        self._claim(field.name, "as a tensor")
        if field.kind == "tokens":
            if len(tensor.shape) == 2 and tensor.shape[0] != 1:
                raise InvalidRequest(field.name, f"its shape is {list(tensor.shape)}; it has to be [K], the same for all texts")
            self.shared[field.name] = to_value(field.name, field.kind, tensor.elements)
            return
        self._put(field.name, [to_value(field.name, field.kind, element) for element in self._for_each(tensor)])

    def add_parameter(self, name: str, value: Any) -> None:
        """Take what a parameter says of all requests.

        Raises:
            InvalidRequest: If it is not known, or cannot say that.
        """
        if name == SAMPLING_PARAMETERS:
            self._add_documents([value if isinstance(value, dict) else to_text(name, value)])
            return
        name = SYNONYMS.get(name, name)
        field = NAMED.get(name) or PARAMETERS.get(name)
        if field is None:
            there = ", ".join([*NAMED, *PARAMETERS, SAMPLING_PARAMETERS])
            raise InvalidRequest("parameters", f"{shown(name)} is not known; there are {there}")
        self._claim(name, "as a parameter")
        self.shared[name] = from_parameter(name, field.kind, value)

    def take(self, name: str) -> Any:
        """Return what is said of the message as a whole by this name, and say it of requests no more; None for nothing.

        Raises:
            InvalidRequest: If it differs from text to text.
        """
        values = {request.pop(name) for request in self.each if name in request}
        if len(values) > 1:
            raise InvalidRequest(name, "has to be the same for all texts")
        return self.shared.pop(name, next(iter(values), None))

    def _add_documents(self, documents: Sequence[Any]) -> None:
        """Take what JSON objects say, one for all requests or one for each."""
        read = [_fields(document) for document in documents]
        for name in {name: None for fields in read for name in fields}:
            self._claim(name, f"in {SAMPLING_PARAMETERS}")
        for place, fields in zip([self.shared] if len(read) == 1 else self.each, read, strict=True):
            place.update(fields)

    def _claim(self, name: str, where: str) -> None:
        if name in self._where:
            before = self._where[name]
            raise InvalidRequest(name, "is given twice, " + (where if where == before else f"{before} and {where}"))
        self._where[name] = where

    def _for_each(self, tensor: Tensor) -> Sequence[Any]:
        """Return the elements of a tensor that has one for all requests, or one for each."""
        count, shape = len(self.each), tensor.shape
        if shape[0] not in (1, count) or shape[1:] not in ((), (1,)):
            raise InvalidRequest(
                tensor.name, f"its shape is {list(shape)}; it has to be [1], [N], [1, 1] or [N, 1], where N is {count}"
            )
        return tensor.elements

    def _put(self, name: str, values: Sequence[Any]) -> None:
        if len(values) == 1:
            self.shared[name] = values[0]
        else:
            for place, value in zip(self.each, values, strict=True):
                place[name] = value


def _fields(document: Any) -> dict[str, Any]:
    """Return the fields that a JSON object has, by our names; of a text that is one, or of one that was read already.

    Raises:
        InvalidRequest: If it is none, or has others.
    """
    read = from_json(SAMPLING_PARAMETERS, document) if isinstance(document, str | bytes) else document
    if not isinstance(read, dict):
        raise InvalidRequest(SAMPLING_PARAMETERS, "is not a JSON object")
    fields: dict[str, Any] = {}
    for key, value in read.items():
        name = SYNONYMS.get(key, key)
        if name not in FIELDS:
            there = ", ".join([*FIELDS, *SYNONYMS])
            raise InvalidRequest(SAMPLING_PARAMETERS, f"{shown(key)} is not known; there are {there}")
        if name in fields:
            raise InvalidRequest(name, f"is given twice in {SAMPLING_PARAMETERS}, by its name and as its synonym")
        fields[name] = to_value(f"{SAMPLING_PARAMETERS}: {key}", FIELDS[name].kind, value)
    return fields
