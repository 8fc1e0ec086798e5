"""A face that is not gRPC generates, streams, scores, fails and drains through the core alone, and is a small file."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.core.core import Core
from dragoman.server.errors import Unavailable
from dragoman.server.telemetry.metrics import Metrics
from tests.server.core import toy_face
from tests.server.scripted import LoadedModels, ScriptedEngine

ROOT = Path(__file__).resolve().parents[3]
TEXT, ANSWER = "A dog runs.", "Fußball 🐕 日本"


class Caller:
    """One connection to the face, and what a test asks of the server behind it."""

    def __init__(self, core: Core, registry: CollectorRegistry, reader: Any, writer: Any) -> None:
        self.core, self.registry, self.reader, self.writer = core, registry, reader, writer

    @property
    def engine(self) -> ScriptedEngine:
        engine: ScriptedEngine = self.core.models.all()[0].engine  # type: ignore[assignment]
        return engine

    def send(self, do: str, **fields: Any) -> None:
        deadline = fields.pop("deadline_seconds", None)
        self.writer.write(json.dumps({"do": do, "request": fields, "deadline_seconds": deadline}).encode() + b"\n")

    async def read(self) -> Any:
        return json.loads(await asyncio.wait_for(self.reader.readline(), 10))

    async def ask(self, do: str, **fields: Any) -> Any:
        self.send(do, **fields)
        return await self.read()

    async def refusal(self, do: str, **fields: Any) -> Any:
        """Send, and return the error; pieces that came before it do not count."""
        line = await self.ask(do, **fields)
        while "error" not in line:
            line = await self.read()
        return line["error"]

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"dragoman_{name}", {"model": "en-de", **labels}) or 0.0


Connect = Callable[[], AbstractAsyncContextManager[Caller]]


@pytest.fixture
def connect(make_model: Any, logged: Any) -> Connect:
    @asynccontextmanager
    async def connecting() -> AsyncIterator[Caller]:
        registry = CollectorRegistry()
        metrics = Metrics(registry, [1.0])
        metrics.add_model("en-de", "v7", "fp32", "cpu", 8)
        core = Core(LoadedModels(make_model()), metrics)
        face, serving = toy_face.ToyFace(core), asyncio.Event()
        server = await asyncio.start_server(lambda reader, writer: handle(face, reader, writer, serving), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield Caller(core, registry, reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()
            await asyncio.wait_for(serving.wait(), 10)
            server.close()
            assert core.num_running == 0

    return connecting


async def handle(face: toy_face.ToyFace, reader: Any, writer: Any, is_over: asyncio.Event) -> None:
    try:
        await face.serve(reader, writer)
        with suppress(ConnectionError):
            await writer.wait_closed()
    finally:
        is_over.set()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_it_generates(connect: Connect, logged: Any) -> None:
    async def run() -> None:
        async with connect() as caller:
            whole = await caller.ask("generate", text=TEXT, num_beams=2, num_return_sequences=2, deadline_seconds=30)
            assert whole["answers"][0]["text"] == ANSWER
            assert (len(whole["answers"]), whole["model"], whole["answers"][0]["finish_reason"]) == (2, "en-de", "eos")
            assert caller.engine.requests[0].deadline is not None
            assert (await caller.ask("generate", text=TEXT))["request_id"] != whole["request_id"]
            assert caller.count("request_success_total", finish_reason="eos") == 2
            lines = [line for line in logged() if line["event"] == "call"]
            assert (lines[0]["request_id"], lines[0]["model"], lines[0]["code"]) == (whole["request_id"], "en-de", "OK")
            assert len({line["request_id"] for line in lines}) == 2

    asyncio.run(run())


def test_it_streams(connect: Connect) -> None:
    async def run() -> None:
        async with connect() as caller:
            caller.send("stream", text=TEXT)
            pieces = [await caller.read()]
            while pieces[-1]["result"] is None:
                pieces.append(await caller.read())
            assert len(pieces) > 2
            assert "".join(piece["text"] for piece in pieces) == ANSWER == pieces[-1]["result"]["answers"][0]["text"]
            assert [token for piece in pieces for token in piece["tokens"]] == caller.engine.answer

    asyncio.run(run())


def test_it_scores(connect: Connect) -> None:
    async def run() -> None:
        async with connect() as caller:
            scores = await caller.ask("score", text=TEXT, target="Ein Hund läuft.")
            num_tokens = len(scores["tokens"])
            assert scores["score"] == pytest.approx(sum(-0.5 * i for i in range(num_tokens)) / num_tokens)
            assert caller.count("request_success_total", finish_reason="scored") == 1

    asyncio.run(run())


@pytest.mark.parametrize("do", ["generate", "stream", "score"])
def test_it_shows_errors_as_every_face_does(connect: Connect, logged: Any, do: str) -> None:
    async def run() -> None:
        async with connect() as caller:
            blank = await caller.refusal(do, text=" ")
            assert (blank["code"], blank["message"]) == ("INVALID_ARGUMENT", "text: is blank")
            lost = await caller.refusal(do, text=TEXT, model="nobody")
            assert (lost["code"], lost["message"]) == ("NOT_FOUND", "model: 'nobody' is not loaded; loaded: en-de")
            wrong = await caller.refusal(do, text=7)
            assert wrong["code"] == "INVALID_ARGUMENT" and wrong["message"].startswith("request: ")
            caller.engine.error = Unavailable("gone", retry_after_seconds=2.5)
            assert (await caller.refusal(do, text=TEXT))["retry_after_seconds"] == 2.5
            caller.engine.error = KeyError("secret internals")
            hidden = await caller.refusal(do, text=TEXT)
            [line] = [line for line in logged() if line["event"] == "unexpected exception"]
            assert hidden["message"] == f"internal error; quote incident {line['incident']}"
            assert caller.count("requests_failed_total", code="INVALID_ARGUMENT") == 1

    asyncio.run(run())


def test_a_line_that_is_no_json_is_refused_and_the_next_one_is_served(connect: Connect) -> None:
    async def run() -> None:
        async with connect() as caller:
            caller.writer.write(b"{\xff\n")
            assert (await caller.read())["error"]["message"].startswith("line: ")
            assert (await caller.ask("generate", text=TEXT))["answers"]

    asyncio.run(run())


@pytest.mark.parametrize("do", ["generate", "stream", "score"])
def test_a_caller_that_goes_away_frees_its_slot(connect: Connect, logged: Any, do: str) -> None:
    async def run() -> None:
        async with connect() as caller:
            caller.engine.hold()
            caller.send(do, text=TEXT)
            await asyncio.wait_for(caller.engine.arrived.wait(), 10)
            caller.writer.close()
            await eventually(lambda: caller.engine.cancelled == [1])
            await eventually(lambda: caller.core.num_running == 0)
            assert caller.count("requests_failed_total", code="CANCELLED") == 1
            assert [line["code"] for line in logged() if line["event"] == "call"] == ["CANCELLED"]

    asyncio.run(run())


def test_it_drains_with_the_others(connect: Connect) -> None:
    async def run() -> None:
        async with connect() as caller:
            told: list[bool] = []

            async def tell() -> None:
                told.append(caller.core.is_ready)

            caller.engine.hold()
            caller.send("generate", text=TEXT)
            await asyncio.wait_for(caller.engine.arrived.wait(), 10)
            draining = asyncio.create_task(caller.core.drain(10, tell))
            await eventually(lambda: told == [False])
            caller.engine.gate.set()
            assert (await caller.read())["answers"]
            assert await draining
            error = await caller.refusal("generate", text=TEXT)
            assert (error["code"], error["message"]) == ("UNAVAILABLE", "the server is shutting down")

    asyncio.run(run())


def test_what_outlasts_the_drain_is_told_so(connect: Connect) -> None:
    async def run() -> None:
        async with connect() as caller:
            caller.engine.hold()
            caller.send("generate", text=TEXT)
            await asyncio.wait_for(caller.engine.arrived.wait(), 10)
            await caller.core.end_calls()
            assert (await caller.read())["error"]["code"] == "UNAVAILABLE"
            assert caller.engine.cancelled == [1]

    asyncio.run(run())


def test_it_is_a_small_file_and_loads_no_grpc() -> None:
    assert len(Path(toy_face.__file__).read_text().splitlines()) < 100
    code = "import sys, tests.server.core.toy_face; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("grpc", "google.", "dragoman.v1", "dragoman.server.faces"))]
