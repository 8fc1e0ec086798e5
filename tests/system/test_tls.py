"""TLS on every port: client certificates, callers by the names in them, and replacement of the files by SIGHUP."""

import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import requests

from dragoman.client.errors import CallError
from dragoman.client.repository import RepositoryClient
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.certificates import make_certificates
from tests.system.harness.server import Event, Server, serving, wait_until

pytestmark = pytest.mark.e2e

ADDRESSES = "DNS:localhost,IP:127.0.0.1"
MANY = "email:ops@example.org,IP:10.0.0.1,URI:spiffe://example.org/many,DNS:many.example.org"
NAMES = {"server": ADDRESSES, "web": "DNS:web.example.org", "many": MANY, "address": "IP:10.0.0.1", "other": "DNS:other"}
CALLERS = """
[callers.web]
certificates = ["web.example.org"]
[callers.many]
certificates = ["spiffe://example.org/many"]
"""
OPERATORS = """
[callers.anna]
token = "anna-s"
[callers.past]
token = "past-s"
expires = 2020-01-01T00:00:00Z
"""
REQUEST = GenerateRequest(model="alpha", text="a")
FILES = {
    "tls-certificate": "server.pem",
    "tls-key": "server.key",
    "tls-client-ca": "ca.pem",
    "auth-tokens-file": "callers.toml",
    "admin-tokens-file": "operators.toml",
    "metrics-tls-certificate": "server.pem",
    "metrics-tls-key": "server.key",
    "metrics-token-file": "token",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("ours"), NAMES)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("theirs"), {"server": ADDRESSES, "web": NAMES["web"]})


def mount(folder: Path, source: Path) -> None:
    for name in ("server.pem", "server.key", "ca.pem"):
        shutil.copyfile(source / name, folder / name)


@pytest.fixture(scope="module")
def mounted(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mounted")
    (folder / "callers.toml").write_text(CALLERS)
    (folder / "operators.toml").write_text(OPERATORS)
    (folder / "token").write_text("metrics-token\n")
    mount(folder, ours)
    return folder


@pytest.fixture(scope="module")
def server(translators: Path, mounted: Path) -> Iterator[Server]:
    flags = (text for name, file in FILES.items() for text in (f"--{name}", str(mounted / file)))
    with serving(translators, "--admin-port", "0", *flags) as started:
        yield started
        assert started.terminate() == 0
        assert {event["event"] for event in started.problems()} <= {Event.NOT_RELOADED}


def channel(server: Server, authority: Path, client: Path | None = None, name: str = "web") -> grpc.Channel:
    """Return a channel, on a connection of its own, of a client that trusts an authority and shows a certificate."""
    pair = () if client is None else ((client / f"{name}.key").read_bytes(), (client / f"{name}.pem").read_bytes())
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), *pair)
    return grpc.secure_channel(server.address, credentials, [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)])


def code(opened: grpc.Channel) -> str:
    return str(GenerationStub(opened).Generate.future(REQUEST, timeout=20).code().name)


def post(server: Server, authority: Path, client: Path, name: str = "web") -> int:
    url = server.http_address.replace("http:", "https:") + "/v1/generate"
    pair, trusted = (str(client / f"{name}.pem"), str(client / f"{name}.key")), str(authority / "ca.pem")
    return requests.post(url, json={"model": "alpha", "text": "a"}, timeout=60, cert=pair, verify=trusted).status_code


def metrics(server: Server, authority: Path, token: str = "metrics-token", path: str = "/metrics") -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = server.metrics_address.replace("http:", "https:") + path
    return requests.get(url, headers=headers, verify=str(authority / "ca.pem"), timeout=60)


def test_callers_are_known_by_names_in_their_certificates(server: Server, ours: Path) -> None:
    for name, expected in (("web", "OK"), ("many", "OK"), ("address", "UNAUTHENTICATED"), ("other", "UNAUTHENTICATED")):
        with channel(server, ours, ours, name) as opened:
            assert code(opened) == expected, name
        assert post(server, ours, ours, name) == (200 if expected == "OK" else 401), name

    def callers() -> list[str]:
        return sorted(line["caller"] for line in server.logged(Event.CALL) if line["code"] == "OK")

    wait_until(lambda: callers() == ["many", "many", "web", "web"], "all are logged")
    with channel(server, ours, ours, "other") as opened:
        call = GenerationStub(opened).Generate.future(REQUEST, timeout=20)
        message = "authorization: a client certificate with a name that this server knows is needed"
        assert call.exception().details() == message
        # Before a message is read, by unknown methods too; known callers are told that there is no such method.
        for method in ("/dragoman.v1.Generation/GenerateStream", "/no.such.Service/Method"):
            assert opened.unary_unary(method).future(b"", timeout=20).code() is grpc.StatusCode.UNAUTHENTICATED
    with channel(server, ours, ours) as opened:
        assert opened.unary_unary("/no.such.Service/Method").future(b"", timeout=20).code() is grpc.StatusCode.UNIMPLEMENTED


def test_connections_without_a_trusted_certificate_are_refused(server: Server, ours: Path, theirs: Path) -> None:
    others = [channel(server, ours), channel(server, ours, theirs), channel(server, theirs, ours)]
    for opened in (*others, grpc.insecure_channel(server.address)):
        with opened:
            assert code(opened) == "UNAVAILABLE"
    for authority, client in ((ours, theirs), (theirs, ours)):
        with pytest.raises(requests.exceptions.ConnectionError):
            post(server, authority, client)
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.get(f"{server.http_address}/v1/models", timeout=20)


def test_the_metrics_port_has_tls_and_a_token_and_probes_need_none(server: Server, ours: Path) -> None:
    for path, token, status in (
        ("/metrics", "metrics-token", 200),
        ("/metrics", "", 401),
        ("/metrics", "wrong", 401),
        ("/healthz", "", 200),
        ("/readyz", "", 200),
        ("/readyz?verbose", "", 401),
        ("/readyz?verbose", "metrics-token", 200),
    ):
        assert metrics(server, ours, token, path).status_code == status, (path, token)
    port = int(server.metrics_address.rpartition(":")[2])
    for first in (b"GET /metrics HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(first)
            client.shutdown(socket.SHUT_WR)
            assert b"HTTP" not in b"".join(iter(lambda client=client: client.recv(65536), b""))
    assert metrics(server, ours).status_code == 200


def test_the_admin_port_has_the_servers_tls_and_tokens_until_they_change(server: Server, ours: Path, mounted: Path) -> None:
    files = [(ours / name).read_bytes() for name in ("ca.pem", "web.key", "web.pem")]

    def state(token: str, credentials: grpc.ChannelCredentials | None) -> str:
        with RepositoryClient(server.admin_address, token=token, credentials=credentials) as operator:
            try:
                return operator.models()[0][0].versions[0].state
            except CallError as error:
                return error.code

    trusted = grpc.ssl_channel_credentials(*files)
    assert [state(token, trusted) for token in ("anna-s", "past-s", "wrong")] == ["serving", *["UNAUTHENTICATED"] * 2]
    assert state("anna-s", None) == "UNAVAILABLE"
    (mounted / "operators.toml").write_text('[callers.carl]\ntoken = "carl-s"')
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(Event.RELOADED)
    assert [state(token, trusted) for token in ("anna-s", "carl-s")] == ["UNAUTHENTICATED", "serving"]


def test_a_hangup_exchanges_files_for_new_connections_and_bad_files_change_nothing(
    server: Server, ours: Path, theirs: Path, mounted: Path
) -> None:
    """Connections that are open live on."""

    def reload(expected: str) -> None:
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(expected)

    with channel(server, ours, ours) as old:
        assert code(old) == "OK"
        (mounted / "server.pem").write_bytes((theirs / "server.pem").read_bytes())  # the key is another's
        reload(Event.NOT_RELOADED)
        with channel(server, ours, ours) as again:
            assert code(again) == "OK" and metrics(server, ours).status_code == 200
        mount(mounted, theirs)
        reload(Event.RELOADED)
        for port in (server.address, server.http_address, server.metrics_address):
            wait_until(lambda port=port: certificate_of(port, theirs) == der(theirs), "the new certificate is served")  # type: ignore[misc]
        assert code(old) == "OK"
        with channel(server, theirs, theirs) as new, channel(server, ours, theirs) as mixed:
            assert (code(new), code(mixed)) == ("OK", "UNAVAILABLE")
        assert post(server, theirs, theirs) == 200
        text = metrics(server, theirs).text
        days = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("dragoman_tls_certificate_days_left{")]
        assert days and all(0 < each <= 2 for each in days)


def certificate_of(address: str, authority: Path) -> bytes:
    host, _, port = address.rpartition("/")[2].partition(":")
    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    context.check_hostname = False
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.load_cert_chain(authority / "web.pem", authority / "web.key")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=host) as tls:
                return tls.getpeercert(binary_form=True) or b""
        except ssl.SSLError:
            time.sleep(0.05)
            return b""


def der(authority: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((authority / "server.pem").read_text())
