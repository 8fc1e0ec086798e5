"""The console's engine data over HTTP: who may look, what they see, how it ends, and that nobody asks engines for nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.server.core.callers_file import read_book
from dragoman.server.core.viewing import MAX_VIEWERS, MAX_VIEWERS_PER_CALLER
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, SlotUse, Snapshot, StepTotals
from tests.server.faces.grpc.conftest import eventually
from tests.server.faces.http.conftest import events

PATH = "/console/engine"
CALLERS = """
[callers.alice]
token = "alices-token"
[callers.bob]
token = "bobs-token"
models = ["en-de"]
"""


def snapshot(at: float = 0.0, totals: StepTotals | None = None) -> Snapshot:
    slots = [SlotUse(0, 41, False, 7, 3, 20), SlotUse(1, 42, True, 9, 0, 20)]
    callers = [CallerUse("alice", 3, 1), CallerUse("bob", 0, 1), CallerUse("carol", 2, 0)]
    return Snapshot([EngineSnapshot(at, slots, totals or StepTotals())], callers)


@pytest.fixture
def callers(tmp_path: Path) -> Path:
    path = tmp_path / "callers.toml"
    path.write_text(CALLERS)
    return path


@asynccontextmanager
async def watching(world: Any, token: str = "") -> AsyncIterator[AsyncIterator[Any]]:
    """Yield what the events say, one after the other."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with world.session.get(world.url(PATH), headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"

        async def told() -> AsyncIterator[Any]:
            async for _, view in events(response):
                yield view

        yield told()


def test_a_view_tells_what_every_slot_does(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.snapshot = snapshot()
            async with asyncio.timeout(20), watching(world) as views:
                view = await anext(views)
            assert (view["isReady"], view["isDraining"]) == (True, False) and view["uptimeSeconds"] >= 0
            [model] = view["models"]
            named = {key: model[key] for key in ("name", "version", "state", "isDefault", "device", "precision", "numSlots")}
            assert named == {
                "name": "en-de",
                "version": "v7",
                "state": "serving",
                "isDefault": True,
                "device": "cpu",
                "precision": "fp32",
                "numSlots": 8,
            }
            assert model["rowsPerStep"] is None and model["stepSeconds"] is None
            slot = {"slot": 0, "request": 41, "state": "decode", "numSourceTokens": 7, "numTokens": 3, "maxNewTokens": 20}
            assert model["slots"][0] == slot | {"engine": 0}
            assert model["slots"][1]["state"] == "prefill"

    asyncio.run(run())


def test_rates_are_means_since_the_view_before(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.snapshot = snapshot(10.0, StepTotals(100, 500, 1.0))
            async with asyncio.timeout(20), watching(world) as views:
                await anext(views)
                world.engine.snapshot = snapshot(10.5, StepTotals(150, 700, 1.25))
                while (model := (await anext(views))["models"][0])["rowsPerStep"] is None:
                    pass
            rates = [model[key] for key in ("rowsPerStep", "stepSeconds", "stepsPerSecond", "tokensPerSecond")]
            assert rates == [4.0, 0.005, 100.0, 400.0]

    asyncio.run(run())


def test_engines_are_asked_only_while_somebody_looks_and_once_for_all(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            viewing = world.server.core.viewing
            assert world.engine.num_watches == 0
            async with asyncio.timeout(30), AsyncExitStack() as stack:
                first = await stack.enter_async_context(watching(world))
                await anext(first)
                more = [await stack.enter_async_context(watching(world)) for _ in range(3)]
                before = world.engine.num_watches
                for views in (first, *more):
                    await anext(views)
                assert viewing.num_viewers == 4
                assert world.engine.num_watches - before <= 2
            await eventually(lambda: viewing.num_viewers == 0)
            asked = world.engine.num_watches
            await asyncio.sleep(0.6)  # nothing is to happen, so there is nothing to wait for
            assert world.engine.num_watches == asked

    asyncio.run(run())


def test_an_engine_that_does_not_answer_holds_up_no_view(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.snapshot = None
            async with asyncio.timeout(20), watching(world) as views:
                assert (await anext(views))["models"][0]["slots"] == []
                world.engine.is_ready = False
                while (await anext(views))["models"][0]["state"] != "starting":
                    pass

    asyncio.run(run())


def test_a_model_that_sleeps_is_shown_so_and_not_woken(serve_http: Any, make_model: Any) -> None:
    sleeping = make_model("en-fr")
    sleeping.is_asleep, sleeping.engine.is_ready = True, False

    async def run() -> None:
        async with asyncio.timeout(20), serve_http(make_model(), sleeping) as world, watching(world) as views:
            [awake, asleep] = (await anext(views))["models"]
            assert (awake["state"], asleep["state"], asleep["slots"], asleep["numSlots"]) == ("serving", "asleep", [], 8)
            assert sleeping.engine.requests == []

    asyncio.run(run())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_nobody_looks_without_a_token_where_callers_have_some(serve_http: Any, callers: Path, headers: dict[str, str]) -> None:
    async def run() -> None:
        async with (
            serve_http(auth_tokens_file=callers) as world,
            world.session.get(world.url(PATH), headers=headers) as response,
        ):
            assert (response.status, (await response.json())["code"]) == (401, 16)
            assert world.engine.num_watches == 0

    asyncio.run(run())


def test_callers_see_of_others_only_how_much_they_have(serve_http: Any, callers: Path, make_model: Any) -> None:
    async def run() -> None:
        async with serve_http(make_model(), make_model("en-fr"), auth_tokens_file=callers) as world:
            for model in world.models.all():
                model.engine.snapshot = snapshot()
            async with asyncio.timeout(20), watching(world, "alices-token") as views:
                view = await anext(views)
            assert [model["name"] for model in view["models"]] == ["en-de", "en-fr"]
            assert view["models"][0]["callers"] == [
                {"name": "alice", "numWaiting": 3, "numRunning": 1},
                {"name": "", "numWaiting": 2, "numRunning": 1},
            ]
            async with asyncio.timeout(20), watching(world, "bobs-token") as views:
                view = await anext(views)
            assert [model["name"] for model in view["models"]] == ["en-de"]
            assert {one["name"] for one in view["models"][0]["callers"]} == {"bob", ""}

    asyncio.run(run())


def test_viewers_are_bounded_for_all_and_for_each_caller(serve_http: Any, callers: Path) -> None:
    async def refused(world: Any, token: str = "") -> str:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with world.session.get(world.url(PATH), headers=headers) as response:
            assert response.status == 429 and int(response.headers["Retry-After"]) > 0
            return str((await response.json())["message"])

    async def run() -> None:
        async with asyncio.timeout(60), serve_http() as world, AsyncExitStack() as stack:
            for _ in range(MAX_VIEWERS):
                await anext(await stack.enter_async_context(watching(world)))
            assert (await refused(world)).startswith("viewers: ")
            await stack.aclose()
            await eventually(lambda: world.server.core.viewing.num_viewers == 0)
            async with watching(world) as views:
                await anext(views)
        async with asyncio.timeout(60), serve_http(auth_tokens_file=callers) as world, AsyncExitStack() as stack:
            for _ in range(MAX_VIEWERS_PER_CALLER):
                await anext(await stack.enter_async_context(watching(world, "alices-token")))
            assert "alice" in await refused(world, "alices-token")
            await anext(await stack.enter_async_context(watching(world, "bobs-token")))

    asyncio.run(run())


def test_views_end_with_one_that_says_that_the_server_drains(serve_http: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serve_http() as world, watching(world) as views:
            await anext(views)

            async def nobody() -> None:
                pass

            assert await world.server.core.drain(5.0, nobody)
            last = [view["isDraining"] async for view in views]
            assert last[-1] and sum(last) == 1

    asyncio.run(run())


def test_a_caller_who_is_not_known_any_more_sees_no_more(serve_http: Any, callers: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serve_http(auth_tokens_file=callers) as world, watching(world, "alices-token") as views:
            await anext(views)
            [alice] = [one for one in world.server.core.callers.all() if one.name == "alice"]
            alice.forget()
            assert len([view async for view in views]) <= 2

    asyncio.run(run())


def test_a_caller_whose_models_change_sees_those_it_may_use_now(serve_http: Any, callers: Path, make_model: Any) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(30),
            serve_http(make_model(), make_model("en-fr"), auth_tokens_file=callers) as world,
            watching(world, "alices-token") as views,
        ):
            assert [model["name"] for model in (await anext(views))["models"]] == ["en-de", "en-fr"]
            callers.write_text(CALLERS.replace('token = "alices-token"', 'token = "alices-token"\nmodels = ["en-fr"]'))
            world.server.core.callers.replace(read_book(callers))
            while [model["name"] for model in (await anext(views))["models"]] != ["en-fr"]:
                pass

    asyncio.run(run())


def test_without_a_console_there_is_nothing_to_look_at(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http(console=False) as world, world.session.get(world.url(PATH)) as response:
            assert response.status == 404

    asyncio.run(run())
