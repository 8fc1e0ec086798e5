"""In-flight windows of streams, the pace of connections, and what is kept of large and of bulk messages over gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from dragoman.server.errors import ConnectionLimit, IdleStream, InvalidRequest, QueueFull
from dragoman.server.protocols.grpc.health import Reflection
from dragoman.server.protocols.grpc.inflight import (
    BURST_SECONDS,
    MAX_PEERS,
    MAX_UNTAKEN_BYTES,
    MAX_WAIT_SECONDS,
    NUM_REMEMBERED_IDS,
    Allowance,
    Hand,
    Pace,
    RecentIds,
)
from dragoman.server.protocols.grpc.interceptors import cancellation_code
from dragoman.server.protocols.grpc.reading import (
    ARRIVALS_AT_ONCE,
    MAX_BYTES,
    MAX_FIELDS,
    MAX_REQUESTS,
    READS_AT_ONCE,
    Arrivals,
    Refused,
    Several,
    Turns,
    large_bytes_read,
    put_together,
    reader,
    reader_of_several,
    take_apart,
)
from dragoman.server.protocols.several_requests import LARGE_BYTES, LargeRequests
from dragoman.v1.generation_pb2 import (
    GenerateBatchResponse,
    GenerateBulkRequest,
    GenerateBulkResponse,
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
)

MEGABYTE = 2**20


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def is_waiting(wait: Coroutine[Any, Any, Any]) -> bool:
    task = asyncio.ensure_future(wait)
    await settle()
    done = task.done()
    task.cancel()
    return not done


def fill(hand: Hand, count: int, num_bytes: int) -> None:
    for _ in range(count):
        hand.read(num_bytes)


# In-flight windows


async def test_a_stream_alone_has_its_window_of_requests_until_answers_are_taken() -> None:
    hand = Allowance(max_requests=100, max_bytes=1000).open(8)
    fill(hand, 7, 1)
    assert not await is_waiting(hand.room())
    fill(hand, 1, 1)
    assert await is_waiting(hand.room())
    hand.answered(1, 5)
    assert await is_waiting(hand.room())
    hand.taken(5)
    assert not await is_waiting(hand.room()) and (hand.num_requests, hand.num_bytes) == (7, 7)


async def test_streams_have_equal_parts_and_at_least_one_request_each() -> None:
    allowance = Allowance(max_requests=20, max_bytes=1000)
    hands = [allowance.open(8) for _ in range(10)]
    for hand in hands:
        fill(hand, 1, 10)
    for hand in hands:
        while not await is_waiting(hand.room()):
            fill(hand, 1, 10)
    assert [hand.num_requests for hand in hands] == [2] * 10
    for hand in [allowance.open(8) for _ in range(30)]:
        assert not await is_waiting(hand.room())
        fill(hand, 1, 10)
        assert await is_waiting(hand.room())
    idle = Allowance(max_requests=20, max_bytes=1000)
    hand, _others = idle.open(8), [idle.open(8) for _ in range(1000)]
    fill(hand, 7, 10)
    assert not await is_waiting(hand.room()), "idle streams take nothing from the others"


async def test_an_owner_of_many_streams_has_no_more_than_another_with_one() -> None:
    allowance = Allowance(max_requests=20, max_bytes=1000)
    many = [allowance.open(8, "many") for _ in range(100)]
    for hand in many:
        fill(hand, 1, 100)
    one = allowance.open(100, "one")
    while not await is_waiting(one.room()):
        fill(one, 1, 10)
    assert one.num_requests == 10 and all([await is_waiting(hand.room()) for hand in many])
    waiting = asyncio.create_task(one.room())
    await settle()
    for hand in many:
        hand.close()
    await asyncio.wait_for(waiting, 60)


async def test_bytes_of_all_streams_are_bounded_and_freed_by_answers_and_ends() -> None:
    allowance = Allowance(max_requests=1000, max_bytes=1000)
    for hand in [allowance.open(500) for _ in range(5)]:
        while not await is_waiting(hand.room()):
            fill(hand, 1, 60)
    assert 1000 <= allowance.num_bytes <= 1000 + 5 * 60
    two = Allowance(max_requests=1000, max_bytes=1000)
    greedy, modest = two.open(500), two.open(500)
    fill(greedy, 1, 1000)
    fill(modest, 1, 1)
    waiting = asyncio.create_task(modest.room())
    await settle()
    assert not waiting.done()
    greedy.close()
    await asyncio.wait_for(waiting, 60)
    assert two.num_bytes == 1
    hand = Allowance().open(500)
    fill(hand, 2, 10)
    hand.answered(10, MAX_UNTAKEN_BYTES)
    assert not await is_waiting(hand.turn())
    hand.answered(10, 1)
    assert await is_waiting(hand.turn()), "large answers are not taken"
    hand.taken(1)
    assert not await is_waiting(hand.turn())


def test_recent_ids_are_remembered_and_old_ones_forgotten() -> None:
    ids = RecentIds()
    assert all(ids.add(f"{i}") for i in range(10 * NUM_REMEMBERED_IDS))
    assert not any(ids.add(f"{i}") for i in range(9 * NUM_REMEMBERED_IDS, 10 * NUM_REMEMBERED_IDS))
    assert ids.add("0")


# The pace of a connection


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    clock = Clock()
    pace, burst = Pace(100, clock), round(100 * BURST_SECONDS)
    waits = [pace.take("a") for _ in range(300)]
    assert waits[:burst] == [0.0] * burst and waits[burst:] == pytest.approx([n / 100 for n in range(1, 301 - burst)])
    assert pace.take("b") == 0, "another connection is not held up"
    clock.seconds += 100
    assert [pace.take("a") for _ in range(burst)] == [0.0] * burst
    slow = Pace(1, clock)
    assert [slow.take("a") for _ in range(round(BURST_SECONDS + MAX_WAIT_SECONDS))][-1] == MAX_WAIT_SECONDS
    for _ in range(3):
        with pytest.raises(ConnectionLimit, match="max_messages_per_second: 1 on one connection") as caught:
            slow.take("a")
        assert caught.value.retry_after_seconds == 1
    clock.seconds += 1
    assert slow.take("a") == MAX_WAIT_SECONDS, "what was refused has not been counted"
    for peer in ("busy", *map(str, range(MAX_PEERS - 1)), "busy", "one more"):
        slow.take(peer)
    assert (slow.take("busy"), slow.take("0")) == (2.0, 0.0), "quiet connections are forgotten first"


@pytest.mark.parametrize(
    ("messages", "num_read", "cost"),
    [([30, None], 2, 31), ([30, 30], 1, 30), ([0] * 30, 30, 30)],
    ids=["several", "left early", "empty"],
)
async def test_a_message_of_several_requests_costs_as_many(messages: list[int | None], num_read: int, cost: int) -> None:
    async def stream() -> AsyncIterator[Any]:
        for count in messages:
            yield b"a" if count is None else Several([b"a"] * count, bytes)

    pace = Pace(100, Clock())
    read = pace.read(stream(), "a")
    for _ in range(num_read):
        await anext(read)
    await read.aclose()  # type: ignore[attr-defined]
    assert sum(not pace.take("a") for _ in range(100)) == 100 * BURST_SECONDS - cost


@pytest.mark.parametrize(
    ("timeout", "remaining", "code"),
    [
        (None, None, "CANCELLED"),
        *[(0.2, remaining, "DEADLINE_EXCEEDED") for remaining in (0.0, 0.04)],
        *[(0.2, 0.1, "CANCELLED"), (0.02, 0.015, "CANCELLED"), (61.0, 0.6, "DEADLINE_EXCEEDED"), (61.0, 5.0, "CANCELLED")],
    ],
)
def test_a_caller_gives_up_a_little_before_its_deadline_passes_here(timeout: Any, remaining: Any, code: str) -> None:
    """A timeout of 60.1 seconds is written as 61: the caller's end of the call comes before ours."""
    context: Any = SimpleNamespace(time_remaining=lambda: remaining)
    elapsed = 0.0 if timeout is None else timeout - remaining
    assert cancellation_code(context, time.monotonic() - elapsed) == code


async def test_a_reflection_stream_on_which_nothing_comes_ends() -> None:
    async def nothing() -> AsyncIterator[Any]:
        yield ServerReflectionRequest(list_services="")
        await asyncio.Event().wait()

    context: Any = SimpleNamespace(peer=lambda: "somebody")
    answers = Reflection(idle_seconds=0.01).ServerReflectionInfo(nothing(), context)
    assert (await anext(answers)).HasField("list_services_response")
    with pytest.raises(IdleStream, match=r"0\.01 s"):
        await anext(answers)


# Large messages


def read(message: Any, max_characters: int = 100) -> Any:
    return reader(type(message).FromString, lambda: max_characters)(message.SerializeToString())


def test_of_a_large_message_only_what_a_model_could_use_is_kept() -> None:
    """A source that is too long is cut at its end, but a prompt at its beginning: both ends are kept."""
    small = GenerateRequest(text="x" * 1000, suppressed_tokens=[1] * 300, request_id="y" * 200)
    assert read(small) == small
    message = ScoreRequest(text="é" * MEGABYTE, target="x" * MEGABYTE, request_id="r", priority=3, length_penalty=0.0)
    unknown = message.SerializeToString() + b"\xf2\x7f" + b"\x80\x80\x40" + b"z" * MEGABYTE
    kept = reader(ScoreRequest.FromString, lambda: 100)(unknown)
    assert kept == ScoreRequest(text="é" * 200, target="x" * 200, request_id="r", priority=3, length_penalty=0.0)
    assert kept.ByteSize() < 700
    both = read(GenerateRequest(text="a" * 100 + "?" * MEGABYTE + "z" * 100, truncate=True))
    assert both.text == "a" * 100 + "z" * 100


@pytest.mark.parametrize(
    ("fields", "request_id"),
    [
        *[({field: "x" * MEGABYTE}, "") for field in ("request_id", "model", "source_language", "target_language")],
        ({"suppressed_tokens": [1] * MEGABYTE, "request_id": "mine"}, "mine"),
        ({"request_id": "a\nb", "text": "x" * MEGABYTE}, ""),
    ],
    ids=lambda fields: next(iter(fields)) if isinstance(fields, dict) else fields,
)
def test_a_refused_message_keeps_its_id_alone(fields: dict[str, Any], request_id: str) -> None:
    """A traceback would keep the message: its frames have the fields."""
    refused = read(GenerateRequest(**{"text": "a"} | fields))
    assert isinstance(refused, Refused) and refused.error.message.startswith(f"{next(iter(fields))}: ")
    assert refused.error.__traceback__ is None and refused.error.__context__ is None
    assert (refused.request_id, refused.ByteSize()) == (request_id, 0)


async def test_idle_streams_and_half_sent_messages_lose_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.server.protocols.grpc.reading.READ_SECONDS", 0.01)
    monkeypatch.setattr("dragoman.server.protocols.grpc.reading.ARRIVAL_SECONDS", 0.01)
    turns, never = Turns(), asyncio.Event()
    idle = [asyncio.create_task(turns.take(never.wait())) for _ in range(5 * READS_AT_ONCE)]
    assert await asyncio.wait_for(turns.take(asyncio.sleep(0, "read")), 60) == "read"
    arrivals, began = Arrivals(), []

    async def reading() -> bool:
        began.append(1)
        return await never.wait()

    first = [asyncio.create_task(arrivals.take(reading)) for _ in range(ARRIVALS_AT_ONCE)]
    await asyncio.sleep(0)
    gone, second = [asyncio.create_task(arrivals.take(reading)) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(began) == ARRIVALS_AT_ONCE
    gone.cancel()
    [late], kept = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    refused = late.result()
    assert late is first[0] and isinstance(refused, Refused)
    assert refused.error.code == "RESOURCE_EXHAUSTED" and refused.error.retry_after_seconds
    never.set()
    assert await asyncio.gather(second, *kept) == [True] * ARRIVALS_AT_ONCE
    assert gone.cancelled() and len(began) == ARRIVALS_AT_ONCE + 1
    await asyncio.gather(*idle)
    assert turns._free._value == READS_AT_ONCE and not arrivals._coming and not arrivals._waiting and not arrivals._ended


def test_one_callers_large_requests_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool for all had let eight large requests of one caller keep out everybody's."""
    monkeypatch.setattr("dragoman.server.protocols.several_requests.MAX_LARGE_BYTES", 100)
    large = LargeRequests()
    with large.one_more(90, "a"):
        with pytest.raises(QueueFull), large.one_more(20, "a"):
            pass
        with large.one_more(30, "b"), large.one_more(20, "b"), pytest.raises(QueueFull), large.one_more(1, "b"):
            pass
        with large.one_more(1000, "c"):
            pass
    with large.one_more(60, "a"), large.one_more(40, "a"):
        pass


# Bulk messages


@pytest.mark.parametrize("count", [0, 1, 2, 200, MAX_REQUESTS])
def test_a_bulk_message_comes_apart_as_protobuf_has_it(count: int) -> None:
    requests = [GenerateRequest(text="ä" * (i % 80), request_id=f"r{i}", num_beams=i or None) for i in range(count)]
    message = GenerateBulkRequest(requests=requests).SerializeToString()
    assert take_apart(message) == [request.SerializeToString() for request in requests]
    others = b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x03abc" + b"\xfa\x01\x01x"
    assert take_apart(others + message + others) == take_apart(message), "fields of later versions are left out"


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_answers_put_together_are_what_protobuf_makes_of_them(length: int) -> None:
    answers = [GenerateBatchResponse(index=i, response=GenerateResponse(text="x" * length)) for i in range(3)]
    expected = GenerateBulkResponse(answers=answers).SerializeToString(deterministic=True)
    assert put_together([answer.SerializeToString() for answer in answers]) == expected and put_together([]) == b""


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05abc", b"\x0a\xff", b"\xff" * 11, b"\x00\x00", b"\x19\x00", b"\x10", b"\x0e\x00"]
)
def test_bytes_that_protobuf_cannot_read_are_refused(data: bytes) -> None:
    for parse in (GenerateBulkRequest.FromString, take_apart):
        with pytest.raises(DecodeError):
            parse(data)


class Watched(bytes):
    """A message that counts how often it is looked at."""

    num_looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("field", [b"\x10\x00", b"\x12\x00", b"\x15" + bytes(4), b"\x19" + bytes(8)])
def test_unknown_fields_are_not_looked_at_without_end(field: bytes) -> None:
    """Four million bytes of them took seconds, in which the server answered nobody."""
    assert take_apart(b"\x0a\x01a" + field * (MAX_FIELDS - 1)) == [b"a"]
    data = Watched(field * 100_000)
    with pytest.raises(InvalidRequest, match=rf"^request: more than {MAX_FIELDS} fields in one message$"):
        take_apart(data)
    assert data.num_looks <= 2 * MAX_FIELDS


def test_bulk_messages_are_bounded_in_requests_and_bytes() -> None:
    half = bytes(MAX_BYTES // 2 - 4)
    assert take_apart(put_together([half, half])) == [half, half]
    assert take_apart(put_together([half * 8])) == [half * 8], "alone a request may have any size"
    with pytest.raises(InvalidRequest, match=rf"^requests: several in one message of more than {MAX_BYTES} bytes$"):
        take_apart(put_together([half, half + bytes(10)]))
    million = b"\x0a\x00" * 1_000_000
    with pytest.raises(InvalidRequest, match=rf"^requests: more than {MAX_REQUESTS} in one message$"):
        take_apart(million)
    refused = copy_context().run(reader_of_several(lambda data: data), million)
    assert isinstance(refused, Refused) and refused.ByteSize() == 0


def test_each_request_of_a_bulk_message_is_read_when_it_is_taken() -> None:
    several = reader_of_several(GenerateRequest.FromString)(
        put_together([b"\xff", message := GenerateRequest(text="a").SerializeToString()])
    )
    assert not isinstance(several, Refused) and (len(several), several.ByteSize()) == (2, 1 + len(message))
    with pytest.raises(DecodeError):
        several.take()
    assert (several.take().text, len(several), several.ByteSize()) == ("a", 0, 0)
    for length, noted in ((10, False), (LARGE_BYTES, True)):
        data, context = put_together([b"x" * length]), copy_context()
        context.run(large_bytes_read.set, 0)
        context.run(reader_of_several(lambda data: data), data)
        assert context[large_bytes_read] == (len(data) if noted else 0)
