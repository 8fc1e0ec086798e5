"""The front end's side of an engine, against a ROUTER socket: what leaves in which order, and who is refused early."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from dragoman.server.engine.client import EngineClient
from dragoman.server.engine.link import ZmqLink
from dragoman.server.engine.messages import (
    ANYBODY,
    Cancel,
    Command,
    Down,
    Event,
    Finished,
    Hello,
    Ready,
    Report,
    Request,
    Score,
    Scored,
    ScoreRequest,
    Share,
    Statistics,
    Submit,
    Tokens,
)
from dragoman.server.engine.snapshot import EngineSnapshot, Snapshot, Watch
from dragoman.server.errors import NotReady, QueueFull, Unavailable
from tests.server.test_supervisor import SETTINGS


class Engine:
    """The other end: what arrives can be looked at, and what is sent is the test's choice."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._origin = b""

    async def receive(self) -> Command:
        async with asyncio.timeout(60):
            self._origin, payload = await self._socket.recv_multipart()
        return msgspec.msgpack.decode(payload, type=Command)

    async def has_silence(self) -> bool:
        return not await self._socket.poll(50)

    async def send(self, event: Event | bytes) -> None:
        payload = event if isinstance(event, bytes) else msgspec.msgpack.encode(event)
        await self._socket.send_multipart((self._origin, payload))

    async def report(self, *finished: Finished, tokens: Any = (), scored: Any = (), num_received: int = 0, **fields: Any) -> None:
        await self.send(Report([*tokens], list(finished), Statistics(**fields), [*scored], num_received))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@asynccontextmanager
async def attached(folder: Path, statistics: list[Statistics] | None = None) -> AsyncIterator[tuple[EngineClient, Engine]]:
    endpoint = f"ipc://{folder}/engine"
    engine = Engine(endpoint)
    told: Any = [].append if statistics is None else statistics.append
    client = EngineClient("a", ZmqLink(endpoint), SETTINGS, 1, 0.5, on_statistics=told)
    client.open()
    try:
        assert await engine.receive() == Hello()
        await engine.send(Ready("cpu", 4, 0.5))
        await client.until_ready()
        yield client, engine
    finally:
        client.close()
        engine.close()
    assert client.num_outstanding == 0


def request(number: int, share: Share = ANYBODY, is_streamed: bool = False) -> Request:
    return Request(number, [5, 1], 9, 0.0, is_streamed=is_streamed, share=share)


def end(number: int) -> Finished:
    return Finished(number, "eos", [], 1, 0.0, 0.0, 0.0, 0.0)


def pair(number: int) -> ScoreRequest:
    return ScoreRequest(number, [5, 1], [6, 1], 0.0)


def scored(number: int) -> Scored:
    return Scored(number, "eos", [-1.0], b"", 1.0)


def start(coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(coroutine)


async def stream(client: EngineClient, number: int) -> list[Any]:
    return [event async for event in client.stream(request(number, is_streamed=True))]


async def test_what_is_submitted_in_one_turn_leaves_as_one_message_each(tmp_path: Path) -> None:
    async with attached(tmp_path) as (client, engine):
        tasks = [start(client.generate(request(i))) for i in range(3)]
        pairs = [start(client.score(pair(i))) for i in (3, 4)]
        streamed = start(stream(client, 5))
        expected = Submit([*(request(i) for i in range(3)), request(5, is_streamed=True)])
        assert [await engine.receive(), await engine.receive()] == [expected, Score([pair(3), pair(4)])]
        assert client.num_outstanding == 6
        await engine.report(tokens=[Tokens(5, [4]), Tokens(77, [9])], scored=[scored(4), scored(77)])
        await engine.report(*map(end, (5, 2, 1, 0)), tokens=[Tokens(5, [6])], scored=[scored(3)])
        assert await asyncio.gather(*tasks) == [end(i) for i in range(3)]
        assert await asyncio.gather(*pairs) == [scored(3), scored(4)]
        assert await streamed == [Tokens(5, [4]), Tokens(5, [6]), end(5)]
        assert await engine.has_silence(), "what has ended is not cancelled"


async def test_a_cancellation_follows_its_submission_and_is_sent_once(tmp_path: Path) -> None:
    async with attached(tmp_path) as (client, engine):
        generated, scoring = start(client.generate(request(1))), start(client.score(pair(2)))
        asyncio.get_running_loop().call_soon(generated.cancel)
        asyncio.get_running_loop().call_soon(scoring.cancel)
        assert [await engine.receive() for _ in range(3)] == [Submit([request(1)]), Score([pair(2)]), Cancel([1, 2])]
        other = start(client.generate(request(3)))
        assert await engine.receive() == Submit([request(3)])
        await engine.report(end(1), end(3), scored=[scored(2)])
        assert await other == end(3) and generated.cancelled() and scoring.cancelled()
        tokens = client.stream(request(4, is_streamed=True))
        first = asyncio.ensure_future(anext(tokens))
        await engine.receive()
        await engine.report(tokens=[Tokens(4, [4])])
        assert await first == Tokens(4, [4])
        await tokens.aclose()
        assert await engine.receive() == Cancel([4])
        assert await engine.has_silence()


async def test_failing_ends_everything_once_and_refuses_what_comes_then(tmp_path: Path) -> None:
    async with attached(tmp_path) as (client, engine):
        tasks = [start(client.generate(request(1))), start(stream(client, 2)), start(client.score(pair(3)))]
        leaving = start(client.generate(request(10)))
        await engine.receive()
        watching = client.watch()
        leaving.cancel()
        await engine.send(Down("the engine ended", 0.5))
        await engine.send(Down("and again", 0.5))
        outcomes = await asyncio.gather(*tasks, watching, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the engine ended"] * 4
        await asyncio.wait([leaving])
        assert leaving.cancelled() and not client.is_ready and client.num_outstanding == 0
        for late in (client.generate(request(11)), client.score(pair(12))):
            with pytest.raises(NotReady):
                await late
        with pytest.raises(NotReady):
            client.watch()


async def test_nothing_that_arrives_is_overlooked_while_requests_are_sent(tmp_path: Path) -> None:
    """The socket's descriptor speaks once for several messages, and sending may silence it."""
    async with attached(tmp_path) as (client, engine):
        num_requests = 300
        tasks = [start(client.generate(request(i))) for i in range(2)]
        num_ended = 0
        while num_ended < num_requests:
            command = await engine.receive()
            assert isinstance(command, Submit)
            for submitted in command.requests:
                await engine.report(end(submitted.id))
                await engine.report()
                num_ended += 1
                if len(tasks) < num_requests:
                    tasks.append(start(client.generate(request(len(tasks)))))
        async with asyncio.timeout(60):
            assert [one.id for one in await asyncio.gather(*tasks)] == list(range(num_requests))


async def test_events_other_than_answers(tmp_path: Path) -> None:
    statistics: list[Statistics] = []
    async with attached(tmp_path, statistics) as (client, engine):
        await engine.send(Ready("other", 4, 0.5))
        for _ in range(2):
            first = client.watch()
            assert client.watch() is first and await engine.receive() == Watch()
            await engine.report(num_waiting=3)
            await engine.send(Snapshot([EngineSnapshot(1.0)], []))
            assert await first == Snapshot([EngineSnapshot(1.0)], [])
        await engine.send(Snapshot([], []))  # which was not asked for
        assert await engine.has_silence() and client.device == "cpu"
    assert [one.num_waiting for one in statistics] == [3, 3, 0]


MANY, FEW = Share("many"), Share("few")
Refusal = tuple[float, str] | None


@pytest.mark.parametrize(
    ("told", "on_their_way", "refusals"),
    [
        ({}, [], {"many": None}),  # nothing is known
        ({"num_places": 1}, [], {"many": None}),
        ({"num_places": 1, "num_received": 1}, [MANY, MANY], {"many": (0.25, ""), "few": None}),  # places may be another's
        ({"num_places": 3, "num_received": 0}, [MANY, MANY], {"many": (0.25, "")}),  # one more is on its way
        ({"num_places": 4, "num_received": 0}, [MANY, MANY], {"many": None}),
        ({"num_places": 0, "without_claim": {"many": 2.5}}, [], {"many": (2.5, ""), "few": None}),  # may push out another's
        ({"num_places": 0, "without_claim": {}}, [], {"many": (0.25, "")}),
        ({"num_places": 0, "without_claim": None}, [], {"many": None}),  # too many wait to tell
        ({"num_places": 500, "at_their_limit": {"many": 1.5}}, [], {"many": (1.5, "max_waiting"), "few": None}),
    ],
)
async def test_a_queue_that_is_full_for_a_caller_refuses_without_asking_the_engine(
    tmp_path: Path, told: dict[str, Any], on_their_way: list[Share], refusals: dict[str, Refusal]
) -> None:
    async with attached(tmp_path) as (client, engine):
        first = start(client.generate(request(0, MANY)))
        await engine.receive()
        await engine.report(end(0), **{"num_received": 1, "retry_after_seconds": 0.25} | told)
        await first
        tasks = [start(client.generate(request(i, share))) for i, share in enumerate(on_their_way, 1)]
        await asyncio.sleep(0)
        found: dict[str, Refusal] = {}
        for name in refusals:
            try:
                found[name] = client.ensure_place(Share(name))
            except QueueFull as full:
                found[name] = full.retry_after_seconds, full.limit
        assert found == refusals
        client.close()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\xa6report\x01\x02", msgspec.msgpack.encode(["report", [], [], [5]]) * 2])
async def test_a_message_that_cannot_be_read_ends_the_waiting(tmp_path: Path, payload: bytes) -> None:
    async with attached(tmp_path) as (client, engine):
        task = start(client.generate(request(1)))
        await engine.receive()
        await engine.send(payload)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(task, 10)
        assert not client.is_ready and await engine.receive() == Hello(), "it attaches anew"
        await engine.send(Ready("cpu", 4, 0.5))
        await client.until_ready()
