"""Open Inference Protocol requests: one `GenerateRequest` per text; types are checked here, ranges in the service."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.bulk import BulkEnvelope, both_ends
from dragoman.server.protocols.json_text import decode_json, one_line
from dragoman.server.protocols.openinference.tensors import FLOATS, INTEGERS, Input, Tensor, read_tensors, shown
from dragoman.server.service.answers import Answer, Generated, TokenLogProb
from dragoman.server.service.requests import GenerateRequest, Term, check_length, check_num_suppressed
from dragoman.server.service.terms import check_num_terms

MAX_TEXTS = 1024
# Bounds of protobuf's integers; JSON has none.
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
# For values in JSON text, as some clients cannot send other types.
MAX_JSON_CHARACTERS = 64 * 2**10
MICROSECONDS = 1e6

Kind: TypeAlias = Literal["flag", "integer", "number", "text", "tokens", "terms"]
# An output has one element per text or per answer.
Subject: TypeAlias = Literal["text", "answer"]


class Field(NamedTuple):
    """A request field; other datatypes of its `kind` than the announced `datatype` are accepted too."""

    name: str
    kind: Kind
    datatype: str


class Output(NamedTuple):
    """An output tensor with one element per `subject`, which `value` returns."""

    name: str
    datatype: str
    subject: Subject
    value: Callable[[Generated, Answer], Any]


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
        Field("split", "text", "BYTES"),
        Field("no_cache", "flag", "BOOL"),
        Field("markup", "text", "BYTES"),
        Field("keep_placeholders", "flag", "BOOL"),
        Field("translate_attributes", "flag", "BOOL"),
        Field("terms", "terms", "BYTES"),
        Field("glossary", "text", "BYTES"),
    )
}
# vLLM's names of fields.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "beam_width": "num_beams",
}
TEXT_INPUT, SAMPLING_PARAMETERS = "text_input", "sampling_parameters"
# Fields of the whole message, as tensors or parameters.
STREAM, EXCLUDE_INPUT = "stream", "exclude_input_in_output"
FLAGS = {name: Field(name, "flag", "BOOL") for name in (STREAM, EXCLUDE_INPUT)}
# Parameters only: microseconds, and a flag without effect, as every final response is marked.
TIMEOUT, EMPTY_FINAL = "timeout", "triton_enable_empty_final_response"
PARAMETERS = {TIMEOUT: Field(TIMEOUT, "integer", ""), EMPTY_FINAL: Field(EMPTY_FINAL, "flag", "")}
NAMED = FIELDS | FLAGS
INPUTS = (TEXT_INPUT, SAMPLING_PARAMETERS, *NAMED)
NUM_PARAMETERS = len(NAMED) + len(PARAMETERS) + 1

TEXT, TOKENS, LOG_PROBS, SEED, WARNINGS = "text_output", "tokens", "log_probs", "seed", "warnings"
SEGMENTS, UNMET_TERMS = "segments", "unmet_terms"
OUTPUTS = {
    output.name: output
    for output in (
        Output(TEXT, "BYTES", "answer", lambda _, answer: answer.text.encode()),
        Output("score", "FP64", "answer", lambda _, answer: answer.score),
        Output("finish_reason", "BYTES", "answer", lambda _, answer: answer.finish_reason.encode()),
        Output(TOKENS, "BYTES", "answer", lambda _, answer: msgspec.json.encode(list(answer.tokens))),
        Output(LOG_PROBS, "BYTES", "answer", lambda _, answer: msgspec.json.encode(list(map(log_prob_json, answer.log_probs)))),
        Output("num_input_tokens", "UINT32", "text", lambda generated, _: generated.source_tokens),
        Output("num_output_tokens", "UINT32", "text", lambda generated, _: generated.generated_tokens),
        Output("is_truncated", "BOOL", "text", lambda generated, _: generated.is_truncated),
        Output(SEED, "UINT64", "text", lambda generated, _: generated.seed or 0),
        Output(WARNINGS, "BYTES", "text", lambda generated, _: "\n".join(generated.warnings).encode()),
        Output(SEGMENTS, "BYTES", "text", lambda generated, _: msgspec.json.encode(list(generated.segments))),
        Output(UNMET_TERMS, "BYTES", "answer", lambda _, answer: msgspec.json.encode(list(answer.unmet_terms))),
    )
}


def log_prob_json(token: TokenLogProb) -> dict[str, Any]:
    """Return a token's log-probability for JSON; a piece that is part of a character becomes U+FFFD."""
    number, piece, log_prob, top = token
    fields = {"token": number, "piece": piece.decode(errors="replace"), "log_prob": log_prob}
    return fields | {"top": [log_prob_json(other) for other in top]} if top else fields


class RawRequest(NamedTuple):
    """A request from gRPC or JSON before conversion."""

    request_id: str  # checked; empty if none
    model: str
    version: str  # empty for the server's choice
    parameters: Mapping[str, Any]
    inputs: Sequence[Input]
    outputs: Sequence[tuple[str, Sequence[str]]] = ()  # names, each with the names of its parameters; empty for all
    binary_outputs: frozenset[str] = frozenset()  # outputs wanted as bytes behind JSON


@dataclass(frozen=True, slots=True)
class Inference(BulkEnvelope):
    """An inference request of one or several texts."""

    request_id: str  # empty if none
    requests: Sequence[GenerateRequest]  # one per text
    outputs: Sequence[str]  # empty for all that are not void
    has_rows: bool  # shape [N, 1] instead of [N]
    is_streamed: bool | None  # None if the message does not say
    timeout_seconds: float | None  # from arrival
    num_bytes: int
    binary_outputs: frozenset[str]

    def __len__(self) -> int:
        return len(self.requests)

    def ByteSize(self) -> int:
        """Return the size of the message."""
        return self.num_bytes


def check_counts(num_inputs: int, num_outputs: int, num_parameters: int) -> None:
    """Raise `InvalidRequest` if a message has more parameters, outputs or inputs than there are names; call before conversion."""
    for name, number, most in (
        ("parameters", num_parameters, NUM_PARAMETERS),
        ("outputs", num_outputs, len(OUTPUTS)),
        ("inputs", num_inputs, len(INPUTS)),
    ):
        if number > most:
            raise InvalidRequest(name, f"{number}; there are {most} names at the most")


def to_inference(raw: RawRequest, num_bytes: int, max_characters: int | None = None) -> Inference:
    """Convert a message that passed `check_counts`, or raise `InvalidRequest`; keep `max_characters` at each end of a text."""
    name, version = check_length("model", raw.model), check_length("model_version", raw.version)
    outputs = _outputs(raw.outputs)
    tensors = read_tensors(raw.inputs, INPUTS, MAX_TEXTS)
    if TEXT_INPUT not in tensors:
        raise InvalidRequest(TEXT_INPUT, "is missing")
    source = tensors.pop(TEXT_INPUT)
    texts = _texts(source)
    values = _Values(len(texts))
    for key, parameter in raw.parameters.items():
        values.add_parameter(key, parameter)
    for tensor in tensors.values():
        values.add_tensor(tensor)
    is_streamed, timeout = values.take(STREAM), values.take(TIMEOUT)
    if values.take(EXCLUDE_INPUT) is False:
        raise InvalidRequest(EXCLUDE_INPUT, "false; what goes in is never part of what comes out")
    values.take(EMPTY_FINAL)
    if timeout is not None and timeout < 0:
        raise InvalidRequest(TIMEOUT, f"{timeout} microseconds")
    requests = [
        GenerateRequest(model=name, model_version=version, **_cut(values.shared | own | {"text": text}, max_characters))
        for text, own in zip(texts, values.each, strict=True)
    ]
    if len({request.num_return_sequences for request in requests}) > 1:
        raise InvalidRequest("num_return_sequences", "has to be the same for all texts")
    seconds = timeout / MICROSECONDS if timeout else None
    has_rows = len(source.shape) > 1
    return Inference(raw.request_id, requests, outputs, has_rows, is_streamed, seconds, num_bytes, raw.binary_outputs)


def _outputs(wanted: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for name, parameters in wanted:
        if name not in OUTPUTS:
            raise InvalidRequest("outputs", f"{shown(name)} is not known; there are {', '.join(OUTPUTS)}")
        if name in names:
            raise InvalidRequest("outputs", f"{name} is asked for twice")
        for key in parameters:
            raise InvalidRequest(name, f"parameter {shown(key)} of an output is not known")
        names[name] = None
    return tuple(names)


def _texts(tensor: Tensor) -> list[str]:
    _check_datatype(TEXT_INPUT, "text", tensor.datatype)
    if tensor.shape[1:] not in ((), (1,)):
        raise InvalidRequest(TEXT_INPUT, f"its shape is {list(tensor.shape)}; it has to be [N] or [N, 1]")
    if not tensor.elements:
        raise InvalidRequest(TEXT_INPUT, "has no text")
    return [_to_text(f"{TEXT_INPUT}[{number}]", element) for number, element in enumerate(tensor.elements)]


def _cut(values: dict[str, Any], max_characters: int | None) -> dict[str, Any]:
    """Return values with at most `max_characters` at each end of a text."""
    if max_characters is None:
        return values
    return {name: both_ends(value, max_characters) if isinstance(value, str) else value for name, value in values.items()}


class _Values:
    """Values by name, shared by all texts or per text; none may be given twice."""

    def __init__(self, num_texts: int) -> None:
        self.shared: dict[str, Any] = {}
        self.each: list[dict[str, Any]] = [{} for _ in range(num_texts)]
        self._places: dict[str, str] = {}

    def add_tensor(self, tensor: Tensor) -> None:
        if tensor.name == SAMPLING_PARAMETERS:
            _check_datatype(tensor.name, "text", tensor.datatype)
            self._add_documents(self._for_each(tensor))
            return
        field = NAMED[tensor.name]
        _check_datatype(field.name, field.kind, tensor.datatype)
        self._claim(field.name, "as a tensor")
        if field.kind == "tokens":
            if len(tensor.shape) == 2 and tensor.shape[0] != 1:
                raise InvalidRequest(field.name, f"its shape is {list(tensor.shape)}; it has to be [K], the same for all texts")
            self.shared[field.name] = to_value(field.name, field.kind, tensor.elements)
            return
        values = [to_value(field.name, field.kind, element) for element in self._for_each(tensor)]
        for where, value in zip([self.shared] if len(values) == 1 else self.each, values, strict=True):
            where[field.name] = value

    def add_parameter(self, name: str, value: Any) -> None:
        """Add a shared value; a string for a field that is not text is JSON."""
        if name == SAMPLING_PARAMETERS:
            self._add_documents([value if isinstance(value, dict) else _to_text(name, value)])
            return
        name = SYNONYMS.get(name, name)
        field = NAMED.get(name) or PARAMETERS.get(name)
        if field is None:
            there = ", ".join([*NAMED, *PARAMETERS, SAMPLING_PARAMETERS])
            raise InvalidRequest("parameters", f"{shown(name)} is not known; there are {there}")
        self._claim(name, "as a parameter")
        is_json = isinstance(value, str) and field.kind != "text"
        self.shared[name] = to_value(name, field.kind, from_json(name, value) if is_json else value)

    def take(self, name: str) -> Any:
        """Remove and return a value of the whole message; None if absent."""
        values = {request.pop(name) for request in self.each if name in request}
        if len(values) > 1:
            raise InvalidRequest(name, "has to be the same for all texts")
        return self.shared.pop(name, next(iter(values), None))

    def _add_documents(self, documents: Sequence[Any]) -> None:
        """Add the values of JSON objects, one shared or one per text."""
        read = [_document_fields(document) for document in documents]
        for name in {name: None for fields in read for name in fields}:
            self._claim(name, f"in {SAMPLING_PARAMETERS}")
        for where, fields in zip([self.shared] if len(read) == 1 else self.each, read, strict=True):
            where.update(fields)

    def _claim(self, name: str, place: str) -> None:
        if (before := self._places.get(name)) is not None:
            raise InvalidRequest(name, "is given twice, " + (place if place == before else f"{before} and {place}"))
        self._places[name] = place

    def _for_each(self, tensor: Tensor) -> Sequence[Any]:
        """Return a tensor's elements, one shared or one per text."""
        count, shape = len(self.each), tensor.shape
        if shape[0] not in (1, count) or shape[1:] not in ((), (1,)):
            raise InvalidRequest(
                tensor.name, f"its shape is {list(shape)}; it has to be [1], [N], [1, 1] or [N, 1], where N is {count}"
            )
        return tensor.elements


def _document_fields(document: Any) -> dict[str, Any]:
    """Return the fields of a JSON object, synonyms resolved."""
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


_DATATYPES = {
    "flag": frozenset({"BOOL"}),
    "integer": INTEGERS,
    "number": INTEGERS | FLOATS,
    "text": frozenset({"BYTES"}),
    "tokens": INTEGERS,
    "terms": frozenset({"BYTES"}),
}


def _check_datatype(name: str, kind: Kind, datatype: str) -> None:
    if datatype not in _DATATYPES[kind]:
        raise InvalidRequest(name, f"datatype {datatype}; it has to be {' or '.join(sorted(_DATATYPES[kind]))}")


def from_json(name: str, text: str | bytes) -> Any:
    """Parse JSON text; raise `InvalidRequest` if it is malformed or too long."""
    if len(text) > MAX_JSON_CHARACTERS:
        raise InvalidRequest(name, f"{len(text)} characters of JSON; at most {MAX_JSON_CHARACTERS} are allowed")
    return decode_json(_to_text(name, text).encode(), Any, name)


def to_value(name: str, kind: Kind, value: Any) -> Any:
    """Convert a value from JSON, a parameter or a tensor; raise `InvalidRequest` if it is not of this kind."""
    return _CONVERSIONS[kind](name, value)


def _to_text(name: str, value: Any) -> str:
    try:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, str):
            value.encode()  # raises for a lone surrogate
            return value
    except UnicodeError:
        raise InvalidRequest(name, "is not UTF-8") from None
    raise InvalidRequest(name, "is not a text")


def _to_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, "is not true or false")
    return value


def _to_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, "is not an integer")
    if not MIN_INTEGER <= value <= MAX_INTEGER:
        raise InvalidRequest(name, "is an integer of more than 64 bits")
    return value


def _to_number(name: str, value: Any) -> float:
    """Return a number rounded to single precision, as in the other protocols."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, "is not a number")
    try:
        number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(name, "is not a finite number in single precision")
    return number


def _to_tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(name, "is not a list of integers")
    check_num_suppressed(len(value))
    return tuple(_to_integer(name, token) for token in value)


def _to_terms(name: str, value: Any) -> tuple[Term, ...]:
    read = from_json(name, value) if isinstance(value, str | bytes) else value
    if isinstance(read, Sequence):
        check_num_terms(len(read))
    try:
        return msgspec.convert(read, tuple[Term, ...])
    except msgspec.ValidationError as error:
        raise InvalidRequest(name, f"is not a list of terms: {one_line(error)}") from None


_CONVERSIONS: dict[Kind, Callable[[str, Any], Any]] = {
    "flag": _to_flag,
    "integer": _to_integer,
    "number": _to_number,
    "text": _to_text,
    "tokens": _to_tokens,
    "terms": _to_terms,
}
