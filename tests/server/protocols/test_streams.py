"""In-flight windows of streams, the pace of connections, and what is kept of large and of bulk messages over gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from dragoman.server.errors import ConnectionLimit, IdleStream, InvalidRequest, QueueFull
from dragoman.server.protocols.bulk import num_requests
from dragoman.server.protocols.grpc import streams
from dragoman.server.protocols.grpc.health import Reflection
from dragoman.server.protocols.grpc.interceptors import cancellation_code, current_call
from dragoman.server.protocols.grpc.reading import (
    MAX_BYTES,
    MAX_REQUESTS,
    BulkRequest,
    Refused,
    bulk_parser,
    join,
    large_bytes_read,
    parser,
    split,
)
from dragoman.server.protocols.grpc.streams import NUM_REMEMBERED_IDS, Batch, RecentIds
from dragoman.server.service.context import Call
from dragoman.server.service.in_flight import LARGE_BYTES, MAX_UNWRITTEN_BYTES, InFlight, MessageRate, Receiving, Window
from dragoman.v1.generation_pb2 import (
    GenerateBatchResponse,
    GenerateBulkRequest,
    GenerateBulkResponse,
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
)
from tests.clock import Clock

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


def fill(window: Window, count: int, num_bytes: int) -> None:
    for _ in range(count):
        window.begin(num_bytes)


class Windows:
    """The windows of a frontend; those of a test stay open until `close`."""

    def __init__(self, max_requests: int = 1024, max_bytes: int = 32 * MEGABYTE) -> None:
        self.most = 8
        self.all = InFlight(lambda: self.most, max_requests, max_bytes)
        self._open: dict[Window, Any] = {}

    def open(self, most: int, caller: str = "") -> Window:
        self.most = most
        context = self.all.window(caller)
        window = context.__enter__()
        self._open[window] = context
        return window

    def close(self, window: Window) -> None:
        self._open.pop(window).__exit__(None, None, None)


# In-flight windows


async def test_a_stream_alone_has_its_window_of_requests_until_answers_are_written() -> None:
    window = Windows(max_requests=100, max_bytes=1000).open(8)
    fill(window, 7, 1)
    assert not await is_waiting(window.wait())
    fill(window, 1, 1)
    assert await is_waiting(window.wait())
    window.answered(1, 5)
    assert await is_waiting(window.wait())
    window.end(5)
    assert not await is_waiting(window.wait()) and (window.num_requests, window.num_bytes) == (7, 7)


async def test_streams_have_equal_shares_and_at_least_one_request_each() -> None:
    windows = Windows(max_requests=20, max_bytes=1000)
    ten = [windows.open(8) for _ in range(10)]
    for window in ten:
        fill(window, 1, 10)
    for window in ten:
        while not await is_waiting(window.wait()):
            fill(window, 1, 10)
    assert [window.num_requests for window in ten] == [2] * 10
    for window in [windows.open(8) for _ in range(30)]:
        assert not await is_waiting(window.wait())
        fill(window, 1, 10)
        assert await is_waiting(window.wait())
    idle = Windows(max_requests=20, max_bytes=1000)
    window, _others = idle.open(8), [idle.open(8) for _ in range(1000)]
    fill(window, 7, 10)
    assert not await is_waiting(window.wait()), "idle streams take nothing from the others"


async def test_a_caller_with_many_streams_has_no_more_than_another_with_one() -> None:
    windows = Windows(max_requests=20, max_bytes=1000)
    many = [windows.open(8, "many") for _ in range(100)]
    for window in many:
        fill(window, 1, 100)
    one = windows.open(100, "one")
    while not await is_waiting(one.wait()):
        fill(one, 1, 10)
    assert one.num_requests == 10 and all([await is_waiting(window.wait()) for window in many])
    waiting = asyncio.create_task(one.wait())
    await settle()
    for window in many:
        windows.close(window)
    await asyncio.wait_for(waiting, 60)


async def test_bytes_of_all_streams_are_bounded_and_freed_by_answers_and_ends() -> None:
    windows = Windows(max_requests=1000, max_bytes=1000)
    for window in [windows.open(500) for _ in range(5)]:
        while not await is_waiting(window.wait()):
            fill(window, 1, 60)
    assert 1000 <= windows.all.num_bytes <= 1000 + 5 * 60
    two = Windows(max_requests=1000, max_bytes=1000)
    greedy, modest = two.open(500), two.open(500)
    fill(greedy, 1, 1000)
    fill(modest, 1, 1)
    waiting = asyncio.create_task(modest.wait())
    await settle()
    assert not waiting.done()
    two.close(greedy)
    await asyncio.wait_for(waiting, 60)
    assert two.all.num_bytes == 1
    window = Windows().open(500)
    fill(window, 2, 10)
    window.answered(10, MAX_UNWRITTEN_BYTES)
    assert not await is_waiting(window.wait())
    window.answered(10, 1)
    assert await is_waiting(window.wait()), "large answers are not written"
    window.end(1)
    assert not await is_waiting(window.wait())


def test_one_callers_large_requests_leave_room_for_others() -> None:
    """One pool for all had let eight large requests of one caller keep out everybody's."""
    in_flight = InFlight(lambda: 1, max_bytes=100)
    with in_flight.window("a", 90):
        with pytest.raises(QueueFull), in_flight.window("a", 20):
            pass
        with in_flight.window("b", 30), in_flight.window("b", 20), pytest.raises(QueueFull), in_flight.window("b", 1):
            pass
        with in_flight.window("c", 1000):
            pass
    with in_flight.window("a", 60), in_flight.window("a", 40):
        pass
    with in_flight.window("a") as stream, in_flight.window("b", 90) as compressed:
        stream.begin(40)
        with in_flight.window("a", 90):  # the only large one of its caller
            pass
        compressed.reserve(10)
        with in_flight.window("b", 40):
            pass
    assert in_flight.num_bytes == 0


async def test_requests_of_one_message_begin_as_there_is_room_and_fail_together() -> None:
    window, began, gate = Windows().open(4), [], asyncio.Event()

    async def serve(number: int) -> int:
        began.append(number)
        await gate.wait()
        if number == 7:
            raise ValueError(number)
        return -number

    for most, at_once in ((None, 4), (3, 3)):
        began.clear()
        gate.clear()
        running = asyncio.create_task(window.run_each(6, serve, most))
        await settle()
        assert began == list(range(at_once))
        gate.set()
        assert await running == [0, -1, -2, -3, -4, -5] and not window.is_busy
    has_begun = asyncio.Event()
    with pytest.raises(ValueError, match="7"):
        await window.run_each(30, serve, None, has_begun)
    assert has_begun.is_set() and not window.is_busy


def test_recent_ids_are_remembered_and_old_ones_forgotten() -> None:
    ids = RecentIds()
    assert all(ids.add(f"{i}") for i in range(10 * NUM_REMEMBERED_IDS))
    assert not any(ids.add(f"{i}") for i in range(9 * NUM_REMEMBERED_IDS, 10 * NUM_REMEMBERED_IDS))
    assert ids.add("0")


# The pace of a connection


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    clock = Clock()
    rate, burst = MessageRate(100, clock), round(100 * MessageRate.BURST_SECONDS)
    waits = [rate.count("a") for _ in range(300)]
    assert waits[:burst] == [0.0] * burst and waits[burst:] == pytest.approx([n / 100 for n in range(1, 301 - burst)])
    assert rate.count("b") == 0, "another connection is not held up"
    clock.now += 100
    assert [rate.count("a") for _ in range(burst)] == [0.0] * burst
    slow, most = MessageRate(1, clock), MessageRate.MAX_WAIT_SECONDS
    assert [slow.count("a") for _ in range(round(MessageRate.BURST_SECONDS + most))][-1] == most
    for _ in range(3):
        with pytest.raises(ConnectionLimit, match="max_messages_per_second: 1 on one connection") as caught:
            slow.count("a", 1, most)
        assert caught.value.retry_after_seconds == 1
    clock.now += 1
    assert slow.count("a", 1, most) == most, "what was refused has not been counted"
    for peer in ("busy", *map(str, range(MessageRate.MAX_CONNECTIONS - 1)), "busy", "one more"):
        slow.count(peer)
    assert (slow.count("busy"), slow.count("0")) == (2.0, 0.0), "quiet connections are forgotten first"


@pytest.mark.parametrize(
    ("messages", "num_read", "cost"),
    [([30, None], 2, 31), ([30, 30], 1, 30), ([0] * 30, 30, 30)],
    ids=["several", "left early", "empty"],
)
async def test_a_message_of_several_requests_costs_as_many(messages: list[int | None], num_read: int, cost: int) -> None:
    async def stream() -> AsyncIterator[Any]:
        for count in messages:
            yield b"a" if count is None else BulkRequest([b"a"] * count, bytes)

    rate = MessageRate(100, Clock())
    read = rate.read(stream(), "a", num_requests)
    for _ in range(num_read):
        await anext(read)
    await read.aclose()  # type: ignore[attr-defined]
    assert sum(not rate.count("a") for _ in range(100)) == 100 * MessageRate.BURST_SECONDS - cost


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
    return parser(type(message).FromString, lambda: max_characters)(message.SerializeToString())


def test_of_a_large_message_only_what_a_model_could_use_is_kept() -> None:
    """A source that is too long is cut at its end, but a prompt at its beginning: both ends are kept."""
    small = GenerateRequest(text="x" * 1000, suppressed_tokens=[1] * 300, request_id="y" * 200)
    assert read(small) == small
    message = ScoreRequest(text="é" * MEGABYTE, target="x" * MEGABYTE, request_id="r", priority=3, length_penalty=0.0)
    unknown = message.SerializeToString() + b"\xf2\x7f" + b"\x80\x80\x40" + b"z" * MEGABYTE
    kept = parser(ScoreRequest.FromString, lambda: 100)(unknown)
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


async def test_half_sent_messages_lose_their_place_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiving, "MAX_SECONDS", 0.01)
    receiving, never, began = Receiving(), asyncio.Event(), []

    async def read() -> bool:
        began.append(1)
        return await never.wait()

    first = [asyncio.create_task(receiving.receive("a", read)) for _ in range(Receiving.MAX_MESSAGES)]
    await asyncio.sleep(0.02)
    assert len(began) == Receiving.MAX_MESSAGES and not any(task.done() for task in first)
    assert await receiving.receive("b", lambda: asyncio.sleep(0, True)), "another connection is not held up"
    second = asyncio.create_task(receiving.receive("a", read))
    [late], kept = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    error = late.exception()
    assert late is first[0] and isinstance(error, QueueFull) and error.retry_after_seconds
    gone = asyncio.create_task(receiving.receive("a", read))
    await asyncio.sleep(0)
    gone.cancel()
    never.set()
    await asyncio.wait([gone, second, *kept])
    assert gone.cancelled() and second.result() and len(began) == Receiving.MAX_MESSAGES + 1
    assert await receiving.receive("a", read) and not receiving._started and not receiving._waiting and not receiving._late


async def test_messages_that_come_together_are_all_received_a_bounded_number_at_once() -> None:
    receiving, num_reading, most = Receiving(), 0, 0

    async def read() -> bool:
        nonlocal num_reading, most
        num_reading += 1
        most = max(most, num_reading)
        await asyncio.sleep(0)
        num_reading -= 1
        return True

    for count in (18, 20, 32, 100):
        assert all(await asyncio.gather(*(receiving.receive("a", read) for _ in range(count))))
    assert most == Receiving.MAX_MESSAGES and not receiving._started


# Bulk messages


@pytest.mark.parametrize("count", [0, 1, 2, 200, MAX_REQUESTS])
def test_a_bulk_message_comes_apart_as_protobuf_has_it(count: int) -> None:
    requests = [GenerateRequest(text="ä" * (i % 80), request_id=f"r{i}", num_beams=i or None) for i in range(count)]
    message = GenerateBulkRequest(requests=requests).SerializeToString()
    assert split(message) == [request.SerializeToString() for request in requests]
    others = b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x03abc" + b"\xfa\x01\x01x"
    assert split(others + message + others) == split(message), "fields of later versions are left out"


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_answers_put_together_are_what_protobuf_makes_of_them(length: int) -> None:
    answers = [GenerateBatchResponse(index=i, response=GenerateResponse(text="x" * length)) for i in range(3)]
    expected = GenerateBulkResponse(answers=answers).SerializeToString(deterministic=True)
    assert join([answer.SerializeToString() for answer in answers]) == expected and join([]) == b""


class Written:
    """The messages that a stream with a window of eight requests writes."""

    def __init__(self, num_requests: int, max_together_bytes: int = 1000) -> None:
        self.messages: list[bytes] = []
        self.window = Windows().open(8)
        fill(self.window, num_requests, 1)
        current_call.set(Call("/a/B", cast(Any, None), window=self.window))
        service: Any = SimpleNamespace(calls=SimpleNamespace(draining=asyncio.Event()))
        self.stream = Batch(cast(Any, None), service, cast(Any, self), max_together_bytes)

    async def write(self, message: bytes) -> None:
        self.messages.append(message)


async def test_answers_wait_for_others_while_requests_of_their_stream_fill_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TOGETHER_SECONDS", 60.0)
    answers = [bytes([i]) for i in range(8)]
    async with asyncio.TaskGroup() as tasks:
        written = Written(8)
        for answer in answers[:3]:
            tasks.create_task(written.stream.finish(1, answer))
            await settle()
        assert not written.messages, "five requests are more than half of the window"
        tasks.create_task(written.stream.finish(1, answers[3]))
        await settle()
        assert written.messages == [join(answers[:4])] and written.window.num_requests == 4
        for answer in answers[4:]:
            tasks.create_task(written.stream.finish(1, answer))
            await settle()
        assert written.messages[1:] == [join([answer]) for answer in answers[4:]], "the last ones wait for nothing"
        single = Written(8, max_together_bytes=0)
        tasks.create_task(single.stream.finish(1, b"a"))
        await settle()
        assert single.messages == [b"a"]
    monkeypatch.setattr(streams, "TOGETHER_SECONDS", 0.01)
    late = Written(8)
    await late.stream.finish(1, b"a")
    assert late.messages == [join([b"a"])], "nobody waits for longer"


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05abc", b"\x0a\xff", b"\xff" * 11, b"\x00\x00", b"\x19\x00", b"\x10", b"\x0e\x00"]
)
def test_bytes_that_protobuf_cannot_read_are_refused(data: bytes) -> None:
    for parse in (GenerateBulkRequest.FromString, split):
        with pytest.raises(DecodeError):
            parse(data)


def test_bulk_messages_are_bounded_in_requests_and_bytes() -> None:
    half = bytes(MAX_BYTES // 2 - 4)
    assert split(join([half, half])) == [half, half]
    assert split(join([half * 8])) == [half * 8], "alone a request may have any size"
    with pytest.raises(InvalidRequest, match=rf"^requests: several in one message of more than {MAX_BYTES} bytes$"):
        split(join([half, half + bytes(10)]))
    millions, small = b"\x0a\x00" * 2_000_000, b"\x0a\x00" * (MAX_BYTES // 2)
    for data, reason in ((small, f"more than {MAX_REQUESTS} in one message"), (millions, "several in one message of more than")):
        began = time.process_time()
        with pytest.raises(InvalidRequest, match=rf"^requests: {reason}"):
            split(data)
        assert time.process_time() - began < 0.2, "others are not answered meanwhile"
    refused = copy_context().run(bulk_parser(lambda data: data), millions)
    assert isinstance(refused, Refused) and refused.ByteSize() == 0


def test_each_request_of_a_bulk_message_is_read_when_it_is_taken() -> None:
    several = bulk_parser(GenerateRequest.FromString)(join([b"\xff", message := GenerateRequest(text="a").SerializeToString()]))
    assert not isinstance(several, Refused) and (len(several), several.ByteSize()) == (2, 1 + len(message))
    with pytest.raises(DecodeError):
        several.take()
    assert (several.take().text, len(several), several.ByteSize()) == ("a", 0, 0)
    for length, noted in ((10, False), (LARGE_BYTES, True)):
        data, context = join([b"x" * length]), copy_context()
        context.run(large_bytes_read.set, 0)
        context.run(bulk_parser(lambda data: data), data)
        assert context[large_bytes_read] == (len(data) if noted else 0)
