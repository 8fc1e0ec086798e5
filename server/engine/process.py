"""Engine process: its ZeroMQ socket, its loop, and its exit.

Run as `python -m dragoman.server.engine.process` with its settings as one JSON argument. It exits on `Stop`, when its standard
input closes (the parent has ended), or when the engine is broken; the supervisor distinguishes these by exit code.
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

from dragoman.export.bundle import Bundle, BundleError
from dragoman.extras import install_command
from dragoman.model.errors import InputError
from dragoman.server.engine.engine import Engine
from dragoman.server.engine.loading import load_engine, load_scorer, platform_of_engine
from dragoman.server.engine.messages import Cancel, Command, Event, Fatal, Hello, Ready, Report, Score, Stop, Submit, Watch
from dragoman.server.engine.scoring import Scoring
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.system import end_with_parent, keep_freed_memory, trim_memory
from dragoman.server.telemetry import logs

log = structlog.get_logger("dragoman.engine")

HEARTBEAT_MILLISECONDS = 1000
# Report interval of a busy engine: on few cores, waking the frontend takes time from the next step.
REPORT_SECONDS = 0.05
# Idle time before steps are captured ahead; a request that arrives meanwhile waits for one capture.
QUIET_SECONDS = 0.1
EXIT_CANNOT_START = 3
EXIT_BROKEN = 4


class WakeUp:
    """Eventfd that wakes the loop from its poll; `set` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def set(self) -> None:
        """Wake the loop; no effect after `close`."""
        with self._lock:  # the descriptor may be closed and its number reused
            if not self._is_closed:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Reset the event."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)


class EngineLoop:
    """Engine behind a ROUTER socket, to which the dispatcher attaches with `Hello`."""

    def __init__(self, settings: EngineSettings) -> None:
        """Bind the socket; `run` loads the model, so that the dispatcher may attach meanwhile."""
        self.settings = settings
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(settings.endpoint)
        self._wake_up = WakeUp()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_up, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._dispatcher: bytes | None = None
        self._last_report = 0.0
        self._last_work = 0.0
        self._is_stopped = False
        self._is_computing = False

    def run(self) -> int:
        """Load, serve until stopped, and return the exit code."""
        try:
            engine, scoring, ready = self._load()
        except Exception as error:  # ONNX Runtime's errors have no narrower common base
            reason = _known_reason(error)
            if reason is None:
                log.exception("engine cannot start", bundle=self.settings.bundle)
            self._answer_first_hello(Fatal(reason or f"{type(error).__name__}: {error}"))
            return EXIT_CANNOT_START
        else:
            return self._serve(engine, scoring, ready)
        finally:
            self._wake_up.close()
            self._socket.close()
            self._context.term()

    def stop(self) -> None:
        """Make `run` return after its current step; callable from other threads."""
        self._is_stopped = True
        self._wake_up.set()

    @property
    def is_computing(self) -> bool:
        """Whether a scoring thread was still running when `run` returned."""
        return self._is_computing

    def _load(self) -> tuple[Engine, Scoring, Ready]:
        """Load the bundle, except the scorer on the CPU, and warm it up."""
        started = time.monotonic()
        settings = self.settings
        bundle = Bundle.open(Path(settings.bundle))
        manifest = bundle.manifest
        if settings.version not in ("", manifest.version):
            raise BundleError(
                f"{settings.bundle}: is now version {manifest.version}, but the server started with {settings.version}"
            )
        bundle.refuse_other(settings.digest)
        engine = load_engine(
            bundle, settings.limits, settings.num_threads, is_warmed_up=settings.is_warmed_up, device=settings.device
        )
        scorer = load_scorer(bundle, settings.num_threads, engine.runner)
        scoring = Scoring(scorer, settings.limits.prefill_tokens_per_step)
        runner, seconds = engine.runner, time.monotonic() - started
        ready = Ready(runner.device, settings.max_slots, seconds, platform_of_engine())
        return engine, scoring, ready

    def _serve(self, engine: Engine, scoring: Scoring, ready: Ready) -> int:
        scoring.on_done = self._wake_up.set
        self._last_work = time.monotonic()
        try:
            while not self._is_stopped:
                is_generating = engine.has_work
                if not is_generating:
                    engine.runner.rest()
                if is_generating or self._wait(_seconds_to_sleep(engine, scoring)):
                    self._receive(engine, scoring, ready)
                elif engine.is_unprepared and self._is_quiet(scoring):
                    engine.prepare()
                if engine.has_work or scoring.num_waiting:
                    self._last_work = time.monotonic()
                if engine.has_work:
                    engine.step()
                if scoring.has_work:
                    scoring.step(is_generating)
                if engine.has_news or scoring.has_news or time.monotonic() >= self._last_report + REPORT_SECONDS:
                    self._send_report(engine, scoring)
        except Exception:
            log.exception("engine is broken")
            return EXIT_BROKEN
        else:
            engine.end_all("draining")
            return 0
        finally:
            scoring.end_all("draining")
            scoring.close()
            self._is_computing = scoring.is_computing
            self._send_report(engine, scoring)

    def _wait(self, seconds: float) -> bool:
        """Sleep until a message, a wake-up or the timeout; return whether there may be messages."""
        if seconds <= 0:
            return True
        # Rounded up, so that the work is due after the poll.
        milliseconds = min(HEARTBEAT_MILLISECONDS, seconds * 1000 + 1)
        if not (ready := dict(self._poller.poll(int(milliseconds)))):
            trim_memory()
        if self._wake_up.fileno() in ready:
            self._wake_up.clear()
        return self._socket in ready

    def _is_quiet(self, scoring: Scoring) -> bool:
        return not scoring.num_waiting and time.monotonic() >= self._last_work + QUIET_SECONDS

    def _receive(self, engine: Engine, scoring: Scoring, ready: Ready) -> None:
        while True:
            try:
                origin, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match self._decoder.decode(payload):
                case Submit(requests):
                    for request in requests:
                        engine.submit(request)
                case Score(score_requests):
                    for score_request in score_requests:
                        scoring.submit(score_request)
                case Cancel(ids):
                    for request_id in ids:
                        engine.cancel(request_id)
                        scoring.cancel(request_id)
                case Watch():
                    self._send(engine.snapshot())
                case Hello():
                    self._dispatcher = origin
                    self._send(ready)
                case Stop():
                    self._is_stopped = True

    def _send_report(self, engine: Engine, scoring: Scoring) -> None:
        """Send the events since the last report; without any, a heartbeat."""
        self._last_report = time.monotonic()
        report = engine.take_report()
        statistics = report.statistics
        if scoring.num_waiting:
            statistics = msgspec.structs.replace(
                statistics,
                num_waiting=statistics.num_waiting + scoring.num_waiting,
                num_waiting_tokens=statistics.num_waiting_tokens + scoring.num_waiting_tokens,
            )
        self._send(Report(report.tokens, report.finished, statistics, scoring.take_scored(), shrunk=report.shrunk))

    def _answer_first_hello(self, event: Event) -> None:
        """Wait up to 2 s for the dispatcher to attach, and send it an event."""
        if self._socket.poll(2000):
            self._dispatcher, _ = self._socket.recv_multipart()
            self._send(event)

    def _send(self, event: Event) -> None:
        if self._dispatcher is not None:
            self._socket.send_multipart((self._dispatcher, self._encoder.encode(event)))


def _seconds_to_sleep(engine: Engine, scoring: Scoring) -> float:
    """Return the time until there is work without a message: a pair to score, or a step to prepare."""
    seconds = scoring.seconds_until_work()
    return min(seconds, QUIET_SECONDS) if engine.is_unprepared else seconds


def _known_reason(error: Exception) -> str | None:
    """Return one line for the operator; None for an unexpected error."""
    if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
        return f"onnxruntime is not installed: {install_command('cpu')}"
    if isinstance(error, MemoryError):  # of the device or the host
        detail = f" ({error})" if str(error) else ""
        return f"there is not enough memory to load it{detail}: lower max_slots or gpu_memory_gib, and see who else is there"
    return str(error) if isinstance(error, InputError) else None


def _remove_socket(endpoint: str) -> None:
    socket = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        socket.unlink()
        socket.parent.rmdir()


def main() -> int:
    """Run the engine described by the JSON argument."""
    settings = msgspec.json.decode(sys.argv[1], type=EngineSettings)
    logs.configure_logging(settings.log_level, settings.log_format)
    # The supervisor decides when an engine ends, not signals to the frontend's process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(lambda: _remove_socket(settings.endpoint))
    keep_freed_memory()
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    loop = EngineLoop(settings)
    code = loop.run()
    if loop.is_computing:
        os._exit(code)  # the interpreter would wait for the thread
    return code


if __name__ == "__main__":
    sys.exit(main())
