"""The metrics port: scrapes one at a time, tokens of a file, readiness, and its end."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.telemetry.admin import MAX_WAITING_SCRAPES, AdminAccess, AdminServer

Start = Callable[..., AdminServer]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(*collectors: Collector, is_ready: bool = True, **fields: Any) -> AdminServer:
            registry = CollectorRegistry()
            for collector in collectors:
                registry.register(collector)
            return stack.enter_context(AdminServer("127.0.0.1", 0, registry, lambda: is_ready, **fields))

        yield start


def connected(server: AdminServer, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, server.port), timeout=30)


def sent(client: socket.socket, path: str, authorization: str = "") -> bytes:
    """Return all of an answer; the server ends the connection."""
    head = f"Authorization: {authorization}\r\n" if authorization else ""
    with client:
        client.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1"))
        return b"".join(iter(lambda: client.recv(65536), b""))


class Gate(Collector):
    """Metrics that wait for an event."""

    def __init__(self) -> None:
        self.is_open, self.entered = threading.Event(), threading.Semaphore(0)
        self.num_inside = self.most_inside = 0

    def collect(self) -> Iterator[Metric]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        self.entered.release()
        assert self.is_open.wait(30)
        self.num_inside -= 1
        yield from ()

    def describe(self) -> Iterator[Metric]:
        yield from ()


class Broken(Gate):
    def collect(self) -> Iterator[Metric]:
        raise ValueError("secret")


def test_one_scrape_runs_a_few_wait_and_probes_do_not(start: Start) -> None:
    gate = Gate()
    server = start(gate)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(MAX_WAITING_SCRAPES)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert gate.entered.acquire(timeout=30)
        refused = sent(connected(server), "/metrics")
        assert b" 503 " in refused and b"\r\nRetry-After: 1\r\n" in refused and b" 200 " in sent(connected(server), "/healthz")
        clients.pop(0).close()  # its scrape ends before the next begins
        gate.is_open.set()
        assert all(client.recv(65536).startswith(b"HTTP/1.1 200 ") for client in clients) and gate.most_inside == 1


def test_a_failing_scrape_is_a_server_error_and_a_hanging_one_does_not_hold_up_the_end(start: Start) -> None:
    failing, gate = start(Broken()), Gate()
    answer = sent(connected(failing), "/metrics")
    assert answer.startswith(b"HTTP/1.1 500 ") and b"secret" not in answer and b" 200 " in sent(connected(failing), "/healthz")
    hanging = start(gate)
    with connected(hanging) as client, connected(hanging):
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert gate.entered.acquire(timeout=30)
        for _ in range(2):
            hanging.close()
        gate.is_open.set()
    with pytest.raises(ConnectionRefusedError):
        connected(hanging)


def test_readiness_names_its_troubles_on_request(start: Start) -> None:
    troubles = ["en-de: version 2 is refused (proof): sample 1", "en-de: mod\udcff/2: left out"]
    listed = b"\nen-de: version 2 is refused (proof): sample 1\nen-de: mod\\udcff/2: left out\n"
    for is_ready, status, text in ((False, b"503", b"not ready"), (True, b"200", b"ready")):
        server = start(is_ready=is_ready, troubles=lambda: troubles)
        for path, expected in (("/readyz", b"\n"), ("/readyz?verbos", b"\n"), ("/readyz?verbose=1&x", listed)):
            head, _, body = sent(connected(server), path).partition(b"\r\n\r\n")
            assert (head.split()[1], body) == (status, text + expected)


# Tokens and certificates


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *[(content, " holds no token") for content in (b"", b"\n \n")],
        (b"good\ntwo words\n", ", line 2: a token is printable ASCII without spaces"),
        ("schlüssel\n".encode(), ", line 1: a token is printable ASCII without spaces"),
        (b"\xff\n", " cannot be read: not UTF-8"),
        (b"x" * 65537, " cannot be read: more than 65536 bytes"),
    ],
)
def test_a_file_of_tokens_is_refused_without_showing_them(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        AdminAccess(tokens=path)
    assert str(caught.value).startswith(f"metrics_token_file: {path}{reason}")


def test_metrics_need_a_token_of_the_file(start: Start, tmp_path: Path) -> None:
    printable = "".join(map(chr, range(0x21, 0x7F)))
    path = tmp_path / "tokens"
    path.write_text(f"first:with-a-colon\n\n  second  \n{printable}\n")
    for host, num_warnings in (("0.0.0.0", 1), ("127.0.0.1", 0)):
        with capture_logs() as warnings:
            access = AdminAccess.of(ServerConfig(models=tmp_path, metrics_host=host, metrics_token_file=path))
        assert len(warnings) == num_warnings, "a token in plain text"
    server = start(access=access)

    def status(authorization: str) -> bytes:
        answer = sent(connected(server), "/metrics", authorization)
        assert (b"\r\nWWW-Authenticate: Bearer\r\n" in answer) == answer.startswith(b"HTTP/1.1 401 ")
        return answer[9:12]

    for token in ("Bearer first:with-a-colon", "bearer second", f"Bearer {printable}"):
        assert status(token) == b"200"
    for token in (
        "",
        "Bearer",
        "Bearer secon",
        "Bearer second2",
        "Basic second",
        "second",
        "Bearer first",
        "Bearer \xff",
        "Bearer second x",
    ):
        assert status(token) == b"401"
    path.write_text("third")
    access.reload()
    path.write_text("")
    with pytest.raises(ConfigError, match="metrics_token_file"):
        access.reload()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        access.reload()
    assert (status("Bearer second"), status("Bearer third")) == (b"401", b"200")
