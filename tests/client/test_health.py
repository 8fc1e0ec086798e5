from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dragoman.cli import main as dragoman
from dragoman.client.certificates import Tls
from dragoman.client.errors import ModelNotFound
from dragoman.client.health import is_serving

STATUSES = {"": "SERVING", "liveness": "SERVING", "en-de": "NOT_SERVING"}
PATIENCE_SECONDS = 30.0


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Serve the statuses, over TLS if told so, and return the port."""
    started = []

    def start(credentials: grpc.ServerCredentials | None = None) -> int:
        servicer = health.HealthServicer()
        for name, status in STATUSES.items():
            servicer.set(name, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
        threads = ThreadPoolExecutor(2)
        server = grpc.server(threads)
        started.append((server, threads))
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        address = "127.0.0.1:0"
        port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        server.start()
        return port

    yield start
    for server, threads in started:
        server.stop(None).wait()
        threads.shutdown()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["dragoman", "health", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        dragoman.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("service", "code"), [("", 0), ("liveness", 0), ("en-de", 1), ("unknown", 1)])
def test_exit_code_says_whether_a_service_serves(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch, service: str, code: int
) -> None:
    port = serve()
    assert run(monkeypatch, "--server", f"127.0.0.1:{port}", "--service", service, "--timeout", PATIENCE_SECONDS) == code


def test_a_server_that_is_not_there_does_not_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--server", "127.0.0.1:1") == 1
    assert capsys.readouterr().out == "not serving\n"


def test_an_unknown_service_is_no_plain_no(serve: Callable[..., int]) -> None:
    with pytest.raises(ModelNotFound):
        is_serving(f"127.0.0.1:{serve()}", "unknown", PATIENCE_SECONDS, Tls())


def test_tls_is_spoken_with_the_name_that_the_certificate_has(serve: Callable[..., int], certificates: Path) -> None:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    target = f"127.0.0.1:{serve(grpc.ssl_server_credentials([pair]))}"
    authority = certificates / "ca.pem"
    assert is_serving(target, "", PATIENCE_SECONDS, Tls(authority, server_name="server.example"))
    assert not is_serving(target, "", PATIENCE_SECONDS, Tls(authority))
    assert not is_serving(target, "", PATIENCE_SECONDS, Tls())


def test_a_certificate_is_shown_to_a_server_that_asks_for_one(serve: Callable[..., int], certificates: Path) -> None:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    authority = certificates / "ca.pem"
    credentials = grpc.ssl_server_credentials([pair], authority.read_bytes(), require_client_auth=True)
    target = f"127.0.0.1:{serve(credentials)}"
    ours = Tls(authority, certificates / "client.pem", certificates / "client.key", "server.example")
    assert is_serving(target, "", PATIENCE_SECONDS, ours)
    assert not is_serving(target, "", PATIENCE_SECONDS, Tls(authority, server_name="server.example"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--certificate", "a"), "without --key: --certificate and --key"),
        (("--key", "a", "--certificate", "b"), "go with --ca"),
        (("--server-name", "a"), "go with --ca"),
        (("--ca", "missing"), "missing: "),
        (("--server", ""), "--server"),
        (("--timeout", "0"), "--timeout"),
    ],
)
def test_a_wrong_argument_is_named_and_is_not_a_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert reason in capsys.readouterr().err
