"""An engine's own process: the ZeroMQ socket it listens on, its loop, and its end.

Started as `python -m server.engine.process` with its settings as JSON in one argument. It ends when told to, when its standard
input closes (the parent is gone, however it went), or when the engine is broken; the supervisor tells these apart by the exit code.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import structlog
import zmq

from export.bundle import Bundle, BundleError
from server.engine.engine import Engine
from server.engine.messages import Cancel, Command, Event, Fatal, Hello, Ready, Report, Stop, Submit
from server.engine.settings import EngineSettings
from server.engine.warmup import warm_up
from server.telemetry import logs

log = structlog.get_logger("dragoman.engine")

HEARTBEAT_MILLISECONDS = 1000
EXIT_CANNOT_START = 3
EXIT_BROKEN = 4


class EngineLoop:
    """An engine behind a ROUTER socket: front ends attach with `Hello` and are answered by identity."""

    def __init__(self, settings: EngineSettings) -> None:
        """Listen; the model is loaded by `run`, so that a front end may attach meanwhile."""
        self.settings = settings
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(settings.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._origins: set[bytes] = set()
        self._is_stopped = False

    def run(self) -> int:
        """Load, serve until stopped, and return the exit code."""
        try:
            engine, ready = self._load()
        except Exception as error:  # ONNX Runtime's have no common ancestor below it
            log.exception("engine cannot start", bundle=self.settings.bundle)
            self._answer_first_hello(Fatal(_describe(error)))
            return EXIT_CANNOT_START
        else:
            return self._serve(engine, ready)
        finally:
            self._socket.close()
            self._context.term()

    def stop(self) -> None:
        """Let `run` end after its current step; for another thread, which may not use the socket."""
        self._is_stopped = True

    def _load(self) -> tuple[Engine, Ready]:
        """Load the bundle, and run it once in every shape that matters."""
        started = time.monotonic()
        settings = self.settings
        from server.runtime.onnx import OnnxRunner  # here, so that its absence is said like any other reason not to start

        bundle = Bundle.open(Path(settings.bundle))
        manifest = bundle.manifest
        if settings.version not in ("", manifest.version):
            raise BundleError(
                f"{settings.bundle}: is now version {manifest.version}, but the server started with {settings.version}"
            )
        runner = OnnxRunner(bundle, settings.max_slots, settings.num_threads)
        if settings.is_warmed_up:
            warm_up(runner, manifest)
        engine = Engine(
            runner,
            settings.limits,
            eos_id=manifest.eos_id,
            decoder_start_id=manifest.decoder_start_id,
            max_target_tokens=manifest.max_target_tokens,
        )
        return engine, Ready(runner.device, settings.max_slots, time.monotonic() - started)

    def _serve(self, engine: Engine, ready: Ready) -> int:
        """Alternate between messages and steps; sleep on the socket when there is nothing to do."""
        while not self._is_stopped:
            try:
                if engine.has_work or self._socket.poll(HEARTBEAT_MILLISECONDS):
                    self._receive(engine, ready)
                if engine.has_work:
                    engine.step()
            except Exception:
                log.exception("engine is broken")
                self._send_reports(engine)
                return EXIT_BROKEN
            self._send_reports(engine)
        engine.remove_all("draining")
        self._send_reports(engine)
        return 0

    def _receive(self, engine: Engine, ready: Ready) -> None:
        """Take in everything that has arrived."""
        while True:
            try:
                origin, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match self._decoder.decode(payload):
                case Submit(requests):
                    for request in requests:
                        engine.submit(origin, request)
                case Cancel(ids):
                    for request_id in ids:
                        engine.cancel(origin, request_id)
                case Hello():
                    self._origins.add(origin)
                    self._send(origin, ready)
                case Stop():
                    self._is_stopped = True

    def _send_reports(self, engine: Engine) -> None:
        """Send what the iteration produced; to a front end without news, a sign of life."""
        reports = engine.take_reports()
        statistics = engine.statistics()
        for origin in self._origins | reports.keys():
            self._send(origin, reports.get(origin) or Report([], [], statistics))

    def _answer_first_hello(self, event: Event) -> None:
        """Wait a moment for the front end that started this process, and tell it."""
        if self._socket.poll(2000):
            origin, _ = self._socket.recv_multipart()
            self._send(origin, event)

    def _send(self, origin: bytes, event: Event) -> None:
        self._socket.send_multipart((origin, self._encoder.encode(event)))


def _describe(error: Exception) -> str:
    """Return one line for the operator."""
    if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
        return "onnxruntime is not installed: pip install 'dragoman[cpu]'"
    return f"{type(error).__name__}: {error}"


def exit_with_parent(endpoint: str) -> None:
    """End this process as soon as its standard input closes, which happens when the parent is gone, and tidy up in its place."""

    def wait() -> None:
        while os.read(0, 1024):  # not through sys.stdin, whose lock a thread may not hold when the interpreter ends
            pass
        socket = Path(endpoint.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            socket.unlink()
            socket.parent.rmdir()
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main() -> int:
    """Run the engine that the argument describes."""
    settings = msgspec.json.decode(sys.argv[1], type=EngineSettings)
    logs.configure_logging(settings.log_level, settings.log_format)
    # The supervisor decides when an engine ends; signals meant for the front end's group must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_with_parent(settings.endpoint)
    return EngineLoop(settings).run()


if __name__ == "__main__":
    sys.exit(main())
