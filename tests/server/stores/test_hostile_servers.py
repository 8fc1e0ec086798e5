"""Servers that answer without end: an object store that drips, and a registry that floods."""

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from dragoman.server.stores import objects
from dragoman.server.stores.address import Address
from dragoman.server.stores.objects import ObjectStore
from dragoman.server.stores.registry import MAX_MANIFEST_BYTES, RegistryStore
from dragoman.server.stores.store import SilentError, StoreError
from tests.certificates import make_certificates
from tests.server.stores.conftest import serving

PROMISED_BYTES = 1 << 30


class Handler(BaseHTTPRequestHandler):
    """Answers with a body that has no end, where `kind` says."""

    protocol_version = "HTTP/1.1"
    kind = ""
    num_sent: ClassVar[list[int]] = []
    ended: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        place = f"http://127.0.0.1:{self.server.server_address[1]}"
        if self.kind == "drip":
            self._begin(200, PROMISED_BYTES, ETag='"x"', **{"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"})
            with contextlib.suppress(OSError):
                while not self.ended.wait(0.1):
                    self.wfile.write(b" ")
            self.close_connection = True
        elif self.path == "/v2/":
            self._begin(200, 0)
        elif self.kind == "to plain HTTP":
            self._begin(302, 0, Location=f"{place}/v2/")
        elif self.kind == "redirection":
            self._begin(302, PROMISED_BYTES, Location="/elsewhere")
            self._flood()
        elif self.path.startswith("/token"):
            self._begin(200, PROMISED_BYTES)
            self._flood()
        else:
            self._begin(401, 0, **{"WWW-Authenticate": f'Bearer realm="{place}/token",service="x",scope="y"'})

    def _begin(self, status: int, size: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(size), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _flood(self) -> None:
        sent = 0
        try:
            while sent < PROMISED_BYTES:
                sent += self.wfile.write(b" " * (1 << 20))
        except ConnectionError:
            self.close_connection = True
        finally:
            self.num_sent.append(sent)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hostile() -> Iterator[ThreadingHTTPServer]:
    Handler.num_sent, Handler.ended = [], threading.Event()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield server
        Handler.ended.set()


@pytest.mark.parametrize("ask", [ObjectStore.list, lambda store: store.read("file", 0, len)], ids=["list", "read"])
def test_thread_that_reads_from_a_dripping_store_ends(
    hostile: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, ask: Callable[[ObjectStore], None]
) -> None:
    """Such threads used to accumulate, one more at each look into the store."""
    monkeypatch.setattr(Handler, "kind", "drip")
    endpoint = f"http://127.0.0.1:{hostile.server_port}"
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    for name, value in zip(names, (endpoint, "id", "secret", "us-east-1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "_READ_SECONDS", 1.0)
    before = set(threading.enumerate())
    with pytest.raises(SilentError):
        ask(ObjectStore(Address.parse("s3://models/all"), 0.5))
    for thread in set(threading.enumerate()) - before:
        if thread.name == "store":
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize(("kind", "reason"), [("redirection", "30 redirects"), ("token", f"more than {MAX_MANIFEST_BYTES} bytes")])
def test_registry_is_not_read_without_end(
    hostile: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    monkeypatch.setattr(Handler, "kind", kind)
    with pytest.raises(StoreError, match=reason):
        RegistryStore(Address.parse(f"oci://127.0.0.1:{hostile.server_port}/models:1"), 5.0).list()
    assert all(sent < PROMISED_BYTES // 8 for sent in Handler.num_sent)


def test_registry_with_tls_redirects_nowhere_without(
    hostile: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs are known by their digests, but the manifest of a tag is not."""
    certificates = make_certificates(tmp_path, {"server": "IP:127.0.0.1"})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    hostile.socket = context.wrap_socket(hostile.socket, server_side=True)
    monkeypatch.setattr(Handler, "kind", "to plain HTTP")
    monkeypatch.setattr(Address, "is_loopback", False)  # as if it were elsewhere
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):  # the latter goes before, where a machine has it
        monkeypatch.setenv(name, str(certificates / "ca.pem"))
    with pytest.raises(StoreError, match="leads to an address without TLS"):
        RegistryStore(Address.parse(f"oci://127.0.0.1:{hostile.server_port}/models:1"), 5.0).list()
