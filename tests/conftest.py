"""Fixtures of all test folders."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.certificates import make_certificates

pytest_plugins = ["tests.cost", "tests.shelf"]

# Workers share the cores: pools of threads in each and in its children would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers of tests run side by side.
os.environ.setdefault("DRAGOMAN_HTTP_PORT", "0")

# An example may take long where the cores have other work.
hypothesis.settings.register_profile("shared cores", deadline=None)
hypothesis.settings.load_profile("shared cores")

# A shell has its background jobs ignore SIGINT, and nohup SIGHUP, and their children inherit that; children of tests are to end by
# these signals. A signal with a handler is reset in a child.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker ends long before another."""
    items.sort(key=lambda item: "tests/system/" not in item.nodeid)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undo that a command run in this process sends the log to the standard error of its test, which is closed afterwards."""
    root = logging.getLogger()
    level, ours = root.level, [handler for handler in root.handlers if not _is_of_pytest(handler)]
    yield
    root.handlers[:] = [*filter(_is_of_pytest, root.handlers), *ours]
    root.setLevel(level)
    if "structlog" in sys.modules:
        sys.modules["structlog"].reset_defaults()


def _is_of_pytest(handler: logging.Handler) -> bool:
    """Tell the handlers that pytest itself puts in for each phase of a test, and takes away."""
    return type(handler).__module__.startswith("_pytest")


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command of `dragoman` in this process and return its exit code, standard output and standard error."""
    from dragoman.cli import main as dragoman

    for name in [name for name in os.environ if name.startswith("DRAGOMAN_")]:
        monkeypatch.delenv(name)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dragoman", *map(str, arguments)])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Typer sets its own
        monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
        with pytest.raises(SystemExit) as ended:
            dragoman.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Folder of the Multi30k text: `DRAGOMAN_DATA`, else a `shared` folder beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
    folder = Path(os.environ.get("DRAGOMAN_DATA") or beside)
    if not (folder / "train.en.gz").exists():
        pytest.skip(f"no Multi30k text in {folder}; set DRAGOMAN_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an authority, `ca.pem`, and of what it signed: `server.pem` (server.example) and `client.pem`, with `.key`s."""
    names = {name: f"DNS:{name}.example" for name in ("server", "client")}
    return make_certificates(tmp_path_factory.mktemp("tls"), names)


class Collector:
    """An OpenTelemetry collector that keeps spans and, of each export, the attributes of the sender.

    Exports set `arrived` and are not answered before `gate` is set, as it is at first.
    """

    def __init__(self) -> None:
        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        self._response = trace_service_pb2.ExportTraceServiceResponse()
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.gate, self.arrived = threading.Event(), threading.Event()
        self.gate.set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, _: Any) -> Any:
        self.arrived.set()
        self.gate.wait()
        for group in request.resource_spans:
            self.resources.append(self.attributes(group.resource))
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)
        return self._response

    def stop(self) -> None:
        self.gate.set()
        self._server.stop(None).wait()

    def named(self, name: str) -> list[Any]:
        """Return the spans of that name, by start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano)

    def children(self, parent: Any) -> list[Any]:
        """Return the spans right below one, by start."""
        below = (span for span in self.spans if span.parent_span_id == parent.span_id)
        return sorted(below, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))

    @staticmethod
    def attributes(thing: Any) -> dict[str, Any]:
        """Return the attributes of a span or a resource."""
        values = {pair.key: pair.value for pair in thing.attributes}
        return {
            key: [item.string_value for item in value.array_value.values]
            if value.HasField("array_value")
            else getattr(value, str(value.WhichOneof("value")))
            for key, value in values.items()
        }


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A running collector of traces."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    collector = Collector()
    yield collector
    collector.stop()
