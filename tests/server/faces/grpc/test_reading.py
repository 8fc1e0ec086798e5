"""What is kept of a request, and what is refused as it is read; every field of the contract has its turn."""

import asyncio
import gc
from typing import Any

import grpc
import pytest

from dragoman.server.errors import QueueFull
from dragoman.server.faces.grpc.reading import (
    ARRIVALS_AT_ONCE,
    READS_AT_ONCE,
    Arrivals,
    Refused,
    Turns,
    reader,
)
from dragoman.server.faces.large_requests import LARGE_BYTES, LargeRequests
from dragoman.v1 import generation_pb2
from dragoman.v1.generation_pb2 import GenerateRequest, ScoreRequest
from tests.system.harness.http2 import DATA, END_STREAM, Http2, frame, prefixed

MEGABYTE = 2**20
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
# What can be of any size, in every message that a caller can send.
SIZED = sorted(
    {
        (method.input_type.name, field.name)
        for method in SERVICE.methods
        for field in method.input_type.fields
        if field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_MESSAGE)
    }
)
VALID: dict[str, dict[str, Any]] = {
    "GenerateRequest": {"text": "a"},
    "ScoreRequest": {"text": "a", "target": "b"},
    "GetModelRequest": {},
    "GenerateBulkRequest": {},
}
METHODS = {
    "GenerateRequest": ("Generate", "GenerateStream", "GenerateBatch", "GenerateBulk"),
    "GenerateBulkRequest": ("GenerateBulk",),
    "ScoreRequest": ("Score",),
    "GetModelRequest": ("GetModel",),
}
REFUSALS = {
    "requests": "more than 1024 in one message",
    "model": "characters; at most 128 are allowed",
    "model_version": "characters; at most 128 are allowed",
    "request_id": "characters; at most 128 are allowed",
    "suppressed_tokens": "tokens; at most 256 are allowed",
    "text": "characters, which 64 of the longest tokens have",
    "target": "characters, which 48 of the longest tokens have",
    "forced_prefix": "characters, which 48 of the longest tokens have",
    "source_language": "characters; at most 128 are allowed",
    "target_language": "characters; at most 128 are allowed",
}


async def outcome(stub: Any, method: str, message: Any) -> tuple[int, str]:
    """Return the code and the message that a request is answered with."""
    try:
        if method == "GenerateBatch":
            message.request_id = message.request_id or "r"
            [answer] = [answer async for answer in stub.GenerateBatch(iter([message]))]
            return answer.error.code, answer.error.message
        if method == "GenerateBulk":
            is_one = isinstance(message, GenerateRequest)
            several = generation_pb2.GenerateBulkRequest(requests=[message]) if is_one else message
            [answers] = [answers async for answers in stub.GenerateBulk(iter([several]))]
            [answer] = answers.answers
            return answer.error.code, answer.error.message
        call = getattr(stub, method)(message)
        if method == "GenerateStream":
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().value[0], error.details() or ""
    return 0, ""


@pytest.mark.parametrize(("kind", "name"), SIZED)
@pytest.mark.parametrize("size", [LARGE_BYTES // 4, 3 * MEGABYTE])
def test_every_field_of_any_size_is_refused_by_its_size(
    serve: Any, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, size: int
) -> None:
    """A field that is new in the contract fails here until it has a limit that is looked at before anything is made of it."""
    assert kind in VALID and name in REFUSALS, "say what its limit is, and how it is refused"
    message = getattr(generation_pb2, kind)(**VALID[kind])
    if message.DESCRIPTOR.fields_by_name[name].message_type is not None:
        getattr(message, name).extend([GenerateRequest()] * (size // 2))
    elif message.DESCRIPTOR.fields_by_name[name].is_repeated:
        getattr(message, name).extend([1] * size)
    else:
        setattr(message, name, "x" * size)

    async def run() -> None:
        async with serve() as world:
            await world.stub.Generate(GenerateRequest(text="a"))
            num_asked = len(world.engine.requests)

            def refuse_to_tokenise(*_: Any) -> None:
                raise AssertionError("tokenised")

            monkeypatch.setattr(world.model.tokenizers.source, "encode", refuse_to_tokenise)
            for method in METHODS[kind]:
                code, reason = await outcome(world.stub, method, message)
                assert (code, reason.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], name), reason
                assert REFUSALS[name] in reason
            assert len(world.engine.requests) == num_asked and not world.engine.pairs

    asyncio.run(run())


def read(message: Any, max_characters: int = 100) -> Any:
    return reader(type(message).FromString, lambda: max_characters)(message.SerializeToString())


def test_a_message_of_the_usual_size_is_left_as_it_is() -> None:
    message = GenerateRequest(text="x" * 1000, suppressed_tokens=[1] * 300, request_id="y" * 200)
    assert read(message) == message


def test_of_a_large_one_only_what_a_model_could_use_is_kept() -> None:
    message = ScoreRequest(text="é" * MEGABYTE, target="x" * MEGABYTE, request_id="r", priority=3, length_penalty=0.0)
    unknown = message.SerializeToString() + b"\xf2\x7f" + b"\x80\x80\x40" + b"z" * MEGABYTE
    kept = reader(ScoreRequest.FromString, lambda: 100)(unknown)
    assert kept == ScoreRequest(text="é" * 200, target="x" * 200, request_id="r", priority=3, length_penalty=0.0)
    assert kept.ByteSize() < 700


def test_of_a_large_one_both_ends_are_kept() -> None:
    """A source that is too long is cut at its end, but a prompt at its beginning: the last of it used to be lost."""
    kept = read(GenerateRequest(text="a" * 100 + "?" * MEGABYTE + "z" * 100, truncate=True))
    assert kept.text == "a" * 100 + "z" * 100


@pytest.mark.parametrize("field", ["request_id", "model", "suppressed_tokens", "source_language", "target_language"])
def test_what_is_refused_keeps_nothing_of_its_message(field: str) -> None:
    """A traceback would: its frames have the message and its fields."""
    message = GenerateRequest(text="a")
    if field == "suppressed_tokens":
        message.suppressed_tokens.extend([1] * MEGABYTE)
    else:
        setattr(message, field, "x" * MEGABYTE)
    refused = read(message)
    assert isinstance(refused, Refused) and refused.error.message.startswith(f"{field}: ")
    assert refused.error.__traceback__ is None and refused.error.__context__ is None
    assert refused.request_id == "" and refused.ByteSize() == 0


def test_what_is_refused_for_another_field_has_its_id() -> None:
    assert read(GenerateRequest(request_id="mine", suppressed_tokens=[1] * MEGABYTE)).request_id == "mine"
    assert read(GenerateRequest(request_id="a\nb", text="x" * MEGABYTE)).request_id == ""


def test_large_messages_of_a_connection_are_read_one_after_another_while_they_come() -> None:
    async def run() -> None:
        turns, gates = Turns(), [asyncio.Event() for _ in range(3 * READS_AT_ONCE)]
        began: list[int] = []

        async def reading(i: int) -> int:
            began.append(i)
            await gates[i].wait()
            return i

        tasks = [asyncio.create_task(turns.take(reading(i))) for i in range(len(gates))]
        for i, gate in enumerate(gates):
            for _ in range(20):
                await asyncio.sleep(0)
            assert began == list(range(min(len(gates), READS_AT_ONCE + i)))
            gate.set()
        assert await asyncio.gather(*tasks) == list(range(len(gates)))

    asyncio.run(run())


def test_a_stream_with_nothing_to_read_holds_no_turn_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr("dragoman.server.faces.grpc.reading.READ_SECONDS", 0.01)
        turns, never = Turns(), asyncio.Event()
        idle = [asyncio.create_task(turns.take(never.wait())) for _ in range(5 * READS_AT_ONCE)]
        async with asyncio.timeout(60):
            assert await turns.take(asyncio.sleep(0, "read")) == "read"
        never.set()
        await asyncio.gather(*idle)
        assert turns._free._value == READS_AT_ONCE

    asyncio.run(run())
    gc.collect()


def test_large_requests_under_way_are_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPC keeps the bytes of each until its call ends, whatever we keep."""

    async def run() -> None:
        monkeypatch.setattr("dragoman.server.faces.large_requests.MAX_LARGE_BYTES", 3 * MEGABYTE)
        async with serve() as world:
            world.engine.hold()
            large = GenerateRequest(text="a " * (MEGABYTE // 2), truncate=True)
            calls = [asyncio.ensure_future(outcome(world.stub, "Generate", large)) for _ in range(5)]
            done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 3:
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            reason = "request: too many large ones are under way"
            assert {task.result() for task in done} == {(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], reason)}
            small = asyncio.ensure_future(outcome(world.stub, "Generate", GenerateRequest(text="a")))
            world.engine.gate.set()
            assert [await call for call in (*waiting, small)] == [(0, "")] * 3
            assert await outcome(world.stub, "Generate", large) == (0, "")

    asyncio.run(run())


def test_messages_that_are_coming_have_places_and_the_late_ones_lose_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr("dragoman.server.faces.grpc.reading.ARRIVAL_SECONDS", 0.01)
        arrivals, never, began = Arrivals(), asyncio.Event(), []

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
        assert late is first[0]
        refused = late.result()
        assert isinstance(refused, Refused) and refused.error.code == "RESOURCE_EXHAUSTED" and refused.error.retry_after_seconds
        never.set()
        assert await asyncio.gather(second, *kept) == [True] * ARRIVALS_AT_ONCE
        assert gone.cancelled() and len(began) == ARRIVALS_AT_ONCE + 1
        assert not arrivals._coming and not arrivals._waiting and not arrivals._ended

    asyncio.run(run())


def test_a_caller_that_goes_away_with_its_message_half_sent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        arrivals, never = Arrivals(), asyncio.Event()
        tasks = [asyncio.create_task(arrivals.take(never.wait)) for _ in range(2 * ARRIVALS_AT_ONCE)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
        assert await arrivals.take(lambda: asyncio.sleep(0, "read")) == "read"

    asyncio.run(run())


def test_unary_calls_whose_messages_do_not_come_whole_are_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.server.faces.grpc.reading.ARRIVALS_AT_ONCE", 2)
    monkeypatch.setattr("dragoman.server.faces.grpc.reading.ARRIVAL_SECONDS", 0.1)
    message = prefixed(GenerateRequest(text="A dog runs.").SerializeToString())

    def attack(port: int) -> list[int]:
        with Http2(port) as connection:
            streams = [connection.call("/dragoman.v1.Generation/Generate", None, is_last=False) for _ in range(3)]
            for stream in streams:
                connection.socket.sendall(frame(DATA, 0, stream, message[:-1]))
            statuses = [connection.wait_for_status(streams[0])]
            for stream in streams[1:]:
                connection.socket.sendall(frame(DATA, END_STREAM, stream, message[-1:]))
                statuses.append(connection.wait_for_status(stream))
            return statuses

    async def run() -> None:
        async with serve() as world:
            assert await asyncio.to_thread(attack, world.server.port) == [grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 0, 0]

    asyncio.run(run())


def test_whose_large_requests_are_under_way_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool for all had let eight large requests of one caller keep out everybody's."""
    monkeypatch.setattr("dragoman.server.faces.large_requests.MAX_LARGE_BYTES", 100)
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


def test_a_connection_has_so_many_streams_and_each_may_have_one_message_half_sent(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_batch_streams_per_connection=2) as world:
            calls = [world.stub.GenerateBatch() for _ in range(2)]
            for call in calls:
                await call.write(GenerateRequest(text="a", request_id="1"))
                assert (await call.read()).request_id == "1"
            refused = world.stub.GenerateBatch()
            with pytest.raises(grpc.aio.AioRpcError, match="max_batch_streams_per_connection: 2 on one connection") as caught:
                await refused.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await calls[0].done_writing()
            assert await calls[0].read() is grpc.aio.EOF
            again = world.stub.GenerateBatch()
            await again.write(GenerateRequest(text="a", request_id="2"))
            assert (await again.read()).request_id == "2"

    asyncio.run(run())
