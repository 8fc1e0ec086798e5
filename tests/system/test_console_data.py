"""The console's files and data over HTTP, and operators' changes over HTTP: who may read and change what, and live statistics."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import ClientSession

from tests.system.harness.http_client import events
from tests.system.harness.models import ModelFolder
from tests.system.harness.server import ROOT, Server, kill, serving, stopped

pytestmark = pytest.mark.e2e

ASSETS = ROOT / "server/protocols/console/assets"
FLAGS = ("--num-threads", "1", "--max-slots", "4", "--http-admin", "true")
TOKENS = {name: {"Authorization": f"Bearer {name}-s"} for name in ("alice", "bob", "anna", "bert", "wrong")} | {"nobody": {}}
ALICE, BOB, ANNA = TOKENS["alice"], TOKENS["bob"], TOKENS["anna"]
MAX_VIEWERS, MAX_VIEWERS_PER_CALLER = 16, 4


# Callers and operators, one of each for some models only.
PEOPLE: dict[str, Any] = {
    "callers": '[callers.alice]\ntoken = "alice-s"\n[callers.bob]\ntoken = "bob-s"\nmodels = ["beta"]\n',
    "operators": '[callers.anna]\ntoken = "anna-s"\n[callers.bert]\ntoken = "bert-s"\nmodels = ["other"]\n',
}


@asynccontextmanager
async def watching(session: ClientSession, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[Any]]:
    async with session.get("/console/engine", headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        yield (view async for _, view in events(response))


async def until(views: AsyncIterator[Any], condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async for view in views:
        models = {model["name"]: model for model in view["models"]}
        if condition(models):
            return models
    raise AssertionError("the views ended before")


def generate(session: ClientSession, model: str, **fields: Any) -> Awaitable[Any]:
    message = {"model": model, "text": "a dog runs", "maxNewTokens": 900, **fields}
    return session.post("/v1/generate", json=message, headers=ALICE)


@pytest.mark.parametrize("topology", [("--replicas", "2"), ("--front-ends", "2")], ids=["replicas", "frontends"])
async def test_requests_are_seen_to_come_to_grow_and_to_end(endless: Path, topology: tuple[str, ...]) -> None:
    with serving(endless, *FLAGS, *topology, **PEOPLE) as server:
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            session = await stack.enter_async_context(ClientSession(server.http_address))
            views = await stack.enter_async_context(watching(session, ALICE))
            models = await until(views, lambda models: all(one["state"] == "serving" for one in models.values()))
            num_slots = 4 * server.num_engines
            for model in models.values():
                assert (model["numSlots"], model["slots"], model["rowsPerStep"]) == (num_slots, [], None)
                assert (model["isDefault"], model["device"], model["precision"]) == (True, "cpu", "fp32")
            calls = [generate(session, "alpha", numBeams=2), *(generate(session, "beta") for _ in range(10))]
            sent = [asyncio.ensure_future(call) for call in calls]
            models = await until(views, lambda models: len(models["alpha"]["slots"]) == 2 and len(models["beta"]["slots"]) >= 4)
            first, second = models["alpha"]["slots"]
            assert first["request"] == second["request"] and first["slot"] != second["slot"]
            assert (first["state"], first["maxNewTokens"]) == ("decode", 900) and first["numSourceTokens"] > 2
            slots = [(slot["engine"], slot["slot"]) for slot in models["beta"]["slots"]]
            assert len(set(slots)) == len(slots) and models["beta"]["callers"][0]["name"] == "alice"
            before = {slot["request"]: slot["numTokens"] for slot in models["beta"]["slots"]}

            def have_grown(models: dict[str, Any]) -> bool:
                now = {slot["request"]: slot["numTokens"] for slot in models["beta"]["slots"]}
                return any(now.get(request, 0) > count + 10 for request, count in before.items())

            beta = (await until(views, have_grown))["beta"]
            assert beta["stepsPerSecond"] > 0 < beta["tokensPerSecond"] and beta["stepSeconds"] > 0
            assert 0 < beta["rowsPerStep"] <= 4 and beta["cacheBytesReserved"] > 0
            await until(views, lambda models: models["beta"]["numWaiting"] > 0)
            assert [answer.status for answer in await asyncio.gather(*sent)] == [200] * 11
            await until(views, lambda models: not any(one["slots"] or one["callers"] for one in models.values()))
        assert not server.problems() and server.terminate() == 0


async def test_callers_see_their_models_and_names_are_for_operators(endless: Path) -> None:
    with serving(endless, *FLAGS, **PEOPLE) as server:
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            session = await stack.enter_async_context(ClientSession(server.http_address))
            sent = asyncio.ensure_future(generate(session, "beta"))
            both = {"alpha", "beta"}
            for headers, name, models in ((ANNA, "alice", both), (ALICE, "alice", both), (BOB, "", {"beta"})):
                async with watching(session, headers) as views:
                    found = await until(views, lambda models: bool(models["beta"]["callers"]))
                    assert [one["name"] for one in found["beta"]["callers"]] == [name] and set(found) == models
                async with session.get("/console/models", headers=headers) as response:
                    described = (await response.json())["models"]
                assert {one["model"]["name"] for one in described} == models
            async with watching(session, TOKENS["bert"]) as views:
                assert (await anext(views))["models"] == []
            for path in ("/console/engine", "/console/models"):
                for headers in ({}, TOKENS["wrong"]):
                    async with session.get(path, headers=headers) as response:
                        assert response.status == 401
            for _ in range(MAX_VIEWERS_PER_CALLER):
                await anext(await stack.enter_async_context(watching(session, BOB)))
            async with session.get("/console/engine", headers=BOB) as response:
                assert (response.status, (await response.json())["message"].split(":")[0]) == (429, "viewers")
                assert int(response.headers["Retry-After"]) > 0
            async with watching(session, ALICE) as views:
                await anext(views)
            assert (await sent).status == 200
            async with session.get("/v1/models/beta", headers=ALICE) as response:
                native = await response.json()
            [beta] = [one for one in described if one["model"]["name"] == "beta"]
            assert beta["model"].items() <= native.items()
            assert beta["parity"]["numRows"] > 0 and beta["quality"] is beta["card"] is None
            limits = {"maxSourceTokens": 64, "maxSlots": 4, "maxSlotsPerRequest": 4, "maxPriority": None}
            assert beta["limits"] == limits | {"maxTargetTokens": native["maxTargetTokens"]}
            assert re.fullmatch("[0-9a-f]{64}", beta["origin"]["weightsSha256"])
        check_files(server)


def check_files(server: Server) -> None:
    def get(path: str, **headers: str) -> requests.Response:
        return requests.get(server.http_address + path, headers=headers, timeout=60)

    page = get("/")
    assert page.headers["Content-Type"].startswith("text/html") and "default-src" in page.headers["Content-Security-Policy"]
    assert (page.headers["X-Content-Type-Options"], page.headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert f'name="grpc-port" content="{server.address.rpartition(":")[2]}"' in page.text
    assert {"console.js", "console.css"} <= set(re.findall(r'(?:src|href)="/console/assets/([^"]+)"', page.text))
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for file in ASSETS.iterdir():
        if file.name != "index.html":
            asset = get(f"/console/assets/{file.name}")
            assert asset.content == file.read_bytes() and asset.headers["Content-Type"].startswith(kinds[file.suffix[1:]])
    for path in ("/", "/console/assets/console.js"):
        tag = get(path).headers["ETag"]
        assert get(path).headers["Cache-Control"] == "no-cache"
        same = get(path, **{"If-None-Match": f'"other", {tag}'})
        assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", tag)
        assert get(path, **{"If-None-Match": '"other"'}).status_code == 200
        assert requests.head(server.http_address + path, timeout=60).status_code == 200
    sizes, tags = [], []
    for encodings in ("gzip, br", "identity", "br, gzip;q=1.0", "gzip;q=0, identity"):
        style = get("/console/assets/console.css", **{"Accept-Encoding": encodings})
        assert style.content == (ASSETS / "console.css").read_bytes() and style.headers["Vary"] == "Accept-Encoding"
        sizes.append(int(style.headers["Content-Length"]))
        tags.append(style.headers["ETag"])
    assert sizes[0] < sizes[1] / 2 and tags[0] != tags[1] and (sizes[2:], tags[2:]) == (sizes[:2], tags[:2])
    for name in ("index.html", "page.py", "..%2Fpage.py", "%2e%2e%2f%2e%2e%2fserver.py", "%2Fetc%2Fpasswd", "console.js%00"):
        missing = get(f"/console/assets/{name}")
        assert (missing.status_code, missing.json()["code"]) == (404, 5), name


def test_the_files_have_no_address_of_another_host_and_no_markup_from_data() -> None:
    for path in ASSETS.iterdir():
        text = path.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), path.name
    page = (ASSETS / "index.html").read_text()
    assert not re.findall(r"<style|\sstyle=|\son\w+=", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]


async def test_views_go_on_while_engines_are_killed_and_operators_change_models(endless: Path) -> None:
    with serving(endless, *FLAGS, **PEOPLE) as server:
        async with asyncio.timeout(120), ClientSession(server.http_address) as session, watching(session, ANNA) as views:

            async def change(verb: str, headers: dict[str, str] = ANNA, **message: str) -> tuple[int, Any]:
                async with session.post(f"/v1/repository/models/alpha:{verb}", json=message, headers=headers) as response:
                    return response.status, await response.json()

            await until(views, lambda models: all(one["state"] == "serving" for one in models.values()))
            kill(*server.engines())
            await until(views, lambda models: all(one["state"] == "starting" for one in models.values()))
            async with session.get("/health") as response:
                assert (response.status, await response.json()) == (503, {"error": "the server is not ready"})
            await until(views, lambda models: all(one["state"] == "serving" for one in models.values()))
            assert (await change("unload"))[1]["isReady"] is False
            assert set(await until(views, lambda models: "alpha" not in models)) == {"beta"}
            assert (await change("load", version="nine"))[0] == 404
            assert (await change("load"))[1]["isReady"] is True
            await until(views, lambda models: set(models) == {"alpha", "beta"})
            sent = asyncio.ensure_future(generate(session, "beta"))
            await until(views, lambda models: len(models["beta"]["slots"]) == 1)
            assert (await sent).status == 200
            with stopped(*server.engines()):  # so that the drain waits for a request until the last view has come
                sent = asyncio.ensure_future(generate(session, "beta"))
                await asyncio.to_thread(server.wait_for_metric, 1, "dragoman_caller_requests_running", caller="alice")
                async with watching(session, ALICE) as seen:
                    await anext(seen)
                    server.process.terminate()
                    ends = [view["isDraining"] async for view in seen]
            assert ends[-1] and sum(ends) == 1 and (await sent).status == 200
        assert server.wait() == 0


def test_operators_alone_change_versions_over_http(models: ModelFolder) -> None:
    models.put("alpha", "1", "one")
    models.put("alpha", "2", "two")
    models.put("beta", "1", "other")
    models.say("alpha", "[swap]\nprobation_seconds = 0\n")
    with serving(models.path, *FLAGS, "--front-ends", "2", **PEOPLE) as server:
        root = f"{server.http_address}/v1/repository"

        def change(path: str, who: str = "anna", **message: str) -> tuple[int, Any]:
            response = requests.post(f"{root}{path}", json=message, headers=TOKENS[who], timeout=120)
            return response.status_code, response.json()

        def listed(who: str = "anna") -> tuple[int, Any]:
            response = requests.get(root, headers=TOKENS[who], timeout=60)
            return response.status_code, response.json()

        status, found = listed()
        [alpha, _] = found["models"]
        states = [(one["name"], one["state"]) for one in alpha["versions"]]
        assert (status, alpha["isReady"], states) == (200, True, [("2", "VERSION_STATE_SERVING"), ("1", "VERSION_STATE_FOUND")])
        for verb, message, field, expected in (
            ("load", {"version": "1"}, "loaded", ["1"]),
            ("label", {"label": "old", "version": "1"}, "labels", {"old": "1"}),
            ("rollback", {"version": "1"}, "pinned", "1"),
            ("unload", {"version": "1"}, "unloaded", ["1"]),
            ("load", {"model": "alpha"}, "unloaded", []),
        ):
            assert change(f"/models/alpha:{verb}", **message)[1]["requested"][field] == expected
        assert change("/models/alpha:reload")[1]["isReady"] and change(":refresh")[0] == 200
        for path, message, expected in (
            ("/models/alpha:load", {"version": "9"}, (404, 5)),
            ("/models/nobody:load", {}, (404, 5)),
            (f"/models/{'m' * 500}:load", {}, (400, 3)),
            ("/models/alpha:load", {"model": "another"}, (400, 3)),
            ("/models/alpha:load", {"verion": "1"}, (400, 3)),
            ("/models/alpha:destroy", {}, (404, 5)),
        ):
            status, answer = change(path, **message)
            assert (status, answer.get("code")) == expected, (path, answer)
        for who in ("nobody", "alice", "wrong"):
            assert listed(who)[0] == change("/models/alpha:unload", who)[0] == change(":refresh", who)[0] == 401
        assert listed("bert")[1]["models"] == [] and change("/models/alpha:reload", "bert")[0] == 404
        generate = requests.post(f"{server.http_address}/v1/generate", json={"text": "a"}, headers=ANNA, timeout=60)
        assert generate.status_code == 401, "an operator is no caller"
        for who, verb, body, expected, reason in (
            ("nobody", "unload", {}, 401, "token"),
            ("bert", "unload", {}, 404, "alpha"),
            ("anna", "unload", {"parameters": {"force": True}}, 400, "parameters: "),
            ("anna", "load", {"parameters": {"config": "{}"}}, 400, "parameters: "),
            ("anna", "load", {"config": "{}"}, 400, "body: "),
            ("anna", "load", None, 200, None),
            ("anna", "unload", {"parameters": {"unload_dependents": False}}, 200, None),
        ):
            url = f"{server.http_address}/v2/repository/models/alpha/{verb}"
            response = requests.post(url, json=body, headers=TOKENS[who], timeout=120)
            assert response.status_code == expected, response.text
            assert response.text == "" if reason is None else reason in json.loads(response.text)["error"]
        assert listed()[1]["models"][0]["requested"]["isUnloaded"] is True


def test_console_operators_and_detection_may_be_absent(translators: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['py3langid'] = None")
    without_detection = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with serving(translators, "--console", "false", environment=without_detection, **PEOPLE) as server:

        def post(path: str, message: Any, headers: dict[str, str] = ALICE) -> requests.Response:
            return requests.post(server.http_address + path, json=message, headers=headers, timeout=60)

        for path in ("/", "/console/assets/console.js", "/console/engine", "/console/models"):
            assert requests.get(server.http_address + path, headers=ALICE, timeout=60).status_code == 404
        for path in ("/v1/repository/models/alpha:unload", "/v1/repository:refresh"):
            assert post(path, {}, ANNA).status_code == 404
        translated = post("/translate", {"q": "a", "source": "auto", "target": "de"}).json()
        assert translated["detectedLanguage"] == {"confidence": 0.0, "language": "en"}, "there is one source only"
        detected = post("/detect", {"q": "a"})
        assert detected.status_code == 400 and detected.json()["error"].startswith("source: languages are not detected here")


async def test_viewers_are_limited(shared_server: Server) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        session = await stack.enter_async_context(ClientSession(shared_server.http_address))
        for _ in range(MAX_VIEWERS):
            await anext(await stack.enter_async_context(watching(session, {})))
        async with session.get("/console/engine") as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "5")
