"""Tokens and TLS on the metrics port, and both exchanged while it serves."""

import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry, make_wsgi_app

from dragoman.server.config import ConfigError, load
from dragoman.server.telemetry import admin as module
from dragoman.server.telemetry.admin import AdminServer
from dragoman.server.telemetry.admin_access import AdminAccess
from tests.certificates import make_certificates

NAMES = {"old": "IP:127.0.0.1", "new": "IP:127.0.0.1"}
Start = Callable[[AdminAccess], AdminServer]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(access: AdminAccess) -> AdminServer:
            return stack.enter_context(AdminServer("127.0.0.1", 0, make_wsgi_app(CollectorRegistry()), lambda: True, access))

        yield start


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("first:with-a-colon\n\n  second  \n")
    return path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"), NAMES)


def status(server: AdminServer, path: str = "/metrics", authorization: str | None = None) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
        response = connection.getresponse()
        response.read()
        if response.status == 401:
            assert response.headers["WWW-Authenticate"] == "Bearer"
        return response.status


def test_metrics_need_a_token_and_probes_do_not(start: Start, tokens: Path) -> None:
    server = start(AdminAccess(tokens=tokens))
    assert status(server) == 401
    assert status(server, authorization="Bearer first:with-a-colon") == 200
    assert status(server, authorization="bearer second") == 200
    assert status(server, "/healthz") == status(server, "/readyz") == 200
    assert status(server, "/readyz?verbose") == 401
    assert status(server, "/readyz?verbose", authorization="Bearer second") == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer secon",
        "Bearer second2",
        "Basic second",
        "second",
        "Bearer first",
        "Bearer \xff",
        "Bearer second x",
    ],
)
def test_other_tokens_are_refused(start: Start, tokens: Path, authorization: str) -> None:
    assert status(start(AdminAccess(tokens=tokens)), authorization=authorization) == 401


def test_every_printable_character_may_be_in_a_token(tmp_path: Path) -> None:
    token = "".join(map(chr, range(0x21, 0x7F)))
    (tmp_path / "tokens").write_text(token)
    access = AdminAccess(tokens=tmp_path / "tokens")
    assert access.admits(f"Bearer {token}")
    assert not access.admits(f"Bearer {token[:-1]}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no token"),
        (b"\n \n", "holds no token"),
        (b"good\ntwo words\n", "line 2: a token is printable ASCII without spaces"),
        ("schlüssel\n".encode(), "line 1: a token is printable ASCII without spaces"),
        (b"\xff\n", "not UTF-8"),
        (b"x" * 70_000, "more than 65536 bytes"),
    ],
)
def test_file_of_tokens_that_cannot_be_used_is_named_without_them(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        AdminAccess(tokens=path)
    assert str(caught.value).startswith(f"metrics_token_file: {path}") and reason in str(caught.value)
    assert "good" not in str(caught.value) and "words" not in str(caught.value)


def test_tokens_are_exchanged_and_bad_ones_change_nothing(start: Start, tokens: Path) -> None:
    server = start(AdminAccess(tokens=tokens))
    tokens.write_text("third")
    server.reload()
    assert status(server, authorization="Bearer second") == 401
    assert status(server, authorization="Bearer third") == 200
    tokens.write_text("")
    with pytest.raises(ConfigError, match="metrics_token_file"):
        server.reload()
    tokens.unlink()
    os.mkfifo(tokens)
    with pytest.raises(ConfigError, match="not a regular file"):
        server.reload()
    assert status(server, authorization="Bearer third") == 200
    assert status(server) == 401


def served(server: AdminServer, certificates: Path) -> bytes:
    """Return the certificate that the port shows to a client that trusts the authority, having asked over it."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as tls,
    ):
        shown = tls.getpeercert(binary_form=True) or b""
        tls.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert b"".join(iter(lambda: tls.recv(65536), b"")).startswith(b"HTTP/1.1 200 ")
        return shown


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_certificate_is_exchanged_and_a_bad_one_changes_nothing(start: Start, certificates: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def put(name: str) -> None:
        certificate.write_bytes((certificates / f"{name}.pem").read_bytes())
        key.write_bytes((certificates / f"{name}.key").read_bytes())

    put("old")
    server = start(AdminAccess(certificate, key))
    assert server.access.paths == (certificate, key)
    assert served(server, certificates) == der(certificates / "old.pem")
    certificate.write_bytes((certificates / "new.pem").read_bytes())
    with pytest.raises(ConfigError, match="metrics_tls_certificate, metrics_tls_key"):
        server.reload()
    assert served(server, certificates) == der(certificates / "old.pem")
    put("new")
    server.reload()
    assert served(server, certificates) == der(certificates / "new.pem")


def expiry(certificate: Path) -> float:
    """Return when openssl says that a certificate expires."""
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(certificate)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return ssl.cert_time_to_seconds(said.removeprefix("notAfter=").strip())


def test_expiry_is_that_of_the_certificate_in_use(certificates: Path, tokens: Path) -> None:
    access = AdminAccess(certificates / "old.pem", certificates / "old.key")
    assert access.expires == expiry(certificates / "old.pem")
    assert AdminAccess(tokens=tokens).expires is None
    with pytest.raises(ConfigError):
        AdminAccess(certificates / "old.pem", certificates / "new.key")


def test_expiry_follows_an_exchange(certificates: Path, tmp_path: Path) -> None:
    from tests.certificates import openssl

    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes((certificates / "old.pem").read_bytes())
    key.write_bytes((certificates / "old.key").read_bytes())
    access = AdminAccess(certificate, key)
    before = access.expires
    openssl(tmp_path, "x509", "-new", "-key", str(key), "-subj", "/CN=longer", "-days", "40", "-out", str(certificate))
    access.reload()
    assert access.expires == expiry(certificate) != before


def test_plain_http_and_broken_handshakes_get_no_answer_from_tls(start: Start, certificates: Path) -> None:
    server = start(AdminAccess(certificates / "old.pem", certificates / "old.key"))
    for first in (b"GET /metrics HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b""):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(first)
            client.shutdown(socket.SHUT_WR)
            assert b"HTTP" not in b"".join(iter(lambda: client.recv(65536), b""))
    assert served(server, certificates)


def test_handshakes_that_never_end_make_room(start: Start, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
    server = start(AdminAccess(certificates / "old.pem", certificates / "old.key"))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30)) for _ in range(20)]
        assert served(server, certificates)
        assert idle[0].recv(1) == b""


def test_encrypted_key_is_refused_and_nobody_is_asked(certificates: Path, tmp_path: Path) -> None:
    from tests.certificates import openssl

    openssl(tmp_path, "pkcs8", "-topk8", "-in", str(certificates / "old.key"), "-out", "key", "-passout", "pass:secret")
    with pytest.raises(ConfigError, match="the key is encrypted"):
        AdminAccess(certificates / "old.pem", tmp_path / "key")


def test_threads_end_with_the_server(certificates: Path) -> None:
    access = AdminAccess(certificates / "old.pem", certificates / "old.key")
    server = AdminServer("127.0.0.1", 0, make_wsgi_app(CollectorRegistry()), lambda: True, access)
    with socket.create_connection(("127.0.0.1", server.port)):
        server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "admin"]


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False), ("::1", False)])
def test_settings_are_put_to_use_and_a_token_in_plain_text_is_warned_about(tokens: Path, host: str, is_warned: bool) -> None:
    config = load({"models": "bundles", "metrics_token_file": tokens, "metrics_host": host})
    with structlog.testing.capture_logs() as lines:
        access = AdminAccess.of(config)
    assert access.admits("Bearer second") and not access.admits("") and access.paths == (tokens,)
    assert any("unencrypted" in line["event"] for line in lines) is is_warned


def test_certificate_of_the_settings_is_used_and_nothing_is_warned_about(tokens: Path, certificates: Path) -> None:
    names = {"metrics_tls_certificate": certificates / "old.pem", "metrics_tls_key": certificates / "old.key"}
    with structlog.testing.capture_logs() as lines:
        access = AdminAccess.of(load({"models": "bundles", "metrics_token_file": tokens} | names))
    assert access.context is not None and access.needs_token and lines == []
