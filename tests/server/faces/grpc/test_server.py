import asyncio
import socket
import threading
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.core.core import Core
from dragoman.server.faces.grpc.server import build_server
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1.generation_pb2 import GenerateRequest
from tests.server.scripted import LoadedModels


def test_drain_refuses_new_work_and_lets_running_requests_finish(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            unary = world.stub.Generate(GenerateRequest(text="a"))
            stream = world.stub.GenerateStream(GenerateRequest(text="a"))
            pieces = aiter(stream)
            await anext(pieces)
            async with asyncio.timeout(60):
                while len(world.engine.requests) < 2:
                    await asyncio.sleep(0.005)
            draining = asyncio.create_task(world.server.drain(30))
            await asyncio.sleep(0)
            refused = world.stub.Generate(GenerateRequest(text="a"))
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
                await refused
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            retry = RetryInfo()
            assert (await rpc_status.aio.from_call(refused)).details[0].Unpack(retry)
            assert not draining.done()
            world.engine.gate.set()
            assert await draining
            assert (await unary).text == "Fußball 🐕 日本"
            assert [piece async for piece in pieces][-1].result.text == "Fußball 🐕 日本"
            assert world.records() == {("en-de", "eos"): 2, ("", "UNAVAILABLE"): 1}

    asyncio.run(run())


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_what_outlasts_the_drain_ends_with_unavailable_and_is_cancelled_in_the_engine(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = getattr(world.stub, method)(GenerateRequest(text="a"))
            if method == "GenerateStream":
                await call.read()
            await world.engine.arrived.wait()
            assert not await world.server.drain(0.05)
            await world.server.stop()
            with pytest.raises(grpc.aio.AioRpcError, match="the server is shutting down") as caught:
                await (call if method == "Generate" else read_all(call))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert world.engine.cancelled == [world.engine.requests[0].id]
            assert world.server.num_running == 0
            assert world.records() == {("en-de", "UNAVAILABLE"): 1}

    asyncio.run(run())


def test_idle_server_drains_at_once_and_stops_twice(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await world.server.drain(0)
            await world.server.stop()
            await world.server.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("rule", "is_ready_with_one"), [("all", False), ("any", True)])
def test_readiness_follows_models_and_drain(serve: Any, make_model: Any, rule: str, is_ready_with_one: bool) -> None:
    async def run() -> None:
        async with serve(make_model("a"), make_model("b"), ready_when=rule) as world:
            assert world.server.is_ready
            world.engine.is_ready = False
            assert world.server.is_ready is is_ready_with_one
            for model in world.models.all():
                model.engine.is_ready = False
            assert not world.server.is_ready
            for model in world.models.all():
                model.engine.is_ready = True
            await world.server.drain(0)
            assert not world.server.is_ready

    asyncio.run(run())


async def list_services(channel: grpc.aio.Channel) -> set[str]:
    async def requests() -> Any:
        yield ServerReflectionRequest(list_services="")

    return {
        service.name
        async for response in ServerReflectionStub(channel).ServerReflectionInfo(requests())
        for service in response.list_services_response.service
    }


def test_reflection_lists_the_services(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await list_services(world.channel) == {
                "dragoman.v1.Generation",
                "inference.GRPCInferenceService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }

    asyncio.run(run())


def test_reflection_can_be_turned_off(serve: Any) -> None:
    async def run() -> None:
        async with serve(reflection=False) as world:
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await list_services(world.channel)

    asyncio.run(run())


def test_message_over_the_limit_is_refused(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_message_bytes=2048) as world:
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                await world.stub.Generate(GenerateRequest(text="a" * 4096))
            assert world.engine.requests == []

    asyncio.run(run())


def test_taken_port_is_named(tmp_path: Any) -> None:
    async def run(port: int) -> None:
        config = ServerConfig(models=tmp_path, host="127.0.0.1", port=port, metrics_port=0)
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            build_server(config, Core(LoadedModels(), Metrics(CollectorRegistry(), [1.0])))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(run(taken.getsockname()[1]))


def test_port_of_another_of_our_servers_is_taken_too(serve: Any, tmp_path: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            config = ServerConfig(models=tmp_path, host="127.0.0.1", port=world.server.port, metrics_port=0)
            with pytest.raises(ConfigError, match="cannot listen"):
                build_server(config, world.server.core)

    asyncio.run(run())


def test_calls_that_come_while_the_event_loop_is_held_up_are_all_answered(serve: Any) -> None:
    """A burst of some thousand calls used to lose half of them: gRPC core ended them as CANCELLED before the server saw them."""
    num_calls, block_seconds = 4_000, 1.5

    def send(port: int, is_connected: threading.Event, is_blocked: threading.Event) -> Counter[grpc.StatusCode]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            check(health_pb2.HealthCheckRequest(), timeout=60)
            is_connected.set()
            assert is_blocked.wait(60)
            calls = [check.future(health_pb2.HealthCheckRequest()) for _ in range(num_calls)]
            return Counter(call.code() for call in calls)

    async def run() -> None:
        async with serve(max_concurrent_streams=2 * num_calls) as world:
            is_connected, is_blocked = threading.Event(), threading.Event()
            codes = asyncio.create_task(asyncio.to_thread(send, world.server.port, is_connected, is_blocked))
            while not is_connected.is_set():
                await asyncio.sleep(0.01)
            is_blocked.set()
            time.sleep(block_seconds)
            assert await codes == {grpc.StatusCode.OK: num_calls}

    asyncio.run(run())


def test_old_connections_are_asked_to_leave_without_losing_requests(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_connection_age_seconds=0.05) as world:
            for _ in range(20):
                assert (await world.stub.Generate(GenerateRequest(text="a"), wait_for_ready=True)).text
                await asyncio.sleep(0.01)
            assert world.records() == {("en-de", "eos"): 20}

    asyncio.run(run())


def test_a_call_on_an_old_connection_takes_as_long_as_it_needs(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_connection_age_seconds=0.05) as world:
            world.engine.hold()
            call = world.stub.Generate(GenerateRequest(text="a"))
            await world.engine.arrived.wait()
            await asyncio.sleep(0.5)
            world.engine.gate.set()
            assert (await call).text

    asyncio.run(run())


def test_a_call_on_an_old_connection_ends_with_the_grace_where_there_is_one(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_connection_age_seconds=0.05, max_connection_age_grace_seconds=0.05) as world:
            world.engine.hold()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await world.stub.Generate(GenerateRequest(text="a"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(30):
                while not world.engine.cancelled:
                    await asyncio.sleep(0.005)

    asyncio.run(run())
