"""Send cases, and tell by the contract alone whether each ended as it may have.

Calls are made from threads: gRPC's asyncio client invents a status of its own for a stream that ends while it is written to.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dragoman.v1.generation_pb2 import GenerateBulkRequest, GenerateRequest
from tests.system.fuzz.cases import REQUEST_ID_KEY, Case
from tests.system.harness.callers import OPTIONS

Code = grpc.StatusCode
# Far longer than any case takes, on however busy a machine: a call that has not ended by then never does.
END_SECONDS = 200.0
NUM_AT_ONCE, NUM_CHANNELS = 16, 3
ANY_SIZE = [*OPTIONS, ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
MAX_MESSAGE_BYTES = 4 * 2**20
# gRPC refuses calls with more metadata than this: some of them from here on, all from twice as much.
MAX_METADATA_BYTES = 6 * 2**10
# Besides those that any method may have; probes need no `List`.
CODES = {name: {Code.NOT_FOUND} for name in ("Generate", "GenerateStream", "Score", "GetModel", "Check")}
CODES |= {"List": {Code.UNIMPLEMENTED}, "Watch": {Code.RESOURCE_EXHAUSTED}}
# Names of Python's exceptions, places of its files, and forms of its objects.
INTERNAL_TEXT = re.compile(
    r"\b[A-Z]\w*(Error|Exception|Warning)\b|Traceback|\bFile \"|\.py\b|site-packages|/(usr|home|root|tmp|opt)/|\bat 0x|<class|<_"
)


@dataclass(frozen=True, slots=True)
class Ending:
    code: Code | None
    details: str
    answers: tuple[bytes, ...]


def send(address: str, cases: Iterable[Case]) -> list[tuple[Case, Ending]]:
    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address, ANY_SIZE)) for _ in range(NUM_CHANNELS)]
        pool = stack.enter_context(ThreadPoolExecutor(NUM_AT_ONCE))
        return list(pool.map(lambda case: (case, _perform(channels[case.number % NUM_CHANNELS], case)), cases))


def _perform(channel: grpc.Channel, case: Case) -> Ending:
    """Make one call. On the wire all kinds are the same, so that a unary method can be sent no message, or two."""
    is_over, is_late = threading.Event(), False

    def outgoing() -> Iterator[bytes]:
        yield from case.messages
        if not case.is_half_closed:
            is_over.wait()

    if len(case.messages) == 1 and case.is_half_closed:
        call: Any = channel.unary_stream(case.path)(case.messages[0], case.timeout_seconds, case.metadata)
    else:
        call = channel.stream_stream(case.path)(outgoing(), case.timeout_seconds, case.metadata)

    def give_up() -> None:
        nonlocal is_late
        is_late = case.cancel_seconds is None
        call.cancel()

    timer = threading.Timer(END_SECONDS if case.cancel_seconds is None else case.cancel_seconds, give_up)
    timer.start()
    answers: list[bytes] = []
    try:
        while len(answers) < case.reads:
            answers.append(next(call))
    except (StopIteration, grpc.RpcError):
        pass  # the code tells
    code, details = call.code(), call.details()
    timer.cancel()
    is_over.set()
    return Ending(None if is_late else code, details or "", tuple(answers))


def complaints(case: Case, ending: Ending) -> Iterator[str]:
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
    codes |= {Code.OK} | CODES.get(case.name, set())
    return codes if case.is_as_meant else codes | {Code.INVALID_ARGUMENT}


def _names_a_field(case: Case, details: str) -> bool:
    assert case.method is not None
    fields = {field.name for field in case.method.input_type.fields} | {"request", REQUEST_ID_KEY}
    if case.name == "GenerateBulk":
        fields |= {field.name for field in GenerateRequest.DESCRIPTOR.fields}
    field, _, reason = details.partition(":")
    return field in fields and len(reason) > 2


def _about_answers(case: Case, ending: Ending) -> Iterator[str]:
    assert case.method is not None
    kind: Any = GetMessageClass(case.method.output_type)
    try:
        answers = [kind.FromString(data) for data in ending.answers]
    except DecodeError:
        yield "an answer is no message"
        return
    is_ok, num_messages = ending.code is Code.OK, len(case.messages)
    items: list[Any] = []
    match case.name:
        case "GenerateStream":
            results = [answer.result for answer in answers if answer.HasField("result")]
            if len(results) > 1 or (is_ok and not results) or (results and not answers[-1].HasField("result")):
                yield f"{len(results)} results of a stream of {len(answers)} messages"
            elif results and "".join(answer.text for answer in answers) != results[0].text:
                yield "the pieces are not the answer"
        case "GenerateBatch":
            items = answers
            if len(answers) > num_messages or (is_ok and len(answers) != num_messages):
                yield f"{len(answers)} answers to {num_messages} requests"
        case "GenerateBulk":
            items = [item for answer in answers for item in answer.answers]
            places = sorted(item.index for item in items)
            if len(set(places)) != len(places) or (is_ok and places != list(range(len(places)))):
                yield f"answers are to requests {places[:50]}"
            if case.is_as_meant and len(items) != sum(len(GenerateBulkRequest.FromString(data).requests) for data in case.messages):
                yield f"{len(items)} answers to all requests of {num_messages} messages"
        case "ServerReflectionInfo":
            if is_ok and len(answers) != num_messages:
                yield f"{len(answers)} answers to {num_messages} questions"
            texts = [answer.error_response.error_message for answer in answers]
            yield from (f"internal text in {text!r}" for text in texts if INTERNAL_TEXT.search(text))
        case "Watch":
            if not {answer.status for answer in answers} <= {HealthCheckResponse.SERVING, HealthCheckResponse.SERVICE_UNKNOWN}:
                yield f"health was {answers}"
        case _:
            may_end = case.timeout_seconds is not None or case.cancel_seconds is not None
            if len(answers) > 1 or (is_ok and not answers) or (answers and not (is_ok or may_end)):
                yield f"{len(answers)} answers with {ending.code}"
    for item in items:
        yield from _about_item(case, item)


def _about_item(case: Case, item: Any) -> Iterator[str]:
    error = item.error
    if item.HasField("error"):
        allowed = {Code.INVALID_ARGUMENT.value[0], Code.NOT_FOUND.value[0]}
        if case.timeout_seconds is not None:
            allowed.add(Code.DEADLINE_EXCEEDED.value[0])
        if error.code not in allowed or case.is_as_meant:
            yield f"a request of a batch ended with {error.code}: {error.message!r}"
        elif error.code == Code.INVALID_ARGUMENT.value[0] and not _names_a_field(case, error.message):
            yield f"INVALID_ARGUMENT names no field: {error.message!r}"
        if INTERNAL_TEXT.search(error.message):
            yield f"internal text in {error.message!r}"
    elif not item.HasField("response"):
        yield "an answer of a batch is neither an answer nor an error"
    elif item.request_id != item.response.request_id or not item.request_id:
        yield f"an answer's id is {item.request_id[:200]!r}"
    if len(item.request_id) > 128:
        yield f"an id of {len(item.request_id)} characters came back"
