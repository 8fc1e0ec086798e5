"""The front end's side of an engine, against a ROUTER socket that the test plays by hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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
    Answer,
    Cancel,
    Command,
    Event,
    Fatal,
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
    Stop,
    Submit,
    Tokens,
)
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, Snapshot, Watch
from dragoman.server.errors import QueueFull, Unavailable


class HandEngine:
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

    async def send(self, event: Event) -> None:
        await self.send_bytes(msgspec.msgpack.encode(event))

    async def send_bytes(self, payload: bytes) -> None:
        await self._socket.send_multipart((self._origin, payload))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def request(number: int, is_streamed: bool = False, share: Share = ANYBODY) -> Request:
    return Request(number, [5, 1], 9, 0.0, is_streamed=is_streamed, share=share)


def end(number: int, token_ids: list[int] | None = None) -> Finished:
    return Finished(number, "eos", [Answer(token_ids or [], [-0.5], -0.5, "eos")], 1, 0.0, 0.0, 0.0, 0.0)


def pair(number: int) -> ScoreRequest:
    return ScoreRequest(number, [5, 1], [6, 1], 0.0)


def scored(number: int) -> Scored:
    return Scored(number, "eos", [-1.0, -0.5], b"", 1.0)


def report(*finished: Finished, tokens: list[Tokens] | None = None, num_received: int = 0, **statistics: Any) -> Report:
    return Report(tokens or [], list(finished), Statistics(**statistics), [], num_received)


Scenario = Callable[[EngineClient, HandEngine], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Run a scenario with both ends attached; afterwards nothing waits, and no task is left but the test's own."""

    @asynccontextmanager
    async def attached(on_statistics: Callable[[Statistics], None]) -> AsyncIterator[tuple[EngineClient, HandEngine]]:
        endpoint = f"ipc://{tmp_path}/engine"
        engine = HandEngine(endpoint)
        client = EngineClient(ZmqLink(endpoint), on_statistics)
        try:
            assert await engine.receive() == Hello()
            yield client, engine
        finally:
            client.fail(Unavailable("over"))
            await client.close()
            engine.close()

    async def run(scenario: Scenario, on_statistics: Callable[[Statistics], None]) -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with attached(on_statistics) as (client, engine):
            await scenario(client, engine)
        assert client.num_outstanding == 0
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert problems == []

    def play(scenario: Scenario, on_statistics: Callable[[Statistics], None] = lambda _: None) -> None:
        asyncio.run(run(scenario, on_statistics))

    return play


def test_what_is_submitted_in_one_turn_leaves_as_one_message(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        tasks = [asyncio.create_task(client.generate(request(i))) for i in range(5)]
        assert await engine.receive() == Submit([request(i) for i in range(5)])
        await engine.send(report(*(end(i, [i]) for i in reversed(range(5)))))
        assert [finished.answers[0].token_ids for finished in await asyncio.gather(*tasks)] == [[i] for i in range(5)]
        assert await engine.has_silence(), "what has ended is not cancelled"

    play(scenario)


def test_a_cancellation_in_the_same_turn_follows_its_submission(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        tasks = [asyncio.create_task(client.generate(request(i))) for i in range(3)]
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        assert (await asyncio.gather(tasks[1], return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert await engine.receive() == Submit([request(i) for i in range(3)])
        assert await engine.receive() == Cancel([1])
        await engine.send(report(end(1), end(0), end(2)))
        assert [finished.id for finished in await asyncio.gather(tasks[0], tasks[2])] == [0, 2]

    play(scenario)


def test_a_submission_after_a_cancellation_is_sent_once(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        first = asyncio.create_task(client.generate(request(1)))
        await engine.receive()
        first.cancel()
        second = asyncio.create_task(client.generate(request(2)))
        received = [await engine.receive(), await engine.receive()]
        assert sorted(received, key=str) == [Cancel([1]), Submit([request(2)])]
        assert await engine.has_silence()
        await engine.send(report(end(1), end(2)))
        assert (await second).id == 2
        assert first.cancelled()

    play(scenario)


def test_pairs_leave_as_one_message_and_come_back_to_their_own(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        pairs = [asyncio.create_task(client.score(pair(i))) for i in (1, 2)]
        whole = asyncio.create_task(client.generate(request(3)))
        assert [await engine.receive(), await engine.receive()] == [Submit([request(3)]), Score([pair(1), pair(2)])]
        assert client.num_outstanding == 3
        await engine.send(Report([], [end(3)], Statistics(), [scored(2), scored(77)]))
        await engine.send(Report([], [], Statistics(), [scored(1)]))
        assert await asyncio.gather(*pairs) == [scored(1), scored(2)]
        assert (await whole).id == 3
        assert await engine.has_silence(), "what has ended is not cancelled"

    play(scenario)


def test_a_pair_nobody_waits_for_is_cancelled_after_it_was_submitted(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        task = asyncio.create_task(client.score(pair(1)))
        asyncio.get_running_loop().call_soon(task.cancel)
        assert await engine.receive() == Score([pair(1)])
        assert await engine.receive() == Cancel([1])
        await engine.send(Report([], [], Statistics(), [scored(1)]))
        assert await engine.has_silence()
        assert task.cancelled()

    play(scenario)


def test_failing_ends_the_pairs_that_wait_and_refuses_the_next(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        task = asyncio.create_task(client.score(pair(1)))
        await engine.receive()
        client.fail(Unavailable("the engine ended"))
        with pytest.raises(Unavailable, match="the engine ended"):
            await task
        with pytest.raises(Unavailable, match="the engine ended"):
            await client.score(pair(2))
        assert await engine.has_silence()

    play(scenario)


def test_a_stream_brings_tokens_then_its_end(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        async def read() -> list[Tokens | Finished]:
            return [event async for event in client.stream(request(1, is_streamed=True))]

        task = asyncio.create_task(read())
        await engine.receive()
        await engine.send(report(tokens=[Tokens(1, [4]), Tokens(77, [9])]))
        await engine.send(report(end(1, [4, 5]), tokens=[Tokens(1, [5])]))
        assert await task == [Tokens(1, [4]), Tokens(1, [5]), end(1, [4, 5])]
        assert await engine.has_silence()

    play(scenario)


def test_a_stream_that_is_closed_early_cancels_its_request(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        stream = client.stream(request(1, is_streamed=True))
        first = asyncio.ensure_future(anext(stream))
        await engine.receive()
        await engine.send(report(tokens=[Tokens(1, [4])]))
        assert await first == Tokens(1, [4])
        await stream.aclose()
        assert await engine.receive() == Cancel([1])
        await engine.send(report(end(1)))  # which nobody waits for

    play(scenario)


def test_failing_ends_every_waiter_once_and_refuses_the_next(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        async def read() -> list[Tokens | Finished]:
            return [event async for event in client.stream(request(9, is_streamed=True))]

        tasks = [asyncio.create_task(client.generate(request(i))) for i in range(3)]
        tasks.append(asyncio.create_task(read()))
        leaving = asyncio.create_task(client.generate(request(10)))
        await engine.receive()
        leaving.cancel()
        client.fail(Unavailable("the engine ended"))
        client.fail(Unavailable("and again"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the engine ended"] * 4
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        assert client.has_failed and client.num_outstanding == 0
        with pytest.raises(Unavailable):
            await client.generate(request(11))
        assert await engine.has_silence()

    play(scenario)


def test_nothing_that_arrives_is_overlooked_while_requests_are_sent(play: Callable[..., None]) -> None:
    """The socket's descriptor speaks once for several messages, and sending may silence it."""

    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        async def ask(number: int) -> int:
            finished = await client.generate(request(number))
            return finished.id

        num_requests = 300
        tasks = [asyncio.create_task(ask(i)) for i in range(2)]
        num_ended = 0
        while num_ended < num_requests:
            command = await engine.receive()
            assert isinstance(command, Submit)
            for submitted in command.requests:
                await engine.send(report(end(submitted.id)))
                await engine.send(report())
                num_ended += 1
                if len(tasks) < num_requests:
                    tasks.append(asyncio.create_task(ask(len(tasks))))
        async with asyncio.timeout(60):
            assert await asyncio.gather(*tasks) == list(range(num_requests))

    play(scenario)


def test_readiness_arrives_once_and_statistics_with_every_report(play: Callable[..., None]) -> None:
    seen: list[int] = []

    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        await engine.send(Ready("cpu", 4, 0.5))
        await engine.send(Ready("other", 4, 0.5))
        assert (await client.ready).device == "cpu"
        task = asyncio.create_task(client.generate(request(1)))
        await engine.receive()
        heard = client.last_heard
        await engine.send(report(num_waiting=3))
        await engine.send(report(end(1), num_waiting=2))
        await task
        assert client.last_heard > heard
        client.stop_engine()
        assert await engine.receive() == Stop()

    play(scenario, lambda statistics: seen.append(statistics.num_waiting))
    assert seen == [3, 2]


def test_a_queue_that_is_full_refuses_without_asking_the_engine(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        client.ensure_place(ANYBODY)  # nothing is known yet
        tasks = [asyncio.create_task(client.generate(request(i))) for i in range(3)]
        await engine.receive()
        await engine.send(report(end(0), num_places=3, num_received=2, retry_after_seconds=0.25))  # one is on its way
        await tasks[0]
        for i in (3, 4):
            client.ensure_place(ANYBODY)
            tasks.append(asyncio.create_task(client.generate(request(i))))
            await asyncio.sleep(0)
        with pytest.raises(QueueFull) as refusal:
            client.ensure_place(ANYBODY)
        assert refusal.value.retry_after_seconds == 0.25
        await engine.receive()
        await engine.send(report(end(1), num_places=1, num_received=5))
        await tasks[1]
        client.ensure_place(ANYBODY)
        client.fail(Unavailable("the end"))
        await asyncio.gather(*tasks, return_exceptions=True)

    play(scenario)


def test_who_may_push_somebody_out_of_a_full_queue_is_not_refused_early(play: Callable[..., None]) -> None:
    many, few = Share("many"), Share("few")

    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        tasks = [asyncio.create_task(client.generate(request(1, share=many)))]
        await engine.receive()
        await engine.send(report(num_places=0, num_received=1, retry_after_seconds=0.25, without_claim={"many": 2.5}))
        await engine.send(report(end(1), num_places=0, num_received=1, retry_after_seconds=0.25, without_claim={"many": 2.5}))
        await tasks[0]
        client.ensure_place(few)
        with pytest.raises(QueueFull) as refusal:
            client.ensure_place(many)
        assert (refusal.value.retry_after_seconds, refusal.value.limit) == (2.5, "")

    play(scenario)


def test_places_that_callers_have_taken_since_the_last_step_may_be_anybodys(play: Callable[..., None]) -> None:
    many, few = Share("many"), Share("few")

    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        tasks = [asyncio.create_task(client.generate(request(0)))]
        await engine.receive()
        await engine.send(report(end(0), num_places=2, num_received=1, retry_after_seconds=0.25))
        await tasks[0]
        tasks += [asyncio.create_task(client.generate(request(i, share=many))) for i in (1, 2)]
        await engine.receive()
        with pytest.raises(QueueFull) as refusal:
            client.ensure_place(many)
        assert refusal.value.retry_after_seconds == 0.25
        client.ensure_place(few)
        await engine.send(report(end(1), num_places=0, num_received=3, without_claim=None))
        await tasks[1]
        client.ensure_place(many)  # too many wait to tell
        client.fail(Unavailable("the end"))
        await asyncio.gather(*tasks, return_exceptions=True)

    play(scenario)


def test_a_caller_at_its_own_limit_is_refused_early_by_its_name(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        task = asyncio.create_task(client.generate(request(1)))
        await engine.receive()
        await engine.send(report(end(1), num_places=500, num_received=1, at_their_limit={"few": 1.5}))
        await task
        client.ensure_place(Share("other"))
        with pytest.raises(QueueFull) as refusal:
            client.ensure_place(Share("few"))
        assert (refusal.value.limit, refusal.value.retry_after_seconds) == ("max_waiting", 1.5)
        assert refusal.value.message.startswith("max_waiting: ")

    play(scenario)


def test_an_engine_that_cannot_start_says_why(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        await engine.send(Fatal("no such file"))
        with pytest.raises(Unavailable) as refusal:
            await client.ready
        assert client.fatal == "no such file"
        assert "no such file" not in refusal.value.message, "which callers might see"

    play(scenario)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\xa6report\x01\x02", msgspec.msgpack.encode(["report", [], [], [5]]) * 2])
def test_what_cannot_be_read_ends_the_waiting(play: Callable[..., None], payload: bytes) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        task = asyncio.create_task(client.generate(request(1)))
        await engine.receive()
        await engine.send_bytes(payload)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(task, 10)
        assert client.has_failed

    play(scenario)


def test_an_endpoint_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async def attach() -> None:
        with pytest.raises(zmq.ZMQError):
            ZmqLink(f"ipc://{tmp_path}/{'x' * 200}")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(attach())


def test_an_engine_is_asked_what_its_slots_do_once_until_it_answers(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        first = client.watch()
        assert client.watch() is first
        assert await engine.receive() == Watch()
        assert await engine.has_silence()
        snapshot = Snapshot([EngineSnapshot(1.0)], [CallerUse("alice", 2, 1)])
        await engine.send(snapshot)
        assert await first == snapshot
        again = client.watch()
        assert again is not first and await engine.receive() == Watch()
        await engine.send(snapshot)
        await again
        await engine.send(snapshot)  # which nobody has asked for
        await engine.send(report())
        assert await engine.has_silence()

    play(scenario)


def test_who_looks_is_told_that_the_engine_is_gone(play: Callable[..., None]) -> None:
    async def scenario(client: EngineClient, engine: HandEngine) -> None:
        waiting = client.watch()
        assert await engine.receive() == Watch()
        client.fail(Unavailable("gone"))
        for watched in (waiting, client.watch()):
            with pytest.raises(Unavailable):
                await watched
        assert await engine.has_silence()

    play(scenario)
