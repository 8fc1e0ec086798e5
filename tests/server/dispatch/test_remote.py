"""A dispatcher behind a socket: the socket and the attachments are the real ones, the engine is played by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.dispatch.remote import DispatcherServer, RemoteDispatcher
from dragoman.server.engine.messages import (
    ANYBODY,
    Down,
    EngineSnapshot,
    Request,
    ScoreRequest,
    Share,
    Snapshot,
    Statistics,
    Tokens,
)
from dragoman.server.engine.settings import EngineSettings, QueueLimits
from dragoman.server.errors import NotReady, QueueFull
from tests.server.conftest import until
from tests.server.dispatch.fakes import FakeEngine

SETTINGS = EngineSettings("", "", 1, 2, 8, 100, "error", "json")


class World:
    """A dispatcher, its socket, and attachments by name."""

    def __init__(self, endpoint: str) -> None:
        self.dispatcher = Dispatcher("a", QueueLimits(8, 100), 100, retry_seconds=0.05)
        self.server = DispatcherServer(endpoint, self.dispatcher)
        self.attached: list[RemoteDispatcher] = []

    def front_end(self, name: str) -> RemoteDispatcher:
        front = RemoteDispatcher("a", self.server.endpoint, name, SETTINGS, 1, 0.05)
        front.open()
        self.attached.append(front)
        return front


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[World]:
    world = World(f"ipc://{folder}/dispatcher")
    try:
        yield world
    finally:
        for front in world.attached:
            front.close()
        world.server.close()


def request(number: int, **fields: Any) -> Request:
    return Request(number, [5, 1], 9, float(number), **fields)


async def test_requests_of_several_front_ends_are_answered_where_they_were_asked(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        engine = FakeEngine(world.dispatcher, 0, 8)
        fronts = [world.front_end(name) for name in ("front-1", "front-2")]
        await until(lambda: all(front.is_ready for front in fronts))
        tasks = [asyncio.create_task(front.generate(request(1))) for front in fronts]
        tasks.append(asyncio.create_task(fronts[0].score(ScoreRequest(2, [5, 1], [6, 1], 0.0))))  # type: ignore[arg-type]
        streaming = fronts[1].stream(request(3, is_streamed=True))
        first = asyncio.ensure_future(anext(streaming))
        await until(lambda: len(engine.requests) == 3 and len(engine.pairs) == 1)
        streamed = next(number for number, one in engine.requests.items() if one.is_streamed)
        engine.report(tokens=[Tokens(streamed, [4])])
        assert await first == Tokens(3, [4])
        engine.finish()
        engine.score()
        assert [(end.id, end.reason) for end in await asyncio.gather(*tasks)] == [(1, "eos"), (1, "eos"), (2, "eos")]
        assert (await anext(streaming)).id == 3 and not world.dispatcher._entries
        watching = fronts[0].watch()
        await until(lambda: engine.num_watches == 1)
        engine.show(Snapshot([EngineSnapshot(1.0)], []))
        assert await watching == Snapshot([EngineSnapshot(1.0)], [])


async def test_requests_of_a_front_end_that_is_gone_are_cancelled_and_no_others(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        engine = FakeEngine(world.dispatcher, 0, 2)
        gone, there = world.front_end("front-1-0"), world.front_end("front-1-00")
        await until(lambda: gone.is_ready and there.is_ready)
        lost, kept = asyncio.create_task(gone.generate(request(1))), asyncio.create_task(there.generate(request(2)))
        await until(lambda: len(engine.requests) == 2)
        number = next(number for number, one in engine.requests.items() if one.arrival == 1.0)
        world.server.detach("front-1-0")
        world.server.detach("front-1-0")
        await until(lambda: engine.cancelled == [number])
        engine.finish()
        assert (await kept).reason == "eos" and not lost.done()
        lost.cancel()


async def test_an_attachment_follows_the_readiness_of_the_model(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        engine = FakeEngine(world.dispatcher, 0, 2)
        front = world.front_end("front")
        await until(lambda: front.is_ready)
        asked = asyncio.create_task(front.generate(request(1)))
        await until(lambda: len(engine.requests) == 1)
        engine.lose()
        assert (await asked).reason == "lost"
        await until(lambda: not front.is_ready)
        with pytest.raises(NotReady):
            await front.generate(request(2))
        engine.open()
        await until(lambda: front.is_ready)
        again = asyncio.create_task(front.generate(request(3)))
        await until(lambda: len(engine.requests) == 1)
        engine.finish()
        assert (await again).reason == "eos"


async def test_an_attachment_refuses_by_itself_where_the_queue_has_no_place(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        engine = FakeEngine(world.dispatcher, 0, 1)
        front, other = world.front_end("front"), world.front_end("other")
        await until(lambda: front.is_ready and other.is_ready)
        share = Share("much")
        tasks = [asyncio.create_task(front.generate(request(i, share=share))) for i in range(9)]

        def is_refused(share: Share) -> bool:
            try:
                other.ensure_place(share)
            except QueueFull:
                return True
            return False

        await until(lambda: is_refused(share))
        assert other.statistics().num_places == 0 and not is_refused(Share("little")), "it may evict one of the others"
        while engine.requests:
            engine.finish()
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        await until(lambda: not is_refused(share) and other.statistics().num_places == 9)
        engine.report(statistics=Statistics(num_running=7))
        await until(lambda: other.statistics().num_running == 7)


async def test_messages_that_cannot_be_read_hurt_nobody(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        FakeEngine(world.dispatcher, 0, 2)
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(world.server.endpoint)
        await stranger.send(b"\xc1")
        front = world.front_end("front")
        await until(lambda: front.is_ready)
        (origin,) = world.server._attached
        world.server._socket.send(origin, b"\xc1")
        await until(lambda: not front.is_ready)
        await until(lambda: front.is_ready)
        stranger.close()
        context.term()


async def test_an_attachment_counts_places_anew_after_it_has_attached_again(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        engine = FakeEngine(world.dispatcher, 0, 4)
        front = world.front_end("front")
        await until(lambda: front.is_ready)

        async def answer(*numbers: int) -> None:
            tasks = [asyncio.create_task(front.generate(request(number))) for number in numbers]
            await until(lambda: len(engine.requests) == len(numbers))
            engine.finish()
            await asyncio.gather(*tasks)

        for number in range(0, 40, 4):
            await answer(*range(number, number + 4))
        front.submit(request(40), lambda _: None)
        front._reattach()
        await until(lambda: front.is_ready and front.statistics().num_places == 12)
        assert front._num_places == 12 and not engine.requests, "an unsent request ends as lost and is not sent"
        front.ensure_place(ANYBODY)
        ready = front.ready
        assert ready is not None
        front.submit(request(41), lambda _: None)
        front._hear(Down(0.1))
        front._hear(ready)
        await answer(42, 43)
        await until(lambda: front._num_places == 12)
