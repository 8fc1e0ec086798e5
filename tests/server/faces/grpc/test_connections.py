import asyncio
import resource
import socket
import struct
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.server.faces.grpc import connections
from dragoman.v1.generation_pb2 import GenerateRequest
from tests.server.faces.grpc.conftest import eventually
from tests.system.harness.http2 import GOAWAY, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, Http2, frame

CHECK, WATCH, GENERATE = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/dragoman.v1.Generation/Generate"
REFUSED_STREAM = 7


async def check(port: int) -> int:
    """Return the status of a call on a connection of its own; raises OSError or EOFError if there is none to be had."""

    def ask() -> int:
        with Http2(port) as connection:
            return connection.wait_for_status(connection.call(CHECK))

    return await asyncio.to_thread(ask)


def test_there_are_so_many_connections_and_one_that_ends_makes_room(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_connections=2) as world:
            port = world.server.port
            held = [await asyncio.to_thread(Http2, port) for _ in range(2)]
            for connection in held:
                assert await asyncio.to_thread(connection.wait_for_status, connection.call(CHECK)) == 0
            with pytest.raises((OSError, EOFError)):
                await check(port)
            held[0].socket.close()
            while True:  # until the server has noticed
                try:
                    assert await check(port) == 0
                    break
                except (OSError, EOFError):
                    await asyncio.sleep(0.01)
            assert await asyncio.to_thread(held[1].wait_for_status, held[1].call(CHECK)) == 0, "the old one is served all along"
            held[1].socket.close()

    asyncio.run(run())


def test_a_connection_without_calls_is_closed_and_one_with_a_call_is_not(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_connection_idle_seconds=0.05) as world:
            with (
                await asyncio.to_thread(Http2, world.server.port) as idle,
                await asyncio.to_thread(Http2, world.server.port) as busy,
            ):
                watch = busy.call(WATCH)
                await asyncio.to_thread(busy.wait_for, HEADERS, watch)
                assert await asyncio.to_thread(idle.wait_for_status, idle.call(CHECK)) == 0
                await asyncio.to_thread(idle.wait_for_end)
                world.engine.is_ready = False
                await world.server.update_health()
                while HealthCheckResponse.FromString((await asyncio.to_thread(busy.wait_for, 0, watch)).payload[5:]).status == 1:
                    pass

    asyncio.run(run())


def test_a_client_comes_back_by_itself_after_an_idle_while(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_connection_idle_seconds=0.02) as world:
            for _ in range(20):
                assert (await world.stub.Generate(GenerateRequest(text="a"), wait_for_ready=True)).text
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize("greeting", [b"", PREFACE, PREFACE + b"\0\0\0", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_connection_that_does_not_shake_hands_is_closed(serve: Any, greeting: bytes) -> None:
    async def run() -> None:
        async with serve(handshake_seconds=0.05) as world:
            with await asyncio.to_thread(socket.create_connection, ("127.0.0.1", world.server.port), 30) as connection:
                connection.sendall(greeting)

                def read_all() -> None:
                    try:
                        while connection.recv(65_536):
                            pass
                    except ConnectionError:
                        pass

                await asyncio.to_thread(read_all)
                assert await check(world.server.port) == 0

    asyncio.run(run())


def test_a_connection_has_so_many_calls_under_way(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_concurrent_streams=3) as world:
            world.engine.hold()
            with await asyncio.to_thread(Http2, world.server.port) as connection:
                request = GenerateRequest(text="a").SerializeToString()
                for _ in range(5):
                    connection.call(GENERATE, request)
                refused = [await asyncio.to_thread(connection.wait_for, RST_STREAM) for _ in range(2)]
                assert [frame.stream for frame in refused] == [7, 9]
                await eventually(lambda: len(world.engine.requests) == 3)
                assert (await HealthStub(world.channel).Check(HealthCheckRequest())).status == HealthCheckResponse.SERVING
                world.engine.gate.set()
                for stream in (1, 3, 5):
                    assert await asyncio.to_thread(connection.wait_for_status, stream) == 0

    asyncio.run(run())


def test_a_client_keeps_calls_that_are_too_many_until_there_is_room(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_concurrent_streams=2) as world:
            await world.stub.Generate(GenerateRequest(text="a"))
            world.engine.hold()
            world.engine.requests.clear()
            calls = [asyncio.ensure_future(one()) for one in [lambda: world.stub.Generate(GenerateRequest(text="a"))] * 2]
            await eventually(lambda: len(world.engine.requests) == 2)
            third = world.stub.Generate(GenerateRequest(text="a"), timeout=0.05)
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await third
            assert len(world.engine.requests) == 2, "it never came here"
            world.engine.gate.set()
            assert all([(await call).text for call in calls])

    asyncio.run(run())


def test_calls_that_are_taken_back_at_once_do_not_pile_up(serve: Any) -> None:
    """A flood of them on one connection used to take gigabytes: each waits to be taken up, cancelled or not."""

    async def run() -> None:
        async with serve(max_concurrent_streams=100) as world:
            with await asyncio.to_thread(Http2, world.server.port) as connection:
                first = connection.call(CHECK)
                assert await asyncio.to_thread(connection.wait_for_status, first) == 0
                for _ in range(1000):  # the event loop stands still meanwhile, so none is taken up
                    connection.socket.sendall(frame(RST_STREAM, 0, connection.call(GENERATE, None, is_last=False), b"\0\0\0\x08"))
                refused = await asyncio.to_thread(connection.wait_for, RST_STREAM)
                assert struct.unpack("!I", refused.payload)[0] == REFUSED_STREAM
            assert await check(world.server.port) == 0

    asyncio.run(run())


def test_who_pings_too_often_is_sent_away(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            with await asyncio.to_thread(Http2, world.server.port) as connection:
                connection.socket.sendall(frame(PING, 0, 0, b"12345678") * 10)
                farewell = await asyncio.to_thread(connection.wait_for, GOAWAY)
                assert b"too_many_pings" in farewell.payload

    asyncio.run(run())


def test_headers_that_are_too_long_are_refused(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            for name, value in (("x-long", "x" * 17_000), ("authorization", "x" * 100_000)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await world.stub.Generate(GenerateRequest(text="a"), metadata=((name, value),))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert world.engine.requests == []

    asyncio.run(run())


def test_a_client_that_has_vanished_is_noticed(serve: Any) -> None:
    """It answers nothing; gRPC core would wait a minute for it, whatever its keepalive timeout."""

    async def run() -> None:
        async with serve(keepalive_timeout_seconds=0.05) as world:
            with await asyncio.to_thread(socket.create_connection, ("127.0.0.1", world.server.port), 30) as connection:
                silent = Http2.__new__(Http2)
                silent.socket, silent._next_stream, silent._received = connection, 1, b""
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
                silent.call(WATCH)
                await eventually(lambda: world.server.face.health.num_watchers == 1)
                await eventually(lambda: world.server.face.health.num_watchers == 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "is_warned"),
    [
        (1024, 4096, 1256, False),
        (1024, resource.RLIM_INFINITY, 1256, False),
        (1024, 1100, 1100, True),
        (2000, 4096, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_files_may_be_as_many_as_connections(
    monkeypatch: pytest.MonkeyPatch, logged: Any, soft: int, hard: int, allowed: int | None, is_warned: bool
) -> None:
    changed: list[tuple[int, int]] = []
    limits = SimpleNamespace(
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
        RLIM_INFINITY=resource.RLIM_INFINITY,
        getrlimit=lambda _: (soft, hard),
        setrlimit=lambda _, values: changed.append(values),
    )
    monkeypatch.setattr(connections, "resource", limits)
    connections.make_room(1000)
    assert changed == ([] if allowed is None else [(allowed, hard)])
    assert bool(logged()) == is_warned
