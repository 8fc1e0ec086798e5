"""The `Repository` service over HTTP: what operators ask for is done, who they are, and what others are told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from dragoman.server.config import ServerConfig
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, Snapshot
from dragoman.server.operators import Operators
from dragoman.server.repository import keeper as keeper_module
from dragoman.server.repository import loader, model_keeper
from dragoman.server.repository.keeper import Keeper
from dragoman.server.repository.model_file import ModelFile, Swap
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.metrics import Metrics
from tests.server.faces.http.conftest import events
from tests.server.repository.staged import MODEL, Stage

OPERATORS = """
[callers.anna]
token = "anna-s"
[callers.bert]
token = "bert-s"
models = ["other"]
"""
PATH = "/v1/repository"
ANNA = {"Authorization": "Bearer anna-s"}
BERT = {"Authorization": "Bearer bert-s"}


@dataclass
class AdminWorld:
    """An HTTP server whose operators lead a stage's versions."""

    http: Any
    operators: Operators

    async def get(self, path: str, headers: dict[str, str] = ANNA) -> tuple[int, Any]:
        async with self.http.session.get(self.http.url(path), headers=headers) as response:
            return response.status, await response.json()

    async def change(self, path: str, headers: dict[str, str] = ANNA, **message: str) -> tuple[int, Any]:
        return await self.http.ask(path, message, headers=headers)  # type: ignore[no-any-return]


@pytest.fixture
def administer(serve_http: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(model_keeper, "WATCH_SECONDS", 0.002)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.001)
    tokens = tmp_path / "operators.toml"
    tokens.write_text(OPERATORS)

    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[AdminWorld]:
        stage = Stage("1", "2", file=ModelFile(swap=Swap(probation_seconds=0)))
        monkeypatch.setattr(keeper_module, "scan", lambda *_: [stage.found])
        given = {"http_admin": True, "admin_tokens_file": tokens}
        config = ServerConfig(models=tmp_path, **given)
        keeper: Keeper[Any] = Keeper(tmp_path, [stage.found], lambda _: stage.keeper, 0.0)
        metrics = Metrics(CollectorRegistry(), config.latency_buckets)
        operators = Operators(config, keeper, metrics, CallerMetrics(CollectorRegistry()))
        async with stage.led(), serve_http(operators=operators.over_http, **given, **settings) as http:
            operators.begin()
            try:
                yield AdminWorld(http, operators)
            finally:
                await operators.end()

    return serving


def test_every_change_is_made_and_answered_with_how_the_model_is(administer: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), administer() as world:
            status, listed = await world.get(PATH)
            [model] = listed["models"]
            assert (status, model["name"], model["isReady"], listed["problem"]) == (200, MODEL, True, "")
            assert [(one["name"], one["state"]) for one in model["versions"]] == [
                ("2", "VERSION_STATE_SERVING"),
                ("1", "VERSION_STATE_FOUND"),
            ]
            assert await world.get(f"{PATH}?model={MODEL}") == (200, listed)
            path = f"{PATH}/models/{MODEL}"
            assert (await world.change(f"{path}:load", version="1"))[1]["requested"]["loaded"] == ["1"]
            assert (await world.change(f"{path}:label", label="old", version="1"))[1]["requested"]["labels"] == {"old": "1"}
            assert (await world.change(f"{path}:rollback", version="1"))[1]["requested"]["pinned"] == "1"
            assert (await world.change(f"{path}:unload", version="1"))[1]["requested"]["unloaded"] == ["1"]
            assert (await world.change(f"{path}:load", model=MODEL))[1]["requested"]["unloaded"] == []
            assert (await world.change(f"{path}:reload"))[1]["isReady"] is True
            status, refreshed = await world.change(f"{PATH}:refresh")
            assert (status, [one["name"] for one in refreshed["models"]]) == (200, [MODEL])

    asyncio.run(run())


def test_what_cannot_be_done_is_refused_as_over_grpc(administer: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), administer() as world:
            path = f"{PATH}/models/{MODEL}"
            for change, code in (
                (world.change(f"{path}:load", version="9"), (404, 5)),
                (world.change(f"{PATH}/models/nobody:load"), (404, 5)),
                (world.change(f"{PATH}/models/{'m' * 500}:load"), (400, 3)),
                (world.change(f"{path}:load", model="another"), (400, 3)),
                (world.change(f"{path}:load", verion="1"), (400, 3)),
                (world.change(f"{path}:unload", version="2"), (200, None)),
                (world.change(f"{path}:unload", version="1"), (400, 9)),
                (world.change(f"{path}:destroy"), (404, 5)),
            ):
                status, told = await change
                assert (status, told.get("code")) == code, told

    asyncio.run(run())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer web-s"}, {"Authorization": "Bearer wrong"}])
def test_only_operators_tokens_open_it(administer: Any, tmp_path: Path, headers: dict[str, str]) -> None:
    callers = tmp_path / "callers.toml"
    callers.write_text('[callers.web]\ntoken = "web-s"\n')

    async def run() -> None:
        async with administer(auth_tokens_file=callers) as world:
            for status, told in (
                await world.get(PATH, headers),
                await world.change(f"{PATH}/models/{MODEL}:unload", headers),
                await world.change(f"{PATH}:refresh", headers),
            ):
                assert (status, told["code"]) == (401, 16)
            assert (await world.get(PATH))[1]["models"][0]["isReady"]
            assert (await world.change("/v1/generate", text="a"))[0] == 401, "an operator is no caller"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("verb", "headers", "body", "status", "said"),
    [
        ("unload", {}, {}, 401, "token"),
        ("unload", BERT, {}, 404, MODEL),
        ("unload", ANNA, {"parameters": {"unload_dependents": False}}, 200, None),
        ("unload", ANNA, {"parameters": {"force": True}}, 400, "parameters: "),
        ("load", ANNA, {"parameters": {"config": "{}"}}, 400, "parameters: "),
        ("load", ANNA, {"config": "{}"}, 400, "body: "),
        ("load", ANNA, None, 200, None),
    ],
)
def test_tritons_paths_load_and_unload(
    administer: Any, verb: str, headers: dict[str, str], body: Any, status: int, said: str | None
) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), administer() as world:
            url = world.http.url(f"/v2/repository/models/{MODEL}/{verb}")
            async with world.http.session.post(url, json=body, headers=headers) as response:
                text = await response.text()
                assert response.status == status
                assert text == "" if said is None else said in json.loads(text)["error"]
            assert (await world.get(PATH))[1]["models"][0]["requested"]["isUnloaded"] is (verb == "unload" and status == 200)

    asyncio.run(run())


def test_an_operator_is_shown_the_models_of_its_own_only(administer: Any) -> None:
    async def run() -> None:
        async with administer() as world:
            assert (await world.get(PATH, BERT))[1]["models"] == []
            assert (await world.change(f"{PATH}/models/{MODEL}:reload", BERT))[0] == 404

    asyncio.run(run())


def test_an_operator_sees_in_the_console_who_calls(administer: Any, tmp_path: Path) -> None:
    callers = tmp_path / "callers.toml"
    callers.write_text('[callers.web]\ntoken = "web-s"\n')

    async def named(world: Any, headers: dict[str, str]) -> set[str]:
        async with world.http.session.get(world.http.url("/console/engine"), headers=headers) as response:
            assert response.status == 200
            async for _, view in events(response):
                return {one["name"] for model in view["models"] for one in model["callers"]}
        raise AssertionError

    async def run() -> None:
        async with asyncio.timeout(60), administer(auth_tokens_file=callers) as world:
            world.http.engine.snapshot = Snapshot([EngineSnapshot(0.0)], [CallerUse("web", 1), CallerUse("shop", 2)])
            assert await named(world, {"Authorization": "Bearer web-s"}) == {"web", ""}
            assert await named(world, ANNA) == {"web", "shop"}
            assert await named(world, BERT) == set(), "it may see none of these models"

    asyncio.run(run())


def test_where_settings_do_not_say_so_nothing_is_there(serve_http: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "operators.toml"
    tokens.write_text(OPERATORS)

    async def run() -> None:
        async with serve_http(admin_port=0, admin_tokens_file=tokens) as world:
            status, _ = await world.ask(f"{PATH}/models/en-de:unload", {}, headers=ANNA)
            assert status == 404

    asyncio.run(run())


@pytest.mark.parametrize("settings", [{}, {"admin_port": 0}, {"http": False}])
def test_it_cannot_be_opened_to_everybody(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokens = tmp_path / "operators.toml"
    tokens.write_text(OPERATORS)
    named = {"admin_tokens_file": tokens} if "http" in settings else {}
    with pytest.raises(ValidationError, match="http_admin"):
        ServerConfig(models=tmp_path, http_admin=True, **named, **settings)
