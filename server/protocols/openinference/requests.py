"""Inference requests: tensors, parameters and JSON fields as one GenerateRequest for each text."""

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import msgspec

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.bulk import BulkEnvelope, both_ends
from dragoman.server.protocols.openinference.tensors import FLOATS, INTEGERS, Asked, Tensor, Wanted, read_tensors, shown
from dragoman.server.service.answers import Answer, Generated, TokenLogProb
from dragoman.server.service.requests import GenerateRequest, check_model_name, check_model_version, check_num_suppressed

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


# Of a text, or of each of its answers.
Subject: TypeAlias = Literal["text", "answer"]


class Output(NamedTuple):
    """An output.

    Attributes:
        name: As requests name it.
        datatype: Of its elements.
        subject: What each element speaks of.
        value: Says it of an answer.
    """

    name: str
    datatype: str
    subject: Subject
    value: Callable[[Generated, Answer], Any]


TEXT, TOKENS, LOG_PROBS, SEED, WARNINGS = "text_output", "tokens", "log_probs", "seed", "warnings"
OUTPUTS = {
    output.name: output
    for output in (
        Output(TEXT, "BYTES", "answer", lambda _, answer: answer.text.encode()),
        Output("score", "FP64", "answer", lambda _, answer: answer.score),
        Output("finish_reason", "BYTES", "answer", lambda _, answer: answer.finish_reason.encode()),
        Output(TOKENS, "BYTES", "answer", lambda _, answer: msgspec.json.encode(list(answer.tokens))),
        Output(LOG_PROBS, "BYTES", "answer", lambda _, answer: msgspec.json.encode([told(token) for token in answer.log_probs])),
        Output("num_input_tokens", "UINT32", "text", lambda generated, _: generated.source_tokens),
        Output("num_output_tokens", "UINT32", "text", lambda generated, _: generated.generated_tokens),
        Output("is_truncated", "BOOL", "text", lambda generated, _: generated.is_truncated),
        Output(SEED, "UINT64", "text", lambda generated, _: generated.seed or 0),
        Output(WARNINGS, "BYTES", "text", lambda generated, _: "\n".join(generated.warnings).encode()),
    )
}


def told(token: TokenLogProb) -> dict[str, Any]:
    """Return what is told of a token, for JSON; a piece that is part of a character is U+FFFD there."""
    number, piece, log_prob, top = token
    said = {"token": number, "piece": piece.decode(errors="replace"), "log_prob": log_prob}
    return said | {"top": [told(other) for other in top]} if top else said


TEXT_INPUT = "text_input"
INPUTS = (TEXT_INPUT, SAMPLING_PARAMETERS, *NAMED)
NUM_PARAMETERS = len(NAMED) + len(PARAMETERS) + 1
MAX_TEXTS = 1024
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Inference(BulkEnvelope):
    """What a message asks for.

    Attributes:
        request_id: Its id; empty if it has none.
        requests: One for each text, in their order.
        outputs: Names of those that are wanted; empty for all that there is something to say in.
        has_rows: Whether each text is a row of its own, so that the shape is [N, 1] and not [N].
        is_streamed: Whether the answer is wanted in pieces; None where the message does not say.
        timeout_seconds: From its arrival; None for any time.
        num_bytes: Of the message.
    """

    request_id: str
    requests: Sequence[GenerateRequest]
    outputs: Sequence[str]
    has_rows: bool
    is_streamed: bool | None
    timeout_seconds: float | None
    num_bytes: int

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.requests)

    def ByteSize(self) -> int:
        """Return the bytes that count for it while it is served."""
        return self.num_bytes


def check_counts(num_inputs: int, num_outputs: int, num_parameters: int) -> None:
    """Do nothing if a message has no more of anything than there are names; to be asked before anything is made of it.

    Raises:
        InvalidRequest: If it has.
    """
    for name, number, most in (
        ("parameters", num_parameters, NUM_PARAMETERS),
        ("outputs", num_outputs, len(OUTPUTS)),
        ("inputs", num_inputs, len(INPUTS)),
    ):
        if number > most:
            raise InvalidRequest(name, f"{number}; there are {most} names at the most")


def to_inference(asked: Asked, num_bytes: int, max_characters: int | None = None) -> Inference:
    """Return what a message asks for.

    Args:
        asked: It, with no more of anything than `check_counts` lets through.
        num_bytes: Its size.
        max_characters: Of each end of a text that are kept; None for all.

    Raises:
        InvalidRequest: If it cannot be understood.
    """
    name, version = check_model_name(asked.model), check_model_version(asked.version)
    outputs = _outputs(asked.outputs)
    tensors = read_tensors(asked.inputs, INPUTS, MAX_TEXTS)
    if TEXT_INPUT not in tensors:
        raise InvalidRequest(TEXT_INPUT, "is missing")
    source = tensors.pop(TEXT_INPUT)
    texts = _texts(source)
    given = Given(len(texts))
    for key, parameter in asked.parameters.items():
        given.add_parameter(key, parameter)
    for tensor in tensors.values():
        given.add_tensor(tensor)
    is_streamed, timeout = given.take(STREAM), given.take(TIMEOUT)
    if given.take(EXCLUDE_INPUT) is False:
        raise InvalidRequest(EXCLUDE_INPUT, "false; what goes in is never part of what comes out")
    for key in PARAMETERS:
        given.take(key)
    if timeout is not None and timeout < 0:
        raise InvalidRequest(TIMEOUT, f"{timeout} microseconds")
    requests = [
        GenerateRequest(model=name, model_version=version, **_cut(given.shared | own | {"text": text}, max_characters))
        for text, own in zip(texts, given.each, strict=True)
    ]
    if len({request.num_return_sequences for request in requests}) > 1:
        raise InvalidRequest("num_return_sequences", "has to be the same for all texts")
    seconds = timeout / MICROSECONDS if timeout else None
    return Inference(asked.request_id, requests, outputs, len(source.shape) > 1, is_streamed, seconds, num_bytes)


def _outputs(wanted: Sequence[Wanted]) -> tuple[str, ...]:
    """Return the names of the outputs that are wanted."""
    names: dict[str, None] = {}
    for output in wanted:
        if output.name not in OUTPUTS:
            raise InvalidRequest("outputs", f"{shown(output.name)} is not known; there are {', '.join(OUTPUTS)}")
        if output.name in names:
            raise InvalidRequest("outputs", f"{output.name} is asked for twice")
        for key in output.parameters:
            raise InvalidRequest(output.name, f"parameter {shown(key)} of an output is not known")
        names[output.name] = None
    return tuple(names)


def _texts(tensor: Tensor) -> list[str]:
    """Return the texts."""
    check_datatype(TEXT_INPUT, "text", tensor.datatype)
    if tensor.shape[1:] not in ((), (1,)):
        raise InvalidRequest(TEXT_INPUT, f"its shape is {list(tensor.shape)}; it has to be [N] or [N, 1]")
    if not tensor.elements:
        raise InvalidRequest(TEXT_INPUT, "has no text")
    return [to_text(f"{TEXT_INPUT}[{number}]", element) for number, element in enumerate(tensor.elements)]


def _cut(values: dict[str, Any], max_characters: int | None) -> dict[str, Any]:
    """Return values of which no text has more than twice so many characters: those of both its ends."""
    if max_characters is None:
        return values
    return {name: both_ends(value, max_characters) if isinstance(value, str) else value for name, value in values.items()}
