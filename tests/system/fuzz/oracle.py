"""What may have become of a call, by what was sent; it knows the contract and not the server."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dragoman.v1.generation_pb2 import GenerateBulkRequest, GenerateRequest
from tests.system.fuzz.cases import REQUEST_ID_KEY, Case

Code = grpc.StatusCode
MAX_MESSAGE_BYTES = 4 * 2**20
# gRPC refuses calls with more metadata than this: some of them from here on, all from twice as much.
MAX_METADATA_BYTES = 6 * 2**10
CODES = {
    "Generate": {Code.NOT_FOUND},
    "GenerateStream": {Code.NOT_FOUND},
    "GenerateBatch": set(),
    "GenerateBulk": set(),
    "Score": {Code.NOT_FOUND},
    "GetModel": {Code.NOT_FOUND},
    "Check": {Code.NOT_FOUND},
    "List": {Code.UNIMPLEMENTED},  # newer than what tells probes apart; a server need not have it
    "Watch": {Code.RESOURCE_EXHAUSTED},
}
# What Python calls its exceptions, where its files lie and what its objects are.
INTERNAL_TEXT = re.compile(
    r"\b[A-Z]\w*(Error|Exception|Warning)\b|Traceback|\bFile \"|\.py\b|site-packages|/(usr|home|root|tmp|opt)/|\bat 0x|<class|<_"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended for its caller; `code` is None if it did not."""

    code: Code | None
    details: str
    answers: tuple[bytes, ...]


def complaints(case: Case, ending: Ending) -> Iterator[str]:
    """Say what is wrong with how a call ended."""
    if ending.code is None:
        yield "never ended"
        return
    if INTERNAL_TEXT.search(ending.details):
        yield f"internal text in {ending.details!r}"
    if ending.code not in (allowed := _allowed(case)):
        yield f"{ending.code.name} ({ending.details!r}) is none of {sorted(code.name for code in allowed)}"
    elif ending.code is Code.INVALID_ARGUMENT and not _names_a_field(case, ending.details):
        yield f"INVALID_ARGUMENT names no field: {ending.details!r}"
    if case.method is not None:
        yield from _about_answers(case, ending)


def _allowed(case: Case) -> set[Code]:
    codes: set[Code] = set()
    if case.timeout_seconds is not None:
        codes.add(Code.DEADLINE_EXCEEDED)
    if case.cancel_seconds is not None:
        codes.add(Code.CANCELLED)
    too_large = any(len(message) > MAX_MESSAGE_BYTES for message in case.messages)
    if too_large or sum(len(key) + len(value) + 32 for key, value in case.metadata) > MAX_METADATA_BYTES:
        codes.add(Code.RESOURCE_EXHAUSTED)
    if case.method is None:
        return codes | {Code.UNIMPLEMENTED}
    if not (case.messages or case.method.client_streaming):
        return codes | {Code.INVALID_ARGUMENT}
    if len(case.messages) > 1 and not case.method.client_streaming:
        codes.add(Code.UNIMPLEMENTED)
    codes |= {Code.OK} | CODES.get(case.method.name, set())
    if not case.is_as_meant:
        codes.add(Code.INVALID_ARGUMENT)
    return codes


def _names_a_field(case: Case, details: str) -> bool:
    assert case.method is not None
    fields = {field.name for field in case.method.input_type.fields} | {"request", REQUEST_ID_KEY}
    if case.method.name == "GenerateBulk":
        fields |= {field.name for field in GenerateRequest.DESCRIPTOR.fields}
    return details.partition(":")[0] in fields and len(details) > len(details.partition(":")[0]) + 3


def _about_answers(case: Case, ending: Ending) -> Iterator[str]:
    """Check that answers are messages of the method's, and as many as belong to an OK."""
    assert case.method is not None
    kind: Any = GetMessageClass(case.method.output_type)
    try:
        answers = [kind.FromString(data) for data in ending.answers]
    except DecodeError:
        yield "an answer is no message"
        return
    is_ok, num_messages = ending.code is Code.OK, len(case.messages)
    match case.method.name:
        case "GenerateStream":
            results = [answer.result for answer in answers if answer.HasField("result")]
            if len(results) > 1 or (is_ok and not results) or (results and not answers[-1].HasField("result")):
                yield f"{len(results)} results of a stream of {len(answers)} messages"
            elif results and "".join(answer.text for answer in answers) != results[0].text:
                yield "the pieces are not the answer"
        case "GenerateBatch":
            if len(answers) > num_messages or (is_ok and len(answers) != num_messages):
                yield f"{len(answers)} answers to {num_messages} requests"
            for item in answers:
                yield from _about_item(case, item)
        case "GenerateBulk":
            items = [item for answer in answers for item in answer.answers]
            places = sorted(item.index for item in items)
            if len(set(places)) != len(places) or (is_ok and places != list(range(len(places)))):
                yield f"answers are to requests {places[:50]}"
            if case.is_as_meant and len(items) != sum(len(GenerateBulkRequest.FromString(data).requests) for data in case.messages):
                yield f"{len(items)} answers to all requests of {num_messages} messages"
            for item in items:
                yield from _about_item(case, item)
        case "ServerReflectionInfo":
            if is_ok and len(answers) != num_messages:
                yield f"{len(answers)} answers to {num_messages} questions"
            for answer in answers:
                if INTERNAL_TEXT.search(answer.error_response.error_message):
                    yield f"internal text in {answer.error_response.error_message!r}"
        case "Watch":
            if not {answer.status for answer in answers} <= {HealthCheckResponse.SERVING, HealthCheckResponse.SERVICE_UNKNOWN}:
                yield f"health was {answers}"
        case _:
            if len(answers) > 1 or (is_ok and not answers) or (answers and not (is_ok or case.is_cut_short)):
                yield f"{len(answers)} answers with {ending.code}"


def _about_item(case: Case, item: Any) -> Iterator[str]:
    error = item.error
    match item.WhichOneof("outcome"):
        case "error":
            allowed = {Code.INVALID_ARGUMENT.value[0], Code.NOT_FOUND.value[0]}
            if case.timeout_seconds is not None:
                allowed.add(Code.DEADLINE_EXCEEDED.value[0])
            if error.code not in allowed or case.is_as_meant:
                yield f"a request of a batch ended with {error.code}: {error.message!r}"
            elif error.code == Code.INVALID_ARGUMENT.value[0] and not _names_a_field(case, error.message):
                yield f"INVALID_ARGUMENT names no field: {error.message!r}"
            if INTERNAL_TEXT.search(error.message):
                yield f"internal text in {error.message!r}"
        case "response":
            if item.request_id != item.response.request_id or not item.request_id:
                yield f"an answer's id is {item.request_id[:200]!r}"
        case _:
            yield "an answer of a batch is neither an answer nor an error"
    if len(item.request_id) > 128:
        yield f"an id of {len(item.request_id)} characters came back"
