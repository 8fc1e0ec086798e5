"""A desk behind a socket: the socket and the front ends' side are the real ones, the replica is played by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from dragoman.server.dispatch.desk import Desk
from dragoman.server.dispatch.desk_server import DeskServer
from dragoman.server.engine.client import EngineClient
from dragoman.server.engine.link import ZmqLink
from dragoman.server.engine.messages import Request
from dragoman.server.engine.scheduler import Limits
from dragoman.server.errors import NotReady, Unavailable
from tests.server.conftest import until
from tests.server.dispatch.fakes import FakeReplica
from tests.server.test_supervisor import SETTINGS


class World:
    """A desk, what listens for it, and front ends by name."""

    def __init__(self, endpoint: str) -> None:
        self.desk = Desk(Limits(max_slots=2, max_waiting_requests=8, max_waiting_tokens=100, prefill_tokens_per_step=100))
        self.server = DeskServer(endpoint, self.desk)
        self.engines: list[EngineClient] = []

    def front_end(self, name: str) -> EngineClient:
        engine = EngineClient("a", ZmqLink(self.server.endpoint, name.encode()), SETTINGS, 1, 0.1)
        engine.open()
        self.engines.append(engine)
        return engine


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[World]:
    world = World(f"ipc://{folder}/desk")
    try:
        yield world
    finally:
        for engine in world.engines:
            engine.close()
        world.server.close()


def request(number: int) -> Request:
    return Request(number, [5, 1], 9, float(number))


async def test_what_a_front_end_had_that_is_gone_is_ended_and_nothing_else(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        replica = FakeReplica(world.desk, 0, 2)
        gone, there = world.front_end("front-1-0"), world.front_end("front-1-00")
        await until(lambda: gone.is_ready and there.is_ready)
        lost, kept = asyncio.create_task(gone.generate(request(1))), asyncio.create_task(there.generate(request(2)))
        await until(lambda: len(replica.requests) == 2)
        number = replica.number(1.0)
        world.server.detach("front-1-0")
        world.server.detach("front-1-0")
        assert replica.cancelled == [number] and world.server.num_attached == 1
        replica.finish()
        assert (await kept).reason == "eos"
        assert not lost.done(), "nobody tells it, for nobody is there"
        lost.cancel()


async def test_a_front_end_goes_on_when_the_model_was_down(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        replica = FakeReplica(world.desk, 0, 2)
        engine = world.front_end("front")
        await until(lambda: engine.is_ready)
        asked = asyncio.create_task(engine.generate(request(1)))
        await until(lambda: len(replica.requests) == 1)
        replica.lose()
        outcome = await asyncio.gather(asked, return_exceptions=True)
        assert getattr(outcome[0], "reason", None) == "lost" or isinstance(outcome[0], Unavailable)
        await until(lambda: not engine.is_ready)
        with pytest.raises(NotReady):
            await engine.generate(request(2))
        replica.open()
        await until(lambda: engine.is_ready and world.server.num_attached == 1)
        again = asyncio.create_task(engine.generate(request(3)))
        await until(lambda: len(replica.requests) == 1)
        replica.finish()
        assert (await again).reason == "eos"


async def test_what_cannot_be_read_hurts_nobody(tmp_path: Path) -> None:
    async with connected(tmp_path) as world:
        FakeReplica(world.desk, 0, 2)
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(world.server.endpoint)
        await stranger.send(b"\xc1")
        engine = world.front_end("front")
        await until(lambda: engine.is_ready)
        stranger.close()
        context.term()
