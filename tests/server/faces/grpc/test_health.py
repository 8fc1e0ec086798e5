import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

SERVING, NOT_SERVING, UNKNOWN = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVICE_UNKNOWN
OVERALL = ("", "readiness", "dragoman.v1.Generation")


async def statuses(world: Any, *services: str) -> list[int]:
    health = HealthStub(world.channel)
    return [(await health.Check(HealthCheckRequest(service=service))).status for service in services]


def test_health_follows_the_models(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        starting = make_model("b")
        starting.engine.is_ready = False
        async with serve(make_model("a"), starting) as world:
            assert await statuses(world, *OVERALL) == [NOT_SERVING] * 3
            assert await statuses(world, "a", "b", "liveness") == [SERVING, NOT_SERVING, SERVING]
            starting.engine.is_ready = True
            await world.server.update_health()
            assert await statuses(world, *OVERALL, "a", "b", "liveness") == [SERVING] * 6

    asyncio.run(run())


def test_drain_turns_everything_but_liveness_off(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await statuses(world, *OVERALL, "en-de", "liveness") == [SERVING] * 5
            await world.server.drain(0)
            assert await statuses(world, *OVERALL, "en-de") == [NOT_SERVING] * 4
            assert await statuses(world, "liveness") == [SERVING]

    asyncio.run(run())


def test_server_without_models_is_not_ready(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.models.by_name.clear()
            await world.server.update_health()
            assert await statuses(world, *OVERALL) == [NOT_SERVING] * 3
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await statuses(world, "en-de")

    asyncio.run(run())


def test_unknown_service_is_not_found(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await statuses(world, "nobody")

    asyncio.run(run())


def test_watchers_are_told(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            watch = HealthStub(world.channel).Watch(HealthCheckRequest(service="en-de"))
            assert (await watch.read()).status == SERVING
            world.engine.is_ready = False
            await world.server.update_health()
            assert (await watch.read()).status == NOT_SERVING
            world.engine.is_ready = True
            await world.server.update_health()
            assert (await watch.read()).status == SERVING
            watch.cancel()

    asyncio.run(run())


def test_watcher_does_not_hold_up_the_drain(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            watch = HealthStub(world.channel).Watch(HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            assert await world.server.drain(30)
            assert (await watch.read()).status == NOT_SERVING
            await world.server.stop()

    asyncio.run(run())
