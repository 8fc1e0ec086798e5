"""What the console is told by the real server: requests seen growing in their slots and ending, whoever and however many look."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession

from dragoman.server.core.viewing import MAX_VIEWERS_PER_CALLER
from tests.system.harness.server import descendants

pytestmark = pytest.mark.e2e

FLAGS = ("--num-threads", "1", "--warmup", "false", "--max-slots", "4", "--restart-backoff-initial-seconds", "0.1")
ALICE, BOB, ANNA = ({"Authorization": f"Bearer {token}"} for token in ("alice-s", "bob-s", "anna-s"))


@pytest.fixture
def people(tmp_path: Path) -> tuple[str, ...]:
    """Flags by which callers and operators are known."""
    callers, operators = tmp_path / "callers.toml", tmp_path / "operators.toml"
    callers.write_text('[callers.alice]\ntoken = "alice-s"\n[callers.bob]\ntoken = "bob-s"\nmodels = ["beta"]\n')
    operators.write_text('[callers.anna]\ntoken = "anna-s"\n')
    return ("--auth-tokens-file", str(callers), "--admin-tokens-file", str(operators), "--http-admin", "true")


@asynccontextmanager
async def watching(session: ClientSession, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[Any]]:
    async with session.get("/console/engine", headers=headers) as response:
        assert response.status == 200, await response.text()
        yield _views(response)


async def _views(response: ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def until(views: AsyncIterator[Any], is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the models of the first view of which something is so, by name."""
    async for view in views:
        models = {model["name"]: model for model in view["models"]}
        if is_so(models):
            return models
    raise AssertionError("the views ended before")


def generate(session: ClientSession, model: str, **fields: Any) -> Awaitable[Any]:
    message = {"model": model, "text": "a dog runs", "maxNewTokens": 900, **fields}
    return session.post("/v1/generate", json=message, headers=ALICE)


@pytest.mark.parametrize("how", [(), ("--replicas", "2"), ("--front-ends", "2")], ids=["one", "replicas", "front_ends"])
def test_requests_are_seen_to_come_to_grow_and_to_end(
    serve: Any, endless: Path, people: tuple[str, ...], how: tuple[str, ...]
) -> None:
    async def run(address: str) -> None:
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            session = await stack.enter_async_context(ClientSession(address))
            views = await stack.enter_async_context(watching(session, ALICE))
            models = await until(views, lambda models: all(one["state"] == "serving" for one in models.values()))
            num_slots = 8 if "--replicas" in how else 4
            assert {name: (one["numSlots"], one["slots"], one["rowsPerStep"]) for name, one in models.items()} == {
                "alpha": (num_slots, [], None),
                "beta": (num_slots, [], None),
            }
            asked = [
                asyncio.ensure_future(generate(session, "alpha", numBeams=2)),
                *(asyncio.ensure_future(generate(session, "beta")) for _ in range(10)),
            ]
            models = await until(views, lambda models: len(models["alpha"]["slots"]) == 2 and len(models["beta"]["slots"]) >= 4)
            first, second = models["alpha"]["slots"]
            assert first["request"] == second["request"] and first["slot"] != second["slot"]
            assert (first["state"], first["maxNewTokens"]) == ("decode", 900) and first["numSourceTokens"] > 2
            slots = [slot["slot"] for slot in models["beta"]["slots"]]
            assert len(set(slots)) == len(slots) and all(0 <= slot < num_slots for slot in slots)
            assert models["beta"]["callers"][0]["name"] == "alice"
            before = {slot["request"]: slot["numTokens"] for slot in models["beta"]["slots"]}

            def have_grown(models: dict[str, Any]) -> bool:
                now = {slot["request"]: slot["numTokens"] for slot in models["beta"]["slots"]}
                return any(now.get(request, 0) > count + 10 for request, count in before.items())

            beta = (await until(views, have_grown))["beta"]
            assert beta["stepsPerSecond"] > 0 < beta["tokensPerSecond"] and beta["stepSeconds"] > 0
            assert 0 < beta["rowsPerStep"] <= 4 and beta["cacheBytesReserved"] > 0
            await until(views, lambda models: models["beta"]["numWaiting"] > 0)
            for answer in await asyncio.gather(*asked):
                assert answer.status == 200
            await until(views, lambda models: not any(one["slots"] or one["callers"] for one in models.values()))

    with serve(endless, *FLAGS, *people, *how) as server:
        asyncio.run(run(server.http_address))
        assert [event for event in server.events if "exception" in event] == []
        assert server.terminate() == 0


def test_names_of_callers_are_for_operators_and_viewers_are_bounded(serve: Any, endless: Path, people: tuple[str, ...]) -> None:
    async def run(address: str) -> None:
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            session = await stack.enter_async_context(ClientSession(address))
            asked = asyncio.ensure_future(generate(session, "beta"))

            def is_shown(models: dict[str, Any]) -> bool:
                return bool(models["beta"]["callers"])

            for headers, name in ((ANNA, "alice"), (ALICE, "alice"), (BOB, "")):
                async with watching(session, headers) as views:
                    models = await until(views, is_shown)
                    assert [one["name"] for one in models["beta"]["callers"]] == [name]
                    assert set(models) == ({"beta"} if headers is BOB else {"alpha", "beta"})
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with session.get("/console/engine", headers=headers) as response:
                    assert response.status == 401
            for _ in range(MAX_VIEWERS_PER_CALLER):
                await anext(await stack.enter_async_context(watching(session, BOB)))
            async with session.get("/console/engine", headers=BOB) as response:
                assert (response.status, (await response.json())["message"].split(":")[0]) == (429, "viewers")
            assert (await asked).status == 200
            async with session.get("/console/models", headers=ANNA) as response:
                [alpha, beta] = (await response.json())["models"]
            assert alpha["model"]["name"] == "alpha" and beta["parity"]["numRows"] > 0 and beta["quality"] is None

    with serve(endless, *FLAGS, *people) as server:
        asyncio.run(run(server.http_address))
        assert server.terminate() == 0


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_views_go_on_while_engines_are_killed_and_operators_change_what_is_served(
    serve: Any, endless: Path, people: tuple[str, ...], front_ends: str
) -> None:
    async def run(server: Any) -> None:
        async with asyncio.timeout(120), ClientSession(server.http_address) as session, watching(session, ANNA) as views:
            await until(views, lambda models: all(one["state"] == "serving" for one in models.values()))
            [process] = [
                event["engine_pid"] for event in server.events if event["event"] == "engine ready" and event["model"] == "beta"
            ]
            assert process in descendants(server.process.pid)
            os.kill(process, signal.SIGKILL)
            await until(views, lambda models: models["beta"]["state"] == "starting" and models["alpha"]["state"] == "serving")
            await until(views, lambda models: models["beta"]["state"] == "serving")
            asked = asyncio.ensure_future(generate(session, "beta"))
            await until(views, lambda models: len(models["beta"]["slots"]) == 1)
            assert (await asked).status == 200
            async with session.post("/v1/repository/models/alpha:unload", json={}, headers=ANNA) as response:
                assert (response.status, (await response.json())["isReady"]) == (200, False)
            assert set(await until(views, lambda models: "alpha" not in models)) == {"beta"}
            async with session.get("/v1/repository", headers=ALICE) as response:
                assert response.status == 401
            async with session.post("/v1/repository/models/alpha:load", json={"version": "nine"}, headers=ANNA) as response:
                assert (response.status, (await response.json())["code"]) == (404, 5)
            async with session.post("/v1/repository/models/alpha:load", json={}, headers=ANNA) as response:
                assert (response.status, (await response.json())["isReady"]) == (200, True)
            await until(views, lambda models: set(models) == {"alpha", "beta"})
            server.process.send_signal(signal.SIGTERM)
            async for _ in views:
                pass

    with serve(endless, *FLAGS, *people, "--front-ends", front_ends) as server:
        asyncio.run(run(server))
        assert server.wait() == 0
