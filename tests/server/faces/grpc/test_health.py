import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.server.faces.grpc.conftest import eventually
from tests.system.harness.http2 import DATA, HEADERS, Http2

WATCH = "/grpc.health.v1.Health/Watch"
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
SERVING, NOT_SERVING, UNKNOWN = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVICE_UNKNOWN
OVERALL = ("", "readiness", "dragoman.v1.Generation", "inference.GRPCInferenceService")


async def statuses(world: Any, *services: str) -> list[int]:
    health = HealthStub(world.channel)
    return [(await health.Check(HealthCheckRequest(service=service))).status for service in services]


def test_health_follows_the_models(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        starting = make_model("b")
        starting.engine.is_ready = False
        async with serve(make_model("a"), starting) as world:
            assert await statuses(world, *OVERALL) == [NOT_SERVING] * 4
            assert await statuses(world, "a", "b", "liveness") == [SERVING, NOT_SERVING, SERVING]
            starting.engine.is_ready = True
            await world.server.update_health()
            assert await statuses(world, *OVERALL, "a", "b", "liveness") == [SERVING] * 7

    asyncio.run(run())


def test_one_model_that_stops_takes_no_other_away(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model("a"), make_model("b")) as world:
            assert await statuses(world, *OVERALL, "a", "b") == [SERVING] * 6
            stopped = world.models.by_name["b"].engine
            stopped.is_ready = False
            await world.server.update_health()
            assert await statuses(world, *OVERALL, "a", "b") == [SERVING] * 5 + [NOT_SERVING]
            world.models.by_name["a"].engine.is_ready = False
            await world.server.update_health()
            assert await statuses(world, *OVERALL, "a", "b", "liveness") == [NOT_SERVING] * 6 + [SERVING]

    asyncio.run(run())


def test_drain_turns_everything_but_liveness_off(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await statuses(world, *OVERALL, "en-de", "liveness") == [SERVING] * 6
            await world.server.drain(0)
            assert await statuses(world, *OVERALL, "en-de") == [NOT_SERVING] * 5
            assert await statuses(world, "liveness") == [SERVING]

    asyncio.run(run())


def test_server_without_models_is_not_ready(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.models.by_name.clear()
            await world.server.update_health()
            assert await statuses(world, *OVERALL) == [NOT_SERVING] * 4
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


async def zero_window_watcher(world: Any, service: str = "") -> Http2:
    """Return a connection with a watcher that takes nothing, once the server is stuck with telling it."""
    watched = world.server.face.health.num_watchers
    connection = await asyncio.to_thread(Http2, world.server.port, window=0)
    stream = connection.call(WATCH, HealthCheckRequest(service=service).SerializeToString())
    await eventually(lambda: world.server.face.health.num_watchers > watched)
    await asyncio.to_thread(connection.wait_for, HEADERS, stream)  # the first message comes right behind them, and stays
    return connection


def test_a_watcher_that_takes_nothing_holds_up_nobody(serve: Any) -> None:
    """Its stream used to be written to under the lock that every change of the health needs."""

    async def run() -> None:
        async with serve() as world:
            with await zero_window_watcher(world), await zero_window_watcher(world, "en-de"):
                watch = HealthStub(world.channel).Watch(HealthCheckRequest(service="en-de"))
                assert (await watch.read()).status == SERVING
                for is_ready, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
                    world.engine.is_ready = is_ready
                    await asyncio.wait_for(world.server.update_health(), 10)
                    assert await statuses(world, *OVERALL, "en-de") == [status] * 5
                    assert (await asyncio.wait_for(watch.read(), 10)).status == status
                assert await asyncio.wait_for(world.server.drain(1000), 100)
                assert await statuses(world, "", "liveness") == [NOT_SERVING, SERVING]

    asyncio.run(run())


def test_a_watcher_that_was_away_is_told_the_latest_state_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            with await zero_window_watcher(world) as connection:
                for is_ready in (False, True) * 50 + (False,):
                    world.engine.is_ready = is_ready
                    await world.server.update_health()
                connection.open_window(1, 10_000)
                told = [(await asyncio.to_thread(connection.wait_for, DATA, 1)).payload[5:] for _ in range(2)]
                assert [HealthCheckResponse.FromString(message).status for message in told] == [SERVING, NOT_SERVING]
                assert await world.server.face.health.all_told(10)
                world.engine.is_ready = True
                await world.server.update_health()
                last = await asyncio.to_thread(connection.wait_for, DATA, 1)
                assert HealthCheckResponse.FromString(last.payload[5:]).status == SERVING, "nothing was in between"

    asyncio.run(run())


def test_watchers_have_so_many_places_in_all_and_on_one_connection(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_watches=5, max_watches_per_connection=3) as world:
            port = world.server.port
            first, second = [await asyncio.to_thread(Http2, port) for _ in range(2)]
            with first, second:

                async def watch(connection: Http2) -> int | None:
                    stream = connection.call(WATCH)
                    while True:
                        frame = await asyncio.to_thread(connection.wait_for, HEADERS, stream)
                        if frame.status is None:
                            await asyncio.to_thread(connection.wait_for, DATA, stream)
                        return frame.status

                assert [await watch(first) for _ in range(4)] == [None] * 3 + [RESOURCE_EXHAUSTED]
                assert [await watch(second) for _ in range(3)] == [None] * 2 + [RESOURCE_EXHAUSTED]
                with pytest.raises(grpc.aio.AioRpcError, match="max_watches: all 5 are taken") as caught:
                    await HealthStub(world.channel).Watch(HealthCheckRequest()).read()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert await statuses(world, "") == [SERVING], "who asks once needs no place"
            await eventually(lambda: world.server.face.health.num_watchers == 0)
            watch_again = HealthStub(world.channel).Watch(HealthCheckRequest())
            assert (await watch_again.read()).status == SERVING

    asyncio.run(run())


def test_a_name_that_nobody_has_is_watched_until_somebody_has_it(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            watch = HealthStub(world.channel).Watch(HealthCheckRequest(service="new"))
            assert (await watch.read()).status == UNKNOWN
            world.models.by_name["new"] = make_model("new")
            await world.server.update_health()
            assert (await watch.read()).status == SERVING
            del world.models.by_name["new"]
            await world.server.update_health()
            assert (await watch.read()).status == UNKNOWN

    asyncio.run(run())


def test_a_name_too_long_for_anybody_is_not_kept(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            with pytest.raises(grpc.aio.AioRpcError, match="service: 1025 characters; at most 1024 are allowed") as caught:
                await HealthStub(world.channel).Watch(HealthCheckRequest(service="x" * 1025)).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await statuses(world, "x" * 100_000)
            assert world.server.face.health.num_watchers == 0

    asyncio.run(run())


@pytest.mark.parametrize("raw", [b"\x0a\x02\xc3\x28", b"\xff\xff\xff", b"\x0a\x05a"], ids=["not-utf8", "no-field", "cut-off"])
@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_message_that_cannot_be_parsed_is_an_invalid_argument(serve: Any, logged: Any, method: str, raw: bytes) -> None:
    """It used to be UNKNOWN, with the class of a Python exception."""

    async def run() -> None:
        async with serve() as world:
            path = f"/grpc.health.v1.Health/{method}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (world.channel.unary_unary(path)(raw) if method == "Check" else world.channel.unary_stream(path)(raw).read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "request: cannot be parsed; is every string UTF-8?"
            assert [line for line in logged() if line["event"] == "call"] == []

    asyncio.run(run())


def test_what_nobody_foresaw_is_an_incident_that_tells_nothing(serve: Any, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serve() as world:
            monkeypatch.setattr(world.server.face.health, "_statuses", None)
            with pytest.raises(grpc.aio.AioRpcError, match="internal error; quote incident") as caught:
                await statuses(world, "")
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "AttributeError" in str(logged())

    asyncio.run(run())


def test_names_are_not_listed(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            with pytest.raises(grpc.aio.AioRpcError, match="names are not listed") as caught:
                await HealthStub(world.channel).List(HealthListRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())
