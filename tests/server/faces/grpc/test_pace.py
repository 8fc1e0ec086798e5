import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from dragoman.server.errors import ConnectionLimit
from dragoman.server.faces.grpc import pace as pace_module
from dragoman.server.faces.grpc.pace import BURST_SECONDS, MAX_PEERS, MAX_WAIT_SECONDS, Pace
from dragoman.server.faces.grpc.several import Several
from dragoman.v1.generation_pb2 import GenerateRequest, ScoreRequest


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    pace = Pace(100, Clock())
    waits = [pace.take("a") for _ in range(300)]
    assert waits[: round(100 * BURST_SECONDS)] == [0.0] * round(100 * BURST_SECONDS)
    assert waits[100:] == pytest.approx([number / 100 for number in range(1, 201)])
    assert pace.take("b") == 0, "another connection is not held up"


def test_a_message_of_several_requests_counts_as_so_many() -> None:
    async def messages() -> AsyncIterator[Any]:
        yield Several([b"a"] * 30, bytes)
        yield b"b"

    async def run() -> None:
        pace = Pace(100, Clock())
        assert len([message async for message in pace.read(messages(), "a")]) == 2
        waits = [pace.take("a") for _ in range(100)]
        assert sum(not wait for wait in waits) == 100 * BURST_SECONDS - 31

    asyncio.run(run())


def test_a_stream_that_ends_has_paid_for_what_it_had() -> None:
    """Whoever sent a thousand requests in a message and left, stream after stream, had them at the price of one."""

    async def messages() -> AsyncIterator[Any]:
        yield Several([b"a"] * 30, bytes)

    async def run() -> None:
        pace = Pace(100, Clock())
        async for _ in pace.read(messages(), "a"):
            break
        assert sum(not pace.take("a") for _ in range(100)) == 100 * BURST_SECONDS - 30

    asyncio.run(run())


def test_a_message_without_a_request_counts_as_one() -> None:
    async def messages() -> AsyncIterator[Any]:
        for _ in range(30):
            yield Several([], bytes)

    async def run() -> None:
        pace = Pace(100, Clock())
        assert len([message async for message in pace.read(messages(), "a")]) == 30
        assert sum(not pace.take("a") for _ in range(100)) == 100 * BURST_SECONDS - 30

    asyncio.run(run())


def test_who_waits_is_as_good_as_new() -> None:
    clock = Clock()
    pace = Pace(100, clock)
    for _ in range(200):
        pace.take("a")
    clock.seconds += 2
    assert [pace.take("a") for _ in range(100)] == [0.0] * 100


def test_what_would_wait_too_long_is_not_counted_and_told_when_to_come_back() -> None:
    clock = Clock()
    pace = Pace(1, clock)
    waits = [pace.take("a") for _ in range(round(BURST_SECONDS + MAX_WAIT_SECONDS))]
    assert waits[-1] == MAX_WAIT_SECONDS
    for _ in range(3):
        with pytest.raises(ConnectionLimit, match="max_messages_per_second: 1 on one connection") as caught:
            pace.take("a")
        assert caught.value.retry_after_seconds == 1
    clock.seconds += 1
    assert pace.take("a") == MAX_WAIT_SECONDS


def test_connections_that_are_quiet_are_forgotten_before_the_others() -> None:
    pace = Pace(1, Clock())
    pace.take("busy")
    for number in range(MAX_PEERS - 1):
        pace.take(str(number))
    pace.take("busy")
    pace.take("one more")
    assert len(pace._full) == MAX_PEERS
    assert pace.take("busy") == 2.0
    assert pace.take("0") == 0.0, "it was forgotten"


def test_a_stream_is_read_no_faster_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.seconds += seconds

    async def messages() -> AsyncIterator[int]:
        for number in range(50):
            yield number

    async def run() -> None:
        pace = Pace(1, clock)
        read = [(number, clock.seconds) async for number in pace.read(messages(), "a")]
        assert [number for number, _ in read] == list(range(50))
        assert 47 <= read[-1][1] - read[0][1] <= 50

    monkeypatch.setattr(pace_module.asyncio, "sleep", sleep)
    asyncio.run(run())


def test_calls_of_a_connection_that_is_too_fast_wait_and_then_are_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, health and streams count alike; another connection's do not."""
    monkeypatch.setattr(pace_module, "MAX_WAIT_SECONDS", 0.01)

    async def run() -> None:
        async with serve(max_messages_per_second=0.001) as world:
            with pytest.raises(grpc.aio.AioRpcError, match="max_messages_per_second"):
                await world.stub.Generate(GenerateRequest(text="a"))
            call = world.stub.Score(ScoreRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            retry = RetryInfo()
            assert (await rpc_status.aio.from_call(call)).details[0].Unpack(retry)
            assert retry.retry_delay.seconds > 900
            with pytest.raises(grpc.aio.AioRpcError, match="max_messages_per_second"):
                await HealthStub(world.channel).Check(HealthCheckRequest())
            assert world.records() == {("", "RESOURCE_EXHAUSTED"): 2}

    asyncio.run(run())


@pytest.mark.parametrize("authorization", ["Bearer wrong", "Bearer s3cret"])
def test_calls_that_are_refused_come_no_faster_than_others(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, authorization: str
) -> None:
    """Whether they are refused for want of a token or for a limit of their caller's, each waits for its place."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> None:
        callers = tmp_path / "callers.toml"
        callers.write_text('[callers.web]\ntoken = "s3cret"\nrequests_per_second = 0.001\n')
        async with serve(max_messages_per_second=0.001, auth_tokens_file=callers) as world:
            metadata = (("authorization", authorization),)
            await asyncio.gather(*(refused(world.stub.Generate(GenerateRequest(), metadata=metadata)) for _ in range(4)))
            await world.server.drain(0)
            await refused(world.stub.Generate(GenerateRequest(), metadata=metadata))

    async def refused(call: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await call

    monkeypatch.setattr(pace_module.asyncio, "sleep", sleep)
    asyncio.run(run())
    assert waits == [MAX_WAIT_SECONDS] * 4, "but not while the server ends"


def test_without_a_limit_nobody_is_counted(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_messages_per_second=0) as world:
            assert (await world.stub.Generate(GenerateRequest(text="a"))).text

    asyncio.run(run())
