import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dragoman.server.faces.grpc.tls import peer_names
from tests.certificates import make_certificates, openssl

NAMES = {
    "server": "DNS:localhost,IP:127.0.0.1",
    "many": "email:ops@example.org,IP:10.0.0.1,URI:spiffe://example.org/web,DNS:web.example.org,DNS:www.example.org",
    "address": "IP:10.0.0.1",
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority and what it signs, with one certificate, `plain`, that has no alternative names."""
    folder = make_certificates(tmp_path_factory.mktemp("tls"), NAMES)
    openssl(folder, "req", "-new", "-key", "many.key", "-subj", "/CN=plain", "-out", "plain.csr")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(folder, "x509", "-req", "-in", "plain.csr", *signing, "-out", "plain.pem")
    return folder


async def seen_names(folder: Path, name: str, key: str) -> tuple[str, ...]:
    """Return the names that a real server sees of a client with this certificate."""
    seen: list[tuple[str, ...]] = []

    async def look(_: bytes, context: Any) -> bytes:
        seen.append(peer_names(context))
        return b""

    read = {file: (folder / file).read_bytes() for file in ("ca.pem", "server.key", "server.pem", f"{name}.pem", f"{key}.key")}
    server = grpc.aio.server()
    handlers = {"Look": grpc.unary_unary_rpc_method_handler(look)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    pair = (read["server.key"], read["server.pem"])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], read["ca.pem"], require_client_auth=True))
    await server.start()
    credentials = grpc.ssl_channel_credentials(read["ca.pem"], read[f"{key}.key"], read[f"{name}.pem"])
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        await channel.unary_unary("/test/Look")(b"", timeout=10)
    await server.stop(None)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "key", "names"),
    [
        ("many", "many", ("web.example.org", "www.example.org", "spiffe://example.org/web", "ops@example.org")),
        ("plain", "many", ("plain",)),
        ("address", "address", ()),
    ],
)
def test_names_of_a_client_are_those_of_its_certificate(certificates: Path, name: str, key: str, names: tuple[str, ...]) -> None:
    assert asyncio.run(seen_names(certificates, name, key)) == names


def test_a_client_without_a_certificate_has_no_names() -> None:
    assert peer_names(SimpleNamespace(auth_context=lambda: {"security_level": [b"TSI_SECURITY_NONE"]})) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [b"", b"a\nb", b"a\0b", b"\xff"])
def test_names_that_nobody_can_read_are_left_out(name: bytes) -> None:
    shown = {"x509_subject_alternative_name": [name, b"good"], "peer_dns": [name, b"good"], "x509_common_name": [b"other"]}
    assert peer_names(SimpleNamespace(auth_context=lambda: shown)) == ("good",)  # type: ignore[arg-type]
