from contextvars import copy_context
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.grpc.reading import Refused, large_bytes_read
from dragoman.server.faces.grpc.several import MAX_BYTES, MAX_FIELDS, MAX_REQUESTS, put_together, reader_of_several, take_apart
from dragoman.server.faces.large_requests import LARGE_BYTES
from dragoman.v1.generation_pb2 import (
    GenerateBatchResponse,
    GenerateBulkRequest,
    GenerateBulkResponse,
    GenerateRequest,
    GenerateResponse,
)


def requests(count: int, text: str = "ä" * 100) -> list[GenerateRequest]:
    return [GenerateRequest(text=text[: i % 80], request_id=f"r{i}", num_beams=i or None) for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 200, MAX_REQUESTS])
def test_a_message_comes_apart_as_protobuf_has_it(count: int) -> None:
    message = GenerateBulkRequest(requests=requests(count))
    assert take_apart(message.SerializeToString()) == [request.SerializeToString() for request in message.requests]


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_answers_put_together_are_what_protobuf_makes_of_them(length: int) -> None:
    answers = [GenerateBatchResponse(index=i, response=GenerateResponse(text="x" * length)) for i in range(3)]
    assert put_together([answer.SerializeToString() for answer in answers]) == GenerateBulkResponse(
        answers=answers
    ).SerializeToString(deterministic=True)
    assert put_together([]) == b""


def test_fields_of_later_versions_are_left_out() -> None:
    part = GenerateRequest(text="a").SerializeToString()
    mine = b"\x0a" + bytes([len(part)]) + part
    others = b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x03abc" + b"\xfa\x01\x01x"
    assert take_apart(others + mine + others + mine) == [part, part]


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05abc", b"\x0a\xff", b"\xff" * 11, b"\x00\x00", b"\x19\x00", b"\x10", b"\x0e\x00"],
)
def test_what_protobuf_cannot_read_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        GenerateBulkRequest.FromString(data)
    with pytest.raises(DecodeError):
        take_apart(data)


def test_too_many_are_refused_before_they_are_made() -> None:
    million = b"\x0a\x00" * 1_000_000
    with pytest.raises(InvalidRequest, match=rf"^requests: more than {MAX_REQUESTS} in one message$"):
        take_apart(million)
    # What it notes of a large message is meant for the call that it belongs to, and for no test after this one.
    refused = copy_context().run(reader_of_several(lambda data: data), million)
    assert isinstance(refused, Refused) and refused.ByteSize() == 0


class Watched(bytes):
    """A message that counts how often it is looked at."""

    num_looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("field", [b"\x10\x00", b"\x12\x00", b"\x15" + bytes(4), b"\x19" + bytes(8)])
def test_fields_that_nobody_knows_are_not_looked_at_without_end(field: bytes) -> None:
    """Four million bytes of them took seconds, in which the server answered nobody."""
    known = b"\x0a\x01a"
    assert take_apart(known + field * (MAX_FIELDS - 1)) == [b"a"]
    data = Watched(field * 100_000)
    with pytest.raises(InvalidRequest, match=rf"^request: more than {MAX_FIELDS} fields in one message$"):
        take_apart(data)
    assert data.num_looks <= 2 * MAX_FIELDS


def test_several_together_are_no_larger_than_what_may_wait_for_its_turn() -> None:
    """Of each stream the server would have kept as much as the largest message has, where it keeps of a request what models use."""
    half = bytes(MAX_BYTES // 2 - 4)
    assert take_apart(put_together([half, half])) == [half, half]
    assert take_apart(put_together([half * 8])) == [half * 8], "alone a request may have any size"
    with pytest.raises(InvalidRequest, match=rf"^requests: several in one message of more than {MAX_BYTES} bytes$"):
        take_apart(put_together([half, half + bytes(10)]))


def test_each_request_is_read_when_it_is_taken_and_then_forgotten() -> None:
    read: list[bytes] = []

    def reading(data: bytes) -> str:
        read.append(data)
        return data.decode()

    data = put_together([b"one", b"three"])
    several = reader_of_several(reading)(data)
    assert not isinstance(several, Refused)
    assert (len(several), several.ByteSize(), read) == (2, 8, [])
    assert several.take() == "one"
    assert (len(several), several.ByteSize(), read) == (1, 5, [b"one"])


def test_a_large_message_is_noted_as_one() -> None:
    token = large_bytes_read.set(0)
    try:
        reader_of_several(lambda data: data)(put_together([b"x" * 10]))
        assert large_bytes_read.get() == 0
        data = put_together([b"x" * LARGE_BYTES])
        reader_of_several(lambda data: data)(data)
        assert large_bytes_read.get() == len(data)
    finally:
        large_bytes_read.reset(token)
