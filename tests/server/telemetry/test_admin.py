import contextlib
import gzip
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ConfigError
from dragoman.server.telemetry.admin import AdminServer
from dragoman.server.telemetry.admin_request import AdminRequest, BadRequest
from dragoman.server.telemetry.metrics import Metrics


class Admin:
    """A running admin server and whether it should say ready."""

    def __init__(self) -> None:
        self.is_ready = False
        self.troubles: list[str] = []
        metrics = Metrics(CollectorRegistry(), [1.0])
        metrics.add_model("en-de", "v1", "fp32", "cpu", 16)
        self.server = AdminServer("127.0.0.1", 0, metrics.wsgi_app(), lambda: self.is_ready, troubles=lambda: self.troubles)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()


@pytest.fixture
def admin() -> Iterator[Admin]:
    admin = Admin()
    with admin.server:
        yield admin


def test_metrics_are_served(admin: Admin) -> None:
    status, body = admin.get("/metrics")
    assert status == 200
    assert b'dragoman_slots{model="en-de"} 16.0' in body
    assert gzip.decompress(admin.get("/metrics", **{"Accept-Encoding": "gzip"})[1]) == body


def test_live_before_ready(admin: Admin) -> None:
    assert admin.get("/healthz") == (200, b"ok\n")
    assert admin.get("/readyz") == (503, b"not ready\n")
    admin.is_ready = True
    assert admin.get("/readyz") == (200, b"ready\n")


def test_readiness_tells_who_asks_for_it_what_is_not_as_is_wanted(admin: Admin) -> None:
    admin.troubles = ["en-de: version 2 is refused (proof): sample 1", "en-de: mod\udcff/2: left out"]
    assert admin.get("/readyz") == admin.get("/readyz?verbos") == (503, b"not ready\n")
    told = b"\nen-de: version 2 is refused (proof): sample 1\nen-de: mod\\udcff/2: left out\n"
    assert admin.get("/readyz?verbose") == (503, b"not ready" + told)
    admin.is_ready = True
    assert admin.get("/readyz?verbose=1&x") == (200, b"ready" + told)
    admin.troubles = []
    assert admin.get("/readyz?verbose") == (200, b"ready\n")


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/favicon.ico"])
def test_other_paths_are_not_found(admin: Admin, path: str) -> None:
    assert admin.get(path)[0] == 404


def test_idle_client_does_not_hold_up_the_next_or_the_end(admin: Admin) -> None:
    with socket.create_connection(("127.0.0.1", admin.server.port)):
        assert admin.get("/healthz")[0] == 200
        admin.server.close()


def test_client_that_goes_away_is_not_an_error(admin: Admin, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        client = socket.create_connection(("127.0.0.1", admin.server.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        client.close()
    assert admin.get("/healthz")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_close_frees_the_port_and_ends_the_thread(admin: Admin) -> None:
    port = admin.server.port
    admin.server.close()
    admin.server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "admin"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_taken_port_is_named(admin: Admin) -> None:
    with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{admin.server.port}: Address already in use"):
        AdminServer("127.0.0.1", admin.server.port, Metrics(CollectorRegistry(), [1.0]).wsgi_app(), lambda: True)


def test_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"metrics_port: cannot listen on no-such-host\.invalid:0"):
        AdminServer("no-such-host.invalid", 0, Metrics(CollectorRegistry(), [1.0]).wsgi_app(), lambda: True)


def test_ipv6_address_is_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with (
        AdminServer("::1", 0, Metrics(CollectorRegistry(), [1.0]).wsgi_app(), lambda: True) as server,
        contextlib.closing(http.client.HTTPConnection("::1", server.port, timeout=10)) as connection,
    ):
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200


def test_heads_that_proxies_and_tools_make_are_read() -> None:
    twice = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\nAccept: */*\r\n\r\n"
    assert AdminRequest.parse(twice).headers["accept"] == "text/plain, */*"
    for target, path in ((b"http://a:8501/metrics?x=1", "/metrics"), (b"http://a", "/"), (b"https://a/", "/")):
        assert AdminRequest.parse(b"GET " + target + b" HTTP/1.1\r\n\r\n").path == path
    for head in (b"GET metrics HTTP/1.1\r\n\r\n", twice.replace(b"Accept", b"Authorization"), twice.replace(b"Accept", b"Host")):
        with pytest.raises(BadRequest):
            AdminRequest.parse(head)
