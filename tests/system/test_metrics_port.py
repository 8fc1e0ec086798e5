"""The metrics port of the real server: probes, metrics, and attacks on it that must harm neither it nor the rest."""

import gzip
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from tests.system.harness.server import Server, serving

pytestmark = pytest.mark.e2e

MAX_HEAD_BYTES, MAX_CONNECTIONS = 8192, 256


@pytest.fixture(scope="module")
def server(endless: Path) -> Iterator[Server]:
    with serving(endless / "alpha") as started:
        yield started
        assert started.terminate() == 0
        assert not started.problems()


def connected(server: Server) -> socket.socket:
    host, _, port = server.metrics_address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def sent(server: Server, request: bytes) -> bytes:
    """Return everything that comes back; the server ends the connection."""
    with connected(server) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def status(server: Server, path: str = "/healthz") -> bytes:
    return sent(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())[9:12]


def test_metrics_and_probes_are_served(server: Server) -> None:
    text = requests.get(f"{server.metrics_address}/metrics", headers={"Accept-Encoding": "identity"}, timeout=60).text
    assert 'dragoman_model_ready{model="alpha"} 1.0' in text and "dragoman_build_info{" in text
    compressed = sent(server, b"GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
    assert b'dragoman_model_ready{model="alpha"} 1.0' in gzip.decompress(compressed.partition(b"\r\n\r\n")[2])
    for path, body in (("/healthz", "ok\n"), ("/readyz", "ready\n"), ("/readyz?verbose", "ready\n")):
        response = requests.get(server.metrics_address + path, timeout=60)
        assert (response.status_code, response.text) == (200, body)
    answer = sent(server, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"Content-Length: 3\r\n" in answer


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz?x=1 HTTP/1.1\r\nHost: x\r\nAccept: a\r\nAccept: b\r\n\r\n", b"200"),
        (b"GET http://x/healthz HTTP/1.1\r\n\r\n", b"200"),
        *[(b"GET " + path + b" HTTP/1.1\r\n\r\n", b"404") for path in (b"/", b"/metrics/x", b"http://a", b"/%00", b"/\xff\xfe")],
        *[(b"GET " + path + b" HTTP/1.1\r\n\r\n", b"404") for path in (b"/../metrics", b"/" + b"x" * 5000)],
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"405"),
        *[(method + b" /healthz HTTP/1.1\r\n\r\n", b"405") for method in (b"DELETE", b"OPTIONS")],
        (b"GET /healthz HTTP/2.0\r\n\r\n", b"505"),
        *[(head + b"\r\n\r\n", b"400") for head in (b"GET healthz HTTP/1.1", b"GET /healthz", b"", b"PRI * HTTP/2.0\r\n\r\nSM")],
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        *[(b"GET /healthz HTTP/1.1\r\n" + head + b"\r\n\r\n", b"400") for head in (b"no colon", b" : x", b"A: 1\r\n B: folded")],
        *[
            (b"GET /healthz HTTP/1.1\r\n" + name + b": a\r\n" + name + b": b\r\n\r\n", b"400")
            for name in (b"Authorization", b"Host")
        ],
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES, b"431"),
        (b"x" * 1_000_000, b"431"),
        (b"GET /healthz HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_every_request_is_answered_whatever_it_is(server: Server, request_: bytes, expected: bytes) -> None:
    answer = sent(server, request_)
    assert answer[9:12] == expected
    assert not answer or b"\r\nConnection: close\r\n" in answer
    assert b"Traceback" not in answer and b"Exception" not in answer


def test_a_refused_body_does_not_undo_the_answer(server: Server) -> None:
    with connected(server) as client:
        client.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 405 ")


def test_idle_and_slow_connections_make_room_and_aborted_ones_leave_no_error(server: Server) -> None:
    for _ in range(5):
        client = connected(server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        client.close()
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(MAX_CONNECTIONS + 50)]
        began = time.monotonic()
        assert status(server) == b"200" and time.monotonic() - began < 5
        assert idle[0].recv(1) == b"", "the oldest has made room"
    with connected(server) as slow:
        slow.sendall(b"GET /healthz HT")
        assert slow.recv(1) == b""


def test_scrapes_wait_for_each_other_and_probes_do_not(server: Server) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status(server) == b"200"
        codes = {client.recv(65536)[9:12] for client in clients}
    assert codes <= {b"200", b"503"} and b"200" in codes
