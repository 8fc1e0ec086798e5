"""The admin service on its own port: who may use it, what refusals look like, and its end; over real gRPC, models on a stage."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.operators import Operators
from dragoman.server.repository import keeper as keeper_module
from dragoman.server.repository import loader, model_keeper
from dragoman.server.repository.keeper import Keeper
from dragoman.server.repository.model_file import ModelFile, Swap
from dragoman.server.repository.versions import Cause, Refused, State
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1 import generation_pb2, repository_pb2
from dragoman.v1.generation_pb2_grpc import GenerationStub
from dragoman.v1.repository_pb2_grpc import RepositoryStub
from tests.server.repository.staged import MODEL, Stage

TOKENS = """
[callers.anna]
token = "anna-s"
[callers.bert]
token = "bert-s"
models = ["fr-en"]
[callers.past]
token = "past-s"
expires = 2020-01-01T00:00:00Z
"""
Code = grpc.StatusCode


@dataclass
class World:
    """A running admin service."""

    operators: Operators
    stage: Stage
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return RepositoryStub(self.channel)


def operators_of(stage: Stage, folder: Path, **settings: Any) -> Operators:
    config = ServerConfig(models=folder, **{"admin_port": 0, **settings})
    keeper: Keeper[Any] = Keeper(folder, [stage.found], lambda _: stage.keeper, 0.0)
    metrics = Metrics(CollectorRegistry(), config.latency_buckets)
    return Operators(config, keeper, metrics, CallerMetrics(CollectorRegistry()))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: Any) -> Callable[..., Any]:
    monkeypatch.setattr(model_keeper, "WATCH_SECONDS", 0.002)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.001)

    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[World]:
        stage = Stage("1", "2", file=ModelFile(swap=Swap(probation_seconds=0)))
        monkeypatch.setattr(keeper_module, "scan", lambda *_: [stage.found])
        operators = operators_of(stage, tmp_path, **settings)
        async with stage.led():
            await operators.start()
            operators.begin()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{operators.port}") as channel:
                    yield World(operators, stage, channel)
            finally:
                await operators.end()
                assert operators._server is not None
                await operators._server.stop()

    return serving


async def failure(call: Any) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "operators.toml"
    path.write_text(TOKENS)
    return path


def test_every_call_is_answered_with_how_the_model_is(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            stub = world.stub
            listed = await stub.ListRepository(repository_pb2.ListRepositoryRequest())
            [model] = listed.models
            assert (model.name, model.is_ready, [version.name for version in model.versions]) == (MODEL, True, ["2", "1"])
            assert [version.state for version in model.versions] == [
                repository_pb2.VERSION_STATE_SERVING,
                repository_pb2.VERSION_STATE_FOUND,
            ]
            two = model.versions[0]
            assert (two.share, two.is_default, two.version) == (1.0, True, "000000000002") and two.since > 1e9
            model = await stub.LoadModel(repository_pb2.LoadModelRequest(model=MODEL, version="1"))
            assert list(model.requested.loaded) == ["1"]
            model = await stub.SetLabel(repository_pb2.SetLabelRequest(model=MODEL, label="old", version="1"))
            assert dict(model.requested.labels) == {"old": "1"} and list(model.versions[1].labels) == ["old"]
            model = await stub.RollbackModel(repository_pb2.RollbackModelRequest(model=MODEL, version="1"))
            assert model.requested.pinned == "1" and model.versions[-1].is_default
            model = await stub.UnloadModel(repository_pb2.UnloadModelRequest(model=MODEL, version="1"))
            assert list(model.requested.unloaded) == ["1"] and list(model.problems) == ["labels.old: version '1' was unloaded"]
            model = await stub.UnloadModel(repository_pb2.UnloadModelRequest(model=MODEL))
            assert model.requested.is_unloaded and not model.is_ready
            await stub.LoadModel(repository_pb2.LoadModelRequest(model=MODEL))
            assert (await stub.ReloadModel(repository_pb2.ReloadModelRequest(model=MODEL))).is_ready
            refreshed = await stub.RefreshRepository(repository_pb2.RefreshRepositoryRequest())
            assert [one.name for one in refreshed.models] == [MODEL] and refreshed.problem == ""

    asyncio.run(run())


def test_names_of_folders_that_are_no_text_are_told(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            name = "mod\udcff"
            world.stage.keeper.name = name
            problem = f"models/{name}: cannot be read"
            world.stage.keeper.find(replace(world.stage.found, problem=problem, left_out=(f"{name} é",)))
            [model] = (await world.stub.ListRepository(repository_pb2.ListRepositoryRequest())).models
            assert model.name == r"mod\udcff"
            assert list(model.problems) == [r"models/mod\udcff: cannot be read", r"mod\udcff é"]

    asyncio.run(run())


def test_a_refused_version_is_told_with_cause_and_reason(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.stage.fail("prove", "1", Refused(Cause.PROOF, "another answer"))
            told = await failure(world.stub.LoadModel(repository_pb2.LoadModelRequest(model=MODEL, version="1")))
            assert told == (Code.FAILED_PRECONDITION, "version 1 is refused: another answer")
            [model] = (await world.stub.ListRepository(repository_pb2.ListRepositoryRequest(model=MODEL))).models
            refused = model.versions[1]
            assert (refused.state, refused.cause, refused.reason) == (
                repository_pb2.VERSION_STATE_REFUSED,
                "proof",
                "another answer",
            )

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"model": "de-en"}, Code.NOT_FOUND, 'model: "de-en" is not there; there: en-de'),
        ({}, Code.NOT_FOUND, 'model: "" is not there; there: en-de'),
        ({"model": MODEL, "version": "9"}, Code.NOT_FOUND, 'version: "9" is not there; there: 2, 1'),
        ({"model": "x" * 60_000}, Code.INVALID_ARGUMENT, "model: 60000 characters; at most 128 are allowed"),
        ({"model": MODEL, "version": "x" * 129}, Code.INVALID_ARGUMENT, "version: 129 characters; at most 128 are allowed"),
        ({"model": "x" * 70_000}, Code.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (70004 vs. 65536)"),
    ],
)
def test_what_cannot_be_done_is_a_status_with_the_reason(serve: Any, fields: dict[str, str], code: Code, message: str) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await failure(world.stub.UnloadModel(repository_pb2.UnloadModelRequest(**fields))) == (code, message)
            assert world.stage.serving == "2"

    asyncio.run(run())


def test_a_message_that_cannot_be_read_is_refused(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            call = world.channel.unary_unary("/dragoman.v1.Repository/UnloadModel")(b"\x0a\x01\xff")
            code, message = await failure(call)
            assert code is Code.INVALID_ARGUMENT and "cannot be parsed" in message

    asyncio.run(run())


def test_a_deadline_ends_the_wait_and_not_the_change(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            gate = world.stage.hold("start", "1")
            call = world.stub.RollbackModel(repository_pb2.RollbackModelRequest(model=MODEL, version="1"), timeout=0.3)
            assert (await failure(call))[0] is Code.DEADLINE_EXCEEDED
            gate.set()
            await world.stage.until(lambda: world.stage.serving == "1")

    asyncio.run(run())


@pytest.mark.parametrize("token", ["", "wrong", "anna-s ", "past-s"])
@pytest.mark.parametrize("method", ["ListRepository", "UnloadModel", "Nothing"])
def test_nobody_without_a_token_gets_anywhere(serve: Any, tokens: Path, token: str, method: str) -> None:
    async def run() -> None:
        async with serve(admin_tokens_file=tokens) as world:
            request = repository_pb2.UnloadModelRequest(model=MODEL).SerializeToString()
            call = world.channel.unary_unary(f"/dragoman.v1.Repository/{method}")
            code, _ = await failure(call(request, metadata=bearer(token) if token else ()))
            is_known = token == "past-s" and method == "Nothing"
            assert code is (Code.UNIMPLEMENTED if is_known else Code.UNAUTHENTICATED)
            assert world.stage.serving == "2"

    asyncio.run(run())


def test_operators_see_and_change_their_models_only(serve: Any, tokens: Path, logged: Any) -> None:
    async def run() -> None:
        async with serve(admin_tokens_file=tokens) as world:
            stub, unload = world.stub, repository_pb2.UnloadModelRequest(model=MODEL, version="2")
            listed = await stub.ListRepository(repository_pb2.ListRepositoryRequest(), metadata=bearer("bert-s"))
            assert list(listed.models) == []
            told = await failure(stub.UnloadModel(unload, metadata=bearer("bert-s")))
            assert told == (Code.NOT_FOUND, 'model: "en-de" is not there; there: none')
            await stub.UnloadModel(unload, metadata=bearer("anna-s"))
            assert world.stage.serving == "1"

    asyncio.run(run())
    made = [line for line in logged() if line["event"] == "a change is made"]
    assert [(line["by"], line["change"], line["caller"]) for line in made] == [("anna", "unload", "anna")]
    assert all(line["request_id"] for line in made)
    calls = [(line["method"], line["code"], line.get("caller")) for line in logged() if line["event"] == "call"]
    assert ("/dragoman.v1.Repository/UnloadModel", "OK", "anna") in calls
    assert ("/dragoman.v1.Repository/UnloadModel", "NOT_FOUND", "bert") in calls


def test_tokens_that_change_are_taken_up(serve: Any, tokens: Path) -> None:
    async def run() -> None:
        async with serve(admin_tokens_file=tokens) as world:
            [source] = list(world.operators.sources())
            assert (source.name, source.paths) == ("operators", (tokens,))
            tokens.write_text('[callers.carl]\ntoken = "carl-s"')
            source.use(source.load())
            request = repository_pb2.ListRepositoryRequest()
            assert (await failure(world.stub.ListRepository(request, metadata=bearer("anna-s"))))[0] is Code.UNAUTHENTICATED
            assert (await world.stub.ListRepository(request, metadata=bearer("carl-s"))).models

    asyncio.run(run())


def test_the_port_serves_nothing_else(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            call = GenerationStub(world.channel).Generate(generation_pb2.GenerateRequest(text="a"))
            assert (await failure(call))[0] is Code.UNIMPLEMENTED

    asyncio.run(run())


def test_who_waits_when_the_server_ends_is_told_so(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.stage.hold("start", "1")
            waiting = world.stub.LoadModel(repository_pb2.LoadModelRequest(model=MODEL, version="1"))
            await world.stage.until(lambda: ("start", "1") in world.stage.told)
            world.operators.drain()
            assert await failure(waiting) == (Code.UNAVAILABLE, "the server is shutting down")
            call = world.stub.ListRepository(repository_pb2.ListRepositoryRequest())
            assert await failure(call) == (Code.UNAVAILABLE, "the server is shutting down")

    asyncio.run(run())


def test_there_is_no_port_where_none_is_set(tmp_path: Path) -> None:
    async def run() -> None:
        operators = operators_of(Stage("1"), tmp_path, admin_port=None)
        await operators.start()
        assert operators.port is None and list(operators.sources()) == []
        await operators.end()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "admin_tokens_file: {path} holds no token"),
        ("a b", "admin_tokens_file: {path}, line 1: a token is printable ASCII without spaces"),
        ("[callers.anna]\ntoken = 's'\nmodel = 1", "admin_tokens_file: {path}: callers.anna.model: unknown key"),
        (
            "[callers.anna]\ncertificates = ['x']",
            "admin_tokens_file: {path}: callers.anna.certificates is set, and tls_client_ca is not",
        ),
    ],
)
def test_a_file_of_operators_that_cannot_be_used_ends_the_start(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "operators"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        operators_of(Stage("1"), tmp_path, admin_tokens_file=path)
    assert str(caught.value) == message.format(path=path)


def test_a_port_that_is_taken_is_named(serve: Any, tmp_path: Path) -> None:
    async def run() -> None:
        async with serve() as world:
            second = operators_of(Stage("1"), tmp_path, admin_port=world.operators.port)
            with pytest.raises(ConfigError, match=r"^admin_port: cannot listen on 127\.0\.0\.1:\d+"):
                await second.start()

    asyncio.run(run())


def test_the_service_speaks_the_servers_tls(serve: Any, certificates: Path) -> None:
    async def run() -> None:
        files = {"tls_certificate": certificates / "server.pem", "tls_key": certificates / "server.key"}
        async with serve(**files) as world:
            assert [source.name for source in world.operators.sources()] == ["admin_tls"]
            credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
            options = [("grpc.ssl_target_name_override", "server.example")]
            async with grpc.aio.secure_channel(f"127.0.0.1:{world.operators.port}", credentials, options) as channel:
                assert (await RepositoryStub(channel).ListRepository(repository_pb2.ListRepositoryRequest())).models
            assert (await failure(world.stub.ListRepository(repository_pb2.ListRepositoryRequest())))[0] is Code.UNAVAILABLE

    asyncio.run(run())


def test_every_state_has_a_word_in_the_contract() -> None:
    names = {name.removeprefix("VERSION_STATE_").lower() for name in dict(repository_pb2.VersionState.items())}
    assert names >= {"unspecified", "found", *(state.value for state in State)}
