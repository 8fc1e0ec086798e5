"""What a request may say beside its texts: the fields of `GenerateRequest`, as tensors, parameters and JSON name them.

A value is checked for its type here; ranges are the core's.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from dragoman.server.core.search_options import check_num_suppressed
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.oip.datatypes import FLOATS, INTEGERS

Kind: TypeAlias = Literal["flag", "integer", "number", "text", "tokens"]
# What a number on the wire can be; JSON knows no bound.
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
# Those that are no texts may be JSON in a parameter: some clients can send no other.
MAX_JSON_CHARACTERS = 64 * 2**10


class Field(NamedTuple):
    """A field.

    Attributes:
        name: As everywhere.
        kind: What its values are.
        datatype: That is announced; others of its kind are taken too.
    """

    name: str
    kind: Kind
    datatype: str


FIELDS = {
    field.name: field
    for field in (
        Field("max_new_tokens", "integer", "UINT32"),
        Field("truncate", "flag", "BOOL"),
        Field("priority", "integer", "INT32"),
        Field("num_beams", "integer", "UINT32"),
        Field("num_return_sequences", "integer", "UINT32"),
        Field("length_penalty", "number", "FP32"),
        Field("early_stopping", "flag", "BOOL"),
        Field("do_sample", "flag", "BOOL"),
        Field("temperature", "number", "FP32"),
        Field("top_k", "integer", "UINT32"),
        Field("top_p", "number", "FP32"),
        Field("seed", "integer", "UINT64"),
        Field("min_new_tokens", "integer", "UINT32"),
        Field("repetition_penalty", "number", "FP32"),
        Field("no_repeat_ngram_size", "integer", "UINT32"),
        Field("suppressed_tokens", "tokens", "UINT32"),
        Field("forced_prefix", "text", "BYTES"),
        Field("return_alternatives", "flag", "BOOL"),
        Field("return_log_probs", "flag", "BOOL"),
        Field("top_log_probs", "integer", "UINT32"),
        Field("source_language", "text", "BYTES"),
        Field("target_language", "text", "BYTES"),
        Field("special_tokens_in_text", "flag", "BOOL"),
    )
}
# Fields by the names that vLLM has for the same.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "beam_width": "num_beams",
}
_DATATYPES = {
    "flag": frozenset({"BOOL"}),
    "integer": INTEGERS,
    "number": INTEGERS | FLOATS,
    "text": frozenset({"BYTES"}),
    "tokens": INTEGERS,
}


def check_datatype(name: str, kind: Kind, datatype: str) -> None:
    """Do nothing if a tensor of this datatype can have values of this kind.

    Raises:
        InvalidRequest: If it cannot.
    """
    if datatype not in _DATATYPES[kind]:
        raise InvalidRequest(name, f"datatype {datatype}; it has to be {' or '.join(sorted(_DATATYPES[kind]))}")


def to_value(name: str, kind: Kind, given: Any) -> Any:
    """Return a value as the core takes it.

    Args:
        name: What it is called in an error.
        kind: What it has to be.
        given: What JSON, a parameter or an element of a tensor says.

    Raises:
        InvalidRequest: If it is something else.
    """
    return _CONVERSIONS[kind](name, given)


def from_parameter(name: str, kind: Kind, given: Any) -> Any:
    """Return the value of a parameter, as `to_value`; a string for what is no text is JSON."""
    return to_value(name, kind, from_json(name, given) if isinstance(given, str) and kind != "text" else given)


def from_json(name: str, text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        InvalidRequest: If it is none, or too long.
    """
    if len(text) > MAX_JSON_CHARACTERS:
        raise InvalidRequest(name, f"{len(text)} characters of JSON; at most {MAX_JSON_CHARACTERS} are allowed")
    try:
        decoded = text if isinstance(text, str) else text.decode()
        return json.loads(decoded, object_pairs_hook=_to_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidRequest(name, "is not JSON, or has a key twice") from None


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def to_text(name: str, given: Any) -> str:
    """Return a text.

    Raises:
        InvalidRequest: If it is none, or no Unicode.
    """
    try:
        if isinstance(given, bytes):
            return given.decode()
        if isinstance(given, str):
            given.encode()  # half a surrogate pair is none
            return given
    except UnicodeError:
        raise InvalidRequest(name, "is not UTF-8") from None
    raise InvalidRequest(name, "is not a text")


def _to_flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise InvalidRequest(name, "is not true or false")
    return given


def _to_integer(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise InvalidRequest(name, "is not an integer")
    if not MIN_INTEGER <= given <= MAX_INTEGER:
        raise InvalidRequest(name, "is an integer of more than 64 bits")
    return given


def _to_number(name: str, given: Any) -> float:
    """Return a number in single precision, as every face has it, so that all of them are answered alike."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InvalidRequest(name, "is not a number")
    try:
        number: float = struct.unpack("<f", struct.pack("<f", given))[0]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(name, "is not a finite number in single precision")
    return number


def _to_tokens(name: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidRequest(name, "is not a list of integers")
    check_num_suppressed(len(given))
    return tuple(_to_integer(name, token) for token in given)


_CONVERSIONS: dict[Kind, Callable[[str, Any], Any]] = {
    "flag": _to_flag,
    "integer": _to_integer,
    "number": _to_number,
    "text": to_text,
    "tokens": _to_tokens,
}
