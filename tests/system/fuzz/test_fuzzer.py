"""The fuzzer itself: what it sends can be made again, and what it complains of is wrong."""

import random

import grpc
import pytest
from google.protobuf.message import DecodeError

from dragoman.v1.generation_pb2 import Error, GenerateBatchResponse, GenerateRequest, GenerateResponse, GenerateStreamResponse
from tests.system.fuzz.cases import GENERATE, REFLECTION, SCORE, SEEDS, Case, cases, make_case, methods
from tests.system.fuzz.oracle import Ending, complaints
from tests.system.fuzz.wire import Mutator, records

Code = grpc.StatusCode
KNOWN = methods(["dragoman.v1.Generation", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"])


@pytest.mark.parametrize("message", [*GENERATE, *SCORE, *REFLECTION], ids=lambda message: type(message).__name__)
def test_a_message_survives_being_taken_apart(message: GenerateRequest) -> None:
    assert type(message).FromString(b"".join(record.encode() for record in records(message))) == message


def test_a_seed_gives_the_same_cases_each_alone_or_all_in_turn() -> None:
    several = list(cases(3, KNOWN, 200))
    assert several == [make_case(3, case.number, KNOWN) for case in several] != list(cases(4, KNOWN, 200))
    assert 200 <= sum(max(1, len(case.messages)) for case in several) < 210


def test_every_method_gets_messages_right_and_wrong() -> None:
    sent: dict[str, set[bool]] = {path: set() for path in KNOWN}
    for case in cases(5, KNOWN, 5000):
        for message in case.messages if case.path in KNOWN else ():
            sent[case.path].add(_is_readable(case, message))
    assert all(readable == {True, False} for readable in sent.values()), sent
    assert {method.input_type.full_name for method in KNOWN.values()} == {kind.DESCRIPTOR.full_name for kind in SEEDS}


def _is_readable(case: Case, message: bytes) -> bool:
    assert case.method is not None
    kind = next(kind for kind in SEEDS if kind.DESCRIPTOR.full_name == case.method.input_type.full_name)
    try:
        kind.FromString(message)
    except DecodeError:
        return False
    return True


def test_every_field_is_set_to_extremes() -> None:
    mutator, seen = Mutator(random.Random(1)), set()
    for _ in range(2000):
        try:
            message = GenerateRequest.FromString(mutator.mutate(GENERATE[0]))
        except DecodeError:
            continue
        seen |= {field.name for field, _ in message.ListFields()}
    assert seen == {field.name for field in GenerateRequest.DESCRIPTOR.fields}


def case(
    method: str, *, is_as_meant: bool = False, timeout: float | None = None, cancel: float | None = None, messages: int = 1
) -> Case:
    path = next(path for path in KNOWN if path.endswith(f"/{method}"))
    return Case(0, path, KNOWN[path], (b"",) * messages, is_as_meant, True, (), timeout, cancel, 9)


def complain(case: Case, code: Code | None, details: str = "", *answers: bytes) -> list[str]:
    return list(complaints(case, Ending(code, details, answers)))


def test_endings_that_are_documented_are_let_through() -> None:
    assert not complain(case("Generate"), Code.OK, "", GenerateResponse().SerializeToString())
    assert not complain(case("Generate"), Code.INVALID_ARGUMENT, "text: is blank")
    assert not complain(case("Generate"), Code.INVALID_ARGUMENT, "x-request-id: 129 characters; at most 128 are allowed")
    assert not complain(case("Generate", timeout=0.1), Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert not complain(case("Generate", cancel=0.1), Code.CANCELLED, "Locally cancelled")
    assert not complain(case("Check"), Code.NOT_FOUND)


@pytest.mark.parametrize(
    ("sent", "code", "details"),
    [
        (case("Generate"), None, ""),
        (case("Generate"), Code.INTERNAL, "internal error; quote incident 1"),
        (case("Check"), Code.UNKNOWN, "no idea"),
        (case("Generate"), Code.DEADLINE_EXCEEDED, "it had none"),
        (case("Generate"), Code.CANCELLED, "nobody did"),
        (case("Generate"), Code.RESOURCE_EXHAUSTED, "it was small"),
        (case("Generate"), Code.UNAVAILABLE, "the server is there"),
        (case("Generate", is_as_meant=True), Code.INVALID_ARGUMENT, "text: is blank"),
        (case("Generate"), Code.INVALID_ARGUMENT, "something is wrong"),
        (case("Generate"), Code.INVALID_ARGUMENT, "nothing: is no field"),
        (case("Generate"), Code.INVALID_ARGUMENT, "text: ValueError"),
        (case("Generate"), Code.INVALID_ARGUMENT, "text: in /usr/lib/x"),
        (case("Generate"), Code.INVALID_ARGUMENT, "text: Unexpected <class 'x'>"),
        (case("Generate"), Code.OK, ""),
        (case("Generate", messages=0), Code.OK, ""),
        (case("Generate", messages=0), Code.UNIMPLEMENTED, "Method not found!"),
        (case("GenerateStream"), Code.OK, ""),
        (case("GenerateBatch", messages=2), Code.OK, ""),
    ],
)
def test_other_endings_are_complained_of(sent: Case, code: Code | None, details: str) -> None:
    assert complain(sent, code, details)


def test_answers_are_looked_at_too() -> None:
    broken = GenerateBatchResponse(request_id="a", error=Error(code=13, message="internal error")).SerializeToString()
    assert complain(case("GenerateBatch"), Code.OK, "", broken)
    echoed = GenerateBatchResponse(request_id="a" * 129, error=Error(code=3, message="request_id: too long")).SerializeToString()
    assert complain(case("GenerateBatch"), Code.OK, "", echoed) == ["an id of 129 characters came back"]
    swapped = GenerateBatchResponse(request_id="a", response=GenerateResponse(request_id="b")).SerializeToString()
    assert complain(case("GenerateBatch"), Code.OK, "", swapped)
    last = GenerateStreamResponse(text="b", result=GenerateResponse(text="ab"))
    whole = [GenerateStreamResponse(text="a").SerializeToString(), last.SerializeToString()]
    assert not complain(case("GenerateStream"), Code.OK, "", *whole)
    assert complain(case("GenerateStream"), Code.OK, "", whole[1])
    assert complain(case("GenerateStream"), Code.OK, "", *whole, whole[0])
    assert complain(case("Generate"), Code.OK, "", b"\xff")
