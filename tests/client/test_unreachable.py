"""What callers read when no connection comes about: with the real gRPC where that can be had, and in the words of older ones."""

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import Unavailable
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from dragoman.client.unreachable import explain

ONCE = {"retry": RetryPolicy(max_attempts=1)}
BACKENDS = "connections to all backends failing; last error: "


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities that signed themselves: `ours` for this host, `other` for one elsewhere."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, host in {"ours": "DNS:localhost,IP:127.0.0.1", "other": "DNS:elsewhere.example"}.items():
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={host}")
        command = ["openssl", "req", "-x509", *key, *names, "-days", "2", "-out", f"{name}.pem"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def serve_tls(certificates: Path) -> Iterator[Callable[..., str]]:
    """Start servers without a method, with TLS."""
    servers = []

    def serve(name: str, wants_certificate: bool = False) -> str:
        pair = ((certificates / f"{name}.key").read_bytes(), (certificates / f"{name}.pem").read_bytes())
        server = grpc.server(ThreadPoolExecutor(2))
        servers.append(server)
        credentials = grpc.ssl_server_credentials([pair], pair[1] if wants_certificate else None, wants_certificate)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return f"127.0.0.1:{port}"

    yield serve
    for server in servers:
        server.stop(None).wait()


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Read a little of each connection, answer and hang up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(1000)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1000):  # closed with something unread, the answer might not arrive
                        pass

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def message_of(target: str, credentials: grpc.ChannelCredentials | None = None) -> str:
    with Client(target, credentials=credentials, **ONCE) as client, pytest.raises(Unavailable) as caught:
        client.generate("a")
    assert str(caught.value) == caught.value.message
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("generate", ["a"]),
        ("stream", ["a"]),
        ("generate_many", [["a"]]),
        ("generate_batch", [[Request("a")]]),
        ("score", ["a", "b"]),
        ("models", []),
        ("model", ["en-de"]),
    ],
)
def test_server_that_is_down_is_told_in_one_line(call, server, clock, method: str, arguments: list) -> None:
    server.stop()
    with pytest.raises(Unavailable) as caught:
        call(method, *arguments)
    assert str(caught.value) == f"{server.target}: nothing answers there (Connection refused); is the server running?"
    assert len(clock.waits) == 4  # tried again as ever


def test_server_is_named_as_the_caller_named_it(server, running_async) -> None:
    server.stop()
    line = rf"localhost:{server.port}: nothing answers there \(.*(127\.0\.0\.1|\[::1\]):{server.port}: Connection refused\); is .*"
    assert re.fullmatch(line, message_of(f"http://localhost:{server.port}/"))

    async def main() -> None:
        async with AsyncClient(f"dns:///localhost:{server.port}", **ONCE) as client:
            with pytest.raises(Unavailable, match=f"^dns:///{line}"):
                await client.generate("a")

    running_async(main)


def test_name_that_nobody_has_is_told() -> None:
    assert message_of("nobody.invalid").startswith("nobody.invalid:8500: the name cannot be looked up (")


def test_socket_that_is_not_there_is_told(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/x.sock"
    assert message_of(target) == f"{target}: there is no such socket (No such file or directory); is the server running?"


def test_credentials_for_a_server_without_tls_are_told(server, certificates: Path) -> None:
    credentials = grpc.ssl_channel_credentials((certificates / "ours.pem").read_bytes())
    assert message_of(server.target, credentials) == f"{server.target}: no TLS is spoken there; call it without credentials"


def test_certificate_of_another_authority_is_told(serve_tls, certificates: Path) -> None:
    target = serve_tls("ours")
    message = message_of(target, grpc.ssl_channel_credentials((certificates / "other.pem").read_bytes()))
    assert message.startswith(f"{target}: the server's certificate is not trusted (self")
    assert message.endswith("); is it of the authority that was given?")


def test_certificate_for_another_name_is_told(serve_tls, certificates: Path) -> None:
    target = serve_tls("other")
    message = message_of(target, grpc.ssl_channel_credentials((certificates / "other.pem").read_bytes()))
    assert message == f"{target}: the server's certificate is not for this name; call it by one that the certificate has"


@pytest.mark.parametrize("is_secure", [False, True])
def test_connection_that_the_server_closes_is_told(serve_tls, certificates: Path, is_secure: bool) -> None:
    target = serve_tls("ours", wants_certificate=is_secure)
    credentials = grpc.ssl_channel_credentials((certificates / "ours.pem").read_bytes()) if is_secure else None
    message = message_of(target, credentials)
    assert message.startswith(f"{target}: the connection was closed at once (")
    assert message.endswith("does it want TLS or a client's certificate?")


def test_web_server_is_told() -> None:
    with raw_server(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as target:
        assert message_of(target) == f"{target}: what answers there does not speak gRPC; is it the port of a Dragoman server?"


@pytest.mark.parametrize(
    ("details", "line"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:8500: Failed to connect to remote host: "
            "connect: Connection refused (111)",
            "[::1]:8500: nothing answers there (Connection refused); is the server running?",
        ),
        (
            f"{BACKENDS}UNKNOWN: ipv4:10.0.0.1:8500: Failed to connect to remote host: connect: No route to host (113)",
            "10.0.0.1:8500: it cannot be reached (No route to host); is the address right?",
        ),
        (
            f"{BACKENDS}UNKNOWN: unix:/x.sock: connect: No such file or directory (2)",
            "unix:/x.sock: there is no such socket (No such file or directory); is the server running?",
        ),
        (
            f"{BACKENDS}UNKNOWN: ipv4:127.0.0.1:1: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL "
            "routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate",
            "127.0.0.1:1: the server's certificate is not trusted (self signed certificate); "
            "is it of the authority that was given?",
        ),
        (
            f"{BACKENDS}UNKNOWN: ipv4:127.0.0.1:1: Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:10000410:SSL "
            "routines:OPENSSL_internal:SSLV3_ALERT_HANDSHAKE_FAILURE: x",
            "127.0.0.1:1: the TLS handshake failed (SSLV3_ALERT_HANDSHAKE_FAILURE)",
        ),
        (
            f"{BACKENDS}UNKNOWN: ipv4:127.0.0.1:1: Peer name localhost is not in peer certificate",
            "127.0.0.1:1: the server's certificate is not for this name; call it by one that the certificate has",
        ),
        (
            f"{BACKENDS}UNAVAILABLE: ipv4:127.0.0.1:1: recvmsg:Connection reset by peer",
            "127.0.0.1:1: the connection was closed at once (Connection reset by peer); "
            "is it a Dragoman server, and does it want TLS or a client's certificate?",
        ),
        (
            f"{BACKENDS}INTERNAL: ipv4:127.0.0.1:1: Trying to connect an http1.x server (HTTP status 400)",
            "127.0.0.1:1: what answers there does not speak gRPC; is it the port of a Dragoman server?",
        ),
        (
            "DNS resolution failed for nobody.invalid:8500: C-ares status is not ARES_SUCCESS qtype=A name=nobody.invalid "
            "is_balancer=0: Domain name not found",
            "nobody.invalid:8500: the name cannot be looked up (Domain name not found); is it right?",
        ),
    ],
)
def test_older_grpcs_are_understood_too(details: str, line: str) -> None:
    assert explain(details) == line


@pytest.mark.parametrize(
    "details",
    [
        "",
        "Socket closed",
        "draining",
        "the model's engine is starting",
        f"{BACKENDS}UNKNOWN: ipv4:127.0.0.1:1: something that nobody has seen",
        f"{BACKENDS}nothing",
        "Failed to create XdsClient: Environment variables GRPC_XDS_BOOTSTRAP or GRPC_XDS_BOOTSTRAP_CONFIG not defined",
        "DNS resolution failed",
    ],
)
def test_what_is_not_recognised_is_left_as_it_is(details: str) -> None:
    assert explain(details, "localhost:8500") is None


def test_servers_own_words_are_left_as_they_are(call, service, failing) -> None:
    details = f"{BACKENDS}UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
    service.script.append(failing("UNAVAILABLE", details, retry_after=(1000, 0)))
    with pytest.raises(Unavailable) as caught:
        call("generate", "x")
    assert str(caught.value) == details
