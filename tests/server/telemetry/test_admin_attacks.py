"""What must not harm the metrics port, or the rest of the process through it."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, make_wsgi_app

from dragoman.server.telemetry import admin as module
from dragoman.server.telemetry.admin import MAX_CONNECTIONS, AdminServer
from dragoman.server.telemetry.admin_request import MAX_HEAD_BYTES
from dragoman.server.telemetry.scrapes import MAX_WAITING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


class Gate:
    """Answers /metrics when it is let."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.num_inside = self.most_inside = 0

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        self.entered.release()
        assert self.is_open.wait(30)
        self.num_inside -= 1
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"metrics\n"]


@pytest.fixture
def server() -> Iterator[AdminServer]:
    with AdminServer("127.0.0.1", 0, make_wsgi_app(CollectorRegistry()), lambda: True) as server:
        yield server


def connected(server: AdminServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def asked(server: AdminServer, request: bytes) -> bytes:
    """Return everything that comes for some bytes; the server ends the connection."""
    with connected(server) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def status(server: AdminServer, path: str = "/healthz") -> bytes:
    return asked(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())[9:12]


@pytest.mark.parametrize(
    ("request_", "status_"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz?x=1 HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"405"),
        (b"DELETE /healthz HTTP/1.1\r\n\r\n", b"405"),
        (b"OPTIONS /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /healthz HTTP/2.0\r\n\r\n", b"505"),
        (b"GET healthz HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://x/healthz HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /healthz\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\n : x\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nA: 1\r\n B: folded\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nAuthorization: a\r\nauthorization: b\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /%00 HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES, b"431"),
        (b"x" * 1_000_000, b"431"),
        (b"GET /healthz HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
)
def test_what_is_asked_is_answered_whatever_it_is(server: AdminServer, request_: bytes, status_: bytes) -> None:
    answer = asked(server, request_)
    assert answer[9:12] == status_
    assert not answer or b"\r\nConnection: close\r\n" in answer
    assert b"Traceback" not in answer and b"Exception" not in answer


def test_body_of_a_refused_request_does_not_undo_the_answer(server: AdminServer) -> None:
    with connected(server) as client:
        client.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 405 ")


def test_head_is_the_answer_without_its_body(server: AdminServer) -> None:
    answer = asked(server, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"Content-Length: 3\r\n" in answer


def test_idle_connections_take_no_more_descriptors_and_no_place_from_who_asks(server: AdminServer) -> None:
    def num_open() -> int:
        return sum(os.readlink(f"/proc/self/fd/{name}").startswith("socket:") for name in descriptors())

    def descriptors() -> Iterator[str]:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.readlink(f"/proc/self/fd/{name}")
                yield name

    idle = []
    before = num_open()
    try:
        for _ in range(MAX_CONNECTIONS + 50):
            idle.append(connected(server))
        assert status(server) == b"200"
        # Ours, the server's ends of them, and as many as may be about to close.
        assert num_open() - before - len(idle) <= MAX_CONNECTIONS + 2
        idle[0].settimeout(30)
        assert idle[0].recv(1) == b"", "the oldest has made room"
    finally:
        for client in idle:
            client.close()


def test_slow_request_is_let_go(monkeypatch: pytest.MonkeyPatch, server: AdminServer) -> None:
    monkeypatch.setattr(module, "CLIENT_TIMEOUT_SECONDS", 0.05)
    with connected(server) as client:
        client.sendall(b"GET /healthz HT")
        assert client.recv(1) == b""


def test_one_scrape_at_a_time_a_few_wait_and_probes_do_not() -> None:
    gate = Gate()
    with AdminServer("127.0.0.1", 0, gate, lambda: True) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(MAX_WAITING)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert gate.entered.acquire(timeout=30)
        # Who came first was read first, so those are waiting by now.
        assert status(server, "/metrics") == b"503"
        assert status(server) == b"200"
        gate.is_open.set()
        assert all(client.recv(65536).startswith(b"HTTP/1.1 200 ") for client in clients)
        assert gate.most_inside == 1


def test_client_that_goes_away_leaves_its_scrape_to_end_before_the_next() -> None:
    gate = Gate()
    with AdminServer("127.0.0.1", 0, gate, lambda: True) as server:
        with connected(server) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert gate.entered.acquire(timeout=30)
        gate.is_open.set()
        assert status(server, "/metrics") == b"200"
        assert gate.most_inside == 1


def test_failing_scrape_is_an_error_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> Iterable[bytes]:
        raise ValueError("secret")

    with AdminServer("127.0.0.1", 0, broken, lambda: True) as server:
        answer = asked(server, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500 ") and b"secret" not in answer
        assert status(server) == b"200"


def test_end_is_not_held_up_by_a_scrape_that_hangs() -> None:
    gate = Gate()
    server = AdminServer("127.0.0.1", 0, gate, lambda: True)
    with connected(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert gate.entered.acquire(timeout=30)
        server.close()
        gate.is_open.set()


def test_lack_of_descriptors_is_survived(server: AdminServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client, contextlib.ExitStack() as fillers:
        client.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.callback(os.close, os.dup(client.fileno()))
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            for _ in range(3):  # turns of the loop, in which it tries to accept
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server._loop).result(30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            fillers.close()
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
