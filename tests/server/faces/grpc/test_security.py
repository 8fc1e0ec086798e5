import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.faces.tls_files import TlsFiles
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.certificates import make_certificates, openssl


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# who may call\n\nweb:s3cret\nlonely\n")
    return path


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", "s3cret"),),
        (("authorization", "Basic s3cret"),),
        (("authorization", "Bearer web:s3cret"),),
        (("authorization", "Bearer s3cret "),),
        (("authorization", "Bearer wrong"), ("authorization", "Bearer s3cret")),
    ],
)
def test_call_without_a_known_token_is_unauthenticated(serve: Any, logged: Any, tokens: Path, metadata: Any) -> None:
    async def run() -> None:
        async with serve(auth_tokens_file=tokens) as world:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await world.stub.Generate(GenerateRequest(text="a"), metadata=metadata)
            assert world.engine.requests == []
            assert world.records() == {("", "UNAUTHENTICATED"): 1}
            assert "s3cret" not in str(logged())

    asyncio.run(run())


@pytest.mark.parametrize(("token", "caller"), [("s3cret", "web"), ("lonely", "line 4")])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_known_token_is_served_and_its_name_logged(
    serve: Any, logged: Any, tokens: Path, token: str, caller: str, scheme: str
) -> None:
    async def run() -> None:
        async with serve(auth_tokens_file=tokens) as world:
            metadata = (("authorization", f"{scheme} {token}"),)
            assert (await world.stub.Generate(GenerateRequest(text="a"), metadata=metadata)).text
            [_ async for _ in world.stub.GenerateStream(GenerateRequest(text="a"), metadata=metadata)]
            assert [line["caller"] for line in logged() if line["event"] == "call"] == [caller] * 2
            assert token not in str([line for line in logged() if line["event"] == "call"]).replace(caller, "")

    asyncio.run(run())


def test_every_rpc_but_health_needs_a_token(serve: Any, tokens: Path) -> None:
    async def run() -> None:
        async with serve(auth_tokens_file=tokens) as world:

            async def requests() -> Any:
                yield ServerReflectionRequest(list_services="")

            calls = [
                world.stub.GenerateStream(GenerateRequest(text="a")).read(),
                world.channel.unary_unary("/dragoman.v1.Generation/ListModels")(b""),
                world.channel.unary_unary("/dragoman.v1.Generation/GetModel")(b""),
                world.channel.unary_unary("/no.such.Service/Method")(b""),
                ServerReflectionStub(world.channel).ServerReflectionInfo(requests()).read(),
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                    await call
            status = await HealthStub(world.channel).Check(HealthCheckRequest())
            assert status.status == HealthCheckResponse.SERVING

    asyncio.run(run())


def test_tokens_in_the_clear_are_warned_about(serve: Any, logged: Any, tokens: Path) -> None:
    async def run() -> None:
        async with serve(auth_tokens_file=tokens):
            [line] = [line for line in logged() if line["level"] == "warning"]
            assert "unencrypted" in line["event"]

    asyncio.run(run())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority, and a server and a client certificate of it, valid from yesterday on."""
    names = dict.fromkeys(("server", "client"), "DNS:localhost,IP:127.0.0.1")
    folder = make_certificates(tmp_path_factory.mktemp("tls"), names)
    openssl(folder, "ec", "-in", "server.key", "-aes128", "-passout", "pass:word", "-out", "encrypted.key")
    return folder


def tls_settings(folder: Path, **others: Any) -> dict[str, Any]:
    return {"tls_certificate": folder / "server.pem", "tls_key": folder / "server.key"} | others


def credentials(folder: Path, *, with_client: bool = False) -> grpc.ChannelCredentials:
    authority = (folder / "ca.pem").read_bytes()
    if not with_client:
        return grpc.ssl_channel_credentials(authority)
    return grpc.ssl_channel_credentials(authority, (folder / "client.key").read_bytes(), (folder / "client.pem").read_bytes())


async def call(port: int, channel_credentials: grpc.ChannelCredentials) -> str:
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials) as channel:
        answer = await GenerationStub(channel).Generate(GenerateRequest(text="a"), timeout=10)
        return str(answer.text)


def test_tls_serves_those_who_trust_the_authority(serve: Any, certificates: Path) -> None:
    async def run() -> None:
        async with serve(**tls_settings(certificates)) as world:
            assert await call(world.server.port, credentials(certificates))
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await world.stub.Generate(GenerateRequest(text="a"), timeout=10)

    asyncio.run(run())


def test_client_certificate_is_required_where_an_authority_is_set(serve: Any, certificates: Path) -> None:
    async def run() -> None:
        async with serve(**tls_settings(certificates, tls_client_ca=certificates / "ca.pem")) as world:
            assert await call(world.server.port, credentials(certificates, with_client=True))
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call(world.server.port, credentials(certificates))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("setting", "file", "reason"),
    [
        ("tls_key", "client.key", "mismatch"),
        ("tls_key", "encrypted.key", "encrypted"),
        ("tls_key", "names", "tls_key"),
        ("tls_certificate", "names", "tls_certificate"),
        ("tls_client_ca", "names", "tls_client_ca"),
    ],
)
def test_unusable_tls_files_are_named(certificates: Path, tmp_path: Path, setting: str, file: str, reason: str) -> None:
    settings = tls_settings(certificates) | {setting: certificates / file}
    with pytest.raises(ConfigError, match=reason) as caught:
        TlsFiles.of(ServerConfig(models=tmp_path, **settings))
    assert str(certificates / file) in str(caught.value)


def test_no_certificate_means_no_credentials(tmp_path: Path) -> None:
    assert TlsFiles.of(ServerConfig(models=tmp_path)) is None
