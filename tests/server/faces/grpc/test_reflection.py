import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ExtensionRequest, ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.server.core import core
from dragoman.server.errors import IdleStream
from dragoman.server.faces.grpc.reflection import MAX_STREAMS_PER_CONNECTION, Reflection
from tests.server.faces.grpc.conftest import eventually

METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST = ServerReflectionRequest(list_services="")


async def ask(world: Any, request: ServerReflectionRequest) -> Any:
    call = ServerReflectionStub(world.channel).ServerReflectionInfo()
    await call.write(request)
    await call.done_writing()
    return await call.read()


async def open_stream(world: Any) -> Any:
    """Return a stream that has had an answer and goes on."""
    call = ServerReflectionStub(world.channel).ServerReflectionInfo()
    await call.write(LIST)
    assert (await call.read()).HasField("list_services_response")
    return call


def test_an_open_stream_does_not_hold_up_the_drain(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to use it up."""
    monkeypatch.setattr(core, "CLOSE_SECONDS", 60.0)  # busy cores may take longer than a server that ends waits

    async def run() -> None:
        async with serve() as world:
            call = await open_stream(world)
            assert await asyncio.wait_for(world.server.drain(1000), 100)
            await world.server.stop()
            with pytest.raises(grpc.aio.AioRpcError, match="the server is shutting down") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_streams_of_one_connection_are_bounded(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            calls = [await open_stream(world) for _ in range(MAX_STREAMS_PER_CONNECTION)]
            with pytest.raises(grpc.aio.AioRpcError, match="reflection streams: 4 on one connection") as caught:
                await ask(world, LIST)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await calls[0].done_writing()
            assert await calls[0].read() is grpc.aio.EOF
            assert (await ask(world, LIST)).HasField("list_services_response")

    asyncio.run(run())


def test_a_stream_on_which_nothing_comes_ends() -> None:
    async def nothing() -> AsyncIterator[Any]:
        yield LIST
        await asyncio.Event().wait()

    async def run() -> None:
        class Context:
            def peer(self) -> str:
                return "somebody"

        reflection = Reflection(idle_seconds=0.01)
        answers = reflection.ServerReflectionInfo(nothing(), Context())  # type: ignore[arg-type]
        assert (await anext(answers)).HasField("list_services_response")
        with pytest.raises(IdleStream, match=r"nothing was asked for 0\.01 s"):
            await anext(answers)
        assert reflection._places.num_taken == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x22\x02\xc3\x28", "request: cannot be parsed; is every string UTF-8?"),
        (ServerReflectionRequest(file_containing_symbol="x" * 2000).SerializeToString(), "at most 1024 are allowed"),
    ],
    ids=["not-utf8", "long"],
)
def test_a_question_that_cannot_be_one_is_an_invalid_argument(serve: Any, raw: bytes, message: str) -> None:
    async def run() -> None:
        async with serve() as world:
            call = world.channel.stream_stream(METHOD)()
            await call.write(raw)
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ServerReflectionRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (ServerReflectionRequest(file_by_filename=""), grpc.StatusCode.NOT_FOUND),
        (ServerReflectionRequest(file_by_filename="a\0b/../c"), grpc.StatusCode.NOT_FOUND),
        (ServerReflectionRequest(file_containing_symbol=""), grpc.StatusCode.NOT_FOUND),
        (ServerReflectionRequest(file_containing_symbol="..é."), grpc.StatusCode.NOT_FOUND),
        (ServerReflectionRequest(all_extension_numbers_of_type="no.Such"), grpc.StatusCode.NOT_FOUND),
        *(
            (
                ServerReflectionRequest(
                    file_containing_extension=ExtensionRequest(
                        containing_type="google.protobuf.MessageOptions", extension_number=number
                    )
                ),
                grpc.StatusCode.NOT_FOUND,
            )
            for number in (-(2**31), -1, 0, 7, 2**31 - 1)
        ),
    ],
)
def test_odd_questions_are_answered_on_the_stream(serve: Any, request_: ServerReflectionRequest, code: grpc.StatusCode) -> None:
    async def run() -> None:
        async with serve() as world:
            assert (await ask(world, request_)).error_response.error_code == code.value[0]
            await eventually(lambda: not world.server.core.calls._others)

    asyncio.run(run())
