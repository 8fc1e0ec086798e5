"""A registry that gives what nobody has asked for."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from dragoman.server.stores.address import Address
from dragoman.server.stores.registry import MAX_MANIFEST_BYTES, RegistryStore
from dragoman.server.stores.store import StoreError
from tests.certificates import make_certificates

PROMISED_BYTES = 1 << 30


class Flood(BaseHTTPRequestHandler):
    """Answers with a body that has no end where nobody looks at it: beside a redirection, or in the place of a token."""

    protocol_version = "HTTP/1.1"
    kind = ""
    num_sent: ClassVar[list[int]] = []
    server_under_test: ClassVar[ThreadingHTTPServer]

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self._begin(200, 0)
        elif self.kind == "to plain HTTP":
            self._begin(302, 0, Location=f"http://127.0.0.1:{self.server.server_address[1]}/v2/")
        elif self.kind == "redirection":
            self._begin(302, PROMISED_BYTES, Location="/elsewhere")
            self._flood()
        elif self.path.startswith("/token"):
            self._begin(200, PROMISED_BYTES)
            self._flood()
        else:
            realm = f"http://127.0.0.1:{self.server.server_address[1]}/token"
            self._begin(401, 0, **{"WWW-Authenticate": f'Bearer realm="{realm}",service="x",scope="y"'})

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

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def flood() -> Iterator[int]:
    Flood.num_sent = []
    server = Flood.server_under_test = ThreadingHTTPServer(("127.0.0.1", 0), Flood)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("kind", "reason"), [("redirection", "30 redirects"), ("token", f"more than {MAX_MANIFEST_BYTES} bytes")])
def test_what_nobody_asked_for_is_not_read_without_end(flood: int, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    monkeypatch.setattr(Flood, "kind", kind)
    with pytest.raises(StoreError, match=reason):
        RegistryStore(Address.parse(f"oci://127.0.0.1:{flood}/models:1"), 5.0).list()
    assert all(sent < PROMISED_BYTES // 8 for sent in Flood.num_sent)


def test_a_registry_with_tls_leads_nowhere_without(flood: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the blobs are known by their digests: who answers for the manifest of a tag could say what he likes."""
    certificates = make_certificates(tmp_path, {"server": "IP:127.0.0.1"})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    monkeypatch.setattr(Flood, "kind", "to plain HTTP")
    monkeypatch.setattr(Address, "is_loopback", False)  # as if it were elsewhere
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):  # the latter goes before, where a machine has it
        monkeypatch.setenv(name, str(certificates / "ca.pem"))
    Flood.server_under_test.socket = context.wrap_socket(Flood.server_under_test.socket, server_side=True)
    with pytest.raises(StoreError, match="leads to an address without TLS"):
        RegistryStore(Address.parse(f"oci://127.0.0.1:{flood}/models:1"), 5.0).list()
