"""The admin service on its own port, over real gRPC: its answers, statuses, tokens, TLS, and its end."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
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
from dragoman.v1 import generation_pb2
from dragoman.v1 import repository_pb2 as pb
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
LIST = pb.ListRepositoryRequest()


class World:
    """A running admin service."""

    def __init__(self, operators: Operators, stage: Stage, channel: grpc.aio.Channel) -> None:
        self.operators, self.stage, self.channel = operators, stage, channel
        self.stub: Any = RepositoryStub(channel)

    async def list(self, **options: Any) -> list[Any]:
        return list((await self.stub.ListRepository(LIST, **options)).models)


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
    return (("authorization", f"Bearer {token}"),) if token else ()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "operators.toml"
    path.write_text(TOKENS)
    return path


async def test_status_has_every_state_and_every_text(serve: Any) -> None:
    async with serve() as world:
        [model] = await world.list()
        assert (model.name, model.is_ready, [version.name for version in model.versions]) == (MODEL, True, ["2", "1"])
        assert [version.state for version in model.versions] == [pb.VERSION_STATE_SERVING, pb.VERSION_STATE_FOUND]
        two = model.versions[0]
        assert (two.share, two.is_default, two.version) == (1.0, True, "000000000002") and two.since > 1e9
        world.stage.fail("prove", "1", Refused(Cause.PROOF, "another answer"))
        told = await failure(world.stub.LoadModel(pb.LoadModelRequest(model=MODEL, version="1")))
        assert told == (Code.FAILED_PRECONDITION, "version 1 is refused: another answer")
        one = (await world.stub.ListRepository(pb.ListRepositoryRequest(model=MODEL))).models[0].versions[1]
        assert (one.state, one.cause, one.reason) == (pb.VERSION_STATE_REFUSED, "proof", "another answer")
        name = "mod\udcff"  # as file systems may call what is no text
        world.stage.keeper.name = name
        problem = f"models/{name}: cannot be read"
        world.stage.keeper.find(replace(world.stage.found, problem=problem, left_out=(f"{name} é",)))
        [model] = await world.list()
        assert model.name == r"mod\udcff" and list(model.problems) == [r"models/mod\udcff: cannot be read", r"mod\udcff é"]
    names = {name.removeprefix("VERSION_STATE_").lower() for name in dict(pb.VersionState.items())}
    assert names >= {"unspecified", "found", *(state.value for state in State)}


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"model": MODEL, "version": "9"}, Code.NOT_FOUND, 'version: "9" is not there; there: 2, 1'),
        ({"model": "x" * 60_000}, Code.INVALID_ARGUMENT, "model: 60000 characters; at most 128 are allowed"),
        ({"model": "x" * 70_000}, Code.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (70004 vs. 65536)"),
    ],
)
async def test_impossible_call_is_a_status_with_the_reason(serve: Any, fields: dict[str, str], code: Code, message: str) -> None:
    async with serve() as world:
        assert await failure(world.stub.UnloadModel(pb.UnloadModelRequest(**fields))) == (code, message)
        code, message = await failure(world.channel.unary_unary("/dragoman.v1.Repository/UnloadModel")(b"\x0a\x01\xff"))
        assert code is Code.INVALID_ARGUMENT and "cannot be parsed" in message
        call = GenerationStub(world.channel).Generate(generation_pb2.GenerateRequest(text="a"))
        assert (await failure(call))[0] is Code.UNIMPLEMENTED and world.stage.serving == "2"


async def test_operators_see_and_change_their_models_only_until_their_tokens_change(serve: Any, tokens: Path, logged: Any) -> None:
    async with serve(admin_tokens_file=tokens) as world:
        unload = pb.UnloadModelRequest(model=MODEL, version="2")
        for token, method in (("", "UnloadModel"), ("wrong", "Nothing"), ("past-s", "UnloadModel")):
            call = world.channel.unary_unary(f"/dragoman.v1.Repository/{method}")
            code, _ = await failure(call(unload.SerializeToString(), metadata=bearer(token)))
            assert code is Code.UNAUTHENTICATED and world.stage.serving == "2"
        assert await world.list(metadata=bearer("bert-s")) == []
        told = await failure(world.stub.UnloadModel(unload, metadata=bearer("bert-s")))
        assert told == (Code.NOT_FOUND, 'model: "en-de" is not there; there: none')
        await world.stub.UnloadModel(unload, metadata=bearer("anna-s"))
        assert world.stage.serving == "1"
        [source] = list(world.operators.sources())
        assert (source.name, source.paths) == ("operators", (tokens,))
        tokens.write_text('[callers.carl]\ntoken = "carl-s"')
        source.use(source.load())
        assert (await failure(world.stub.ListRepository(LIST, metadata=bearer("anna-s"))))[0] is Code.UNAUTHENTICATED
        assert await world.list(metadata=bearer("carl-s"))
        world.operators.drain()
        told = await failure(world.stub.ListRepository(LIST, metadata=bearer("carl-s")))
        assert told == (Code.UNAVAILABLE, "the server is shutting down")
    (made,) = [line for line in logged() if line["event"] == "a change is made"]
    assert (made["by"], made["change"], made["caller"]) == ("anna", "unload", "anna") and made["request_id"]
    calls = {(line["method"], line["code"], line.get("caller")) for line in logged() if line["event"] == "call"}
    assert {("/dragoman.v1.Repository/UnloadModel", *call) for call in (("OK", "anna"), ("NOT_FOUND", "bert"))} <= calls


async def test_port_is_optional_and_named_if_it_is_taken(serve: Any, tmp_path: Path) -> None:
    operators = operators_of(Stage("1"), tmp_path, admin_port=None)
    await operators.start()
    assert operators.port is None and list(operators.sources()) == []
    await operators.end()
    async with serve() as world:
        second = operators_of(Stage("1"), tmp_path, admin_port=world.operators.port)
        with pytest.raises(ConfigError, match=r"^admin_port: cannot listen on 127\.0\.0\.1:\d+"):
            await second.start()


async def test_service_uses_the_certificates_of_the_server(serve: Any, certificates: Path) -> None:
    async with serve(tls_certificate=certificates / "server.pem", tls_key=certificates / "server.key") as world:
        assert [source.name for source in world.operators.sources()] == ["admin_tls"]
        credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        options = [("grpc.ssl_target_name_override", "server.example")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{world.operators.port}", credentials, options) as channel:
            assert (await RepositoryStub(channel).ListRepository(LIST)).models
        assert (await failure(world.stub.ListRepository(LIST)))[0] is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", " holds no token"),
        ("[callers.anna]\ntoken = 's'\nmodel = 1", ": callers.anna.model: unknown key"),
        ("[callers.anna]\ncertificates = ['x']", ": callers.anna.certificates is set, and tls_client_ca is not"),
    ],
)
def test_unusable_file_of_operators_ends_the_start(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "operators"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        operators_of(Stage("1"), tmp_path, admin_tokens_file=path)
    assert str(caught.value) == f"admin_tokens_file: {path}{message}"
