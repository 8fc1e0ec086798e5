"""Queue and engine of a model on one event loop: steps are callbacks of the loop, so no process or socket is needed."""

import asyncio
import math
import os
import weakref

import structlog

from dragoman.export.bundle import Bundle
from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.engine.engine import EngineIsBroken
from dragoman.server.engine.loading import load_engine, load_scorer
from dragoman.server.engine.messages import Cancel, Command, Ready, Report, Score, Submit
from dragoman.server.engine.scoring import Scoring
from dragoman.server.engine.settings import EngineSettings, QueueLimits
from dragoman.server.system import available_cores

log = structlog.get_logger("dragoman.bulk")

# The translator bounds its requests itself.
UNLIMITED = 1 << 62

# A forked process keeps its parent's engines: ONNX Runtime would wait for their threads, which it has not, if they were collected.
_alive: "weakref.WeakSet[LocalEngine]" = weakref.WeakSet()
_inherited: "list[LocalEngine]" = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_alive))


class LocalEngine(Dispatcher):
    """Dispatcher with its only engine in the same thread; nothing is left to do once `close` was called or the engine broke."""

    num_replicas = 1

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        """Load a bundle within a running event loop; raise `BundleError` or `DeviceError` as `load_engine`."""
        limits = settings.limits
        super().__init__(bundle.manifest.name, QueueLimits(UNLIMITED, UNLIMITED), limits.prefill_tokens_per_step, retry_seconds=0.0)
        self.settings, self._loop = settings, asyncio.get_running_loop()
        num_threads = settings.num_threads or available_cores()
        self._engine = load_engine(bundle, limits, num_threads, is_warmed_up=settings.is_warmed_up, device=settings.device)
        scorer = load_scorer(bundle, num_threads, self._engine.runner)
        self._scoring = Scoring(scorer, limits.prefill_tokens_per_step)
        self._scoring.on_done = self._wake
        self._is_running = False
        _alive.add(self)
        self.open_engine(0, Ready(self._engine.runner.device, settings.max_slots, 0.0), self._receive)

    def close(self) -> None:
        """End all requests."""
        self.close_engine(0, 0.0)
        self._scoring.close()

    def _receive(self, command: Command) -> None:
        match command:
            case Submit(requests):
                for request in requests:
                    self._engine.submit(request)
            case Score(pairs):
                for pair in pairs:
                    self._scoring.submit(pair)
            case Cancel(ids):
                for request_id in ids:
                    self._engine.cancel(request_id)
                    self._scoring.cancel(request_id)
        self._run()

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        if not self._is_running and self.is_ready:
            self._is_running = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        """Run one step, deliver its report, and go on after other callbacks while there is work."""
        self._is_running = False
        engine, scoring = self._engine, self._scoring
        is_generating = engine.has_work
        try:
            if is_generating:
                engine.step()
            if scoring.num_waiting:
                scoring.step(is_generating)
        except EngineIsBroken:
            log.exception("engine is broken")
            self.close()
            return
        report = engine.take_report()
        self.hear(0, Report(report.tokens, report.finished, report.statistics, scoring.take_scored(), shrunk=report.shrunk))
        if engine.has_work:
            self._run()
            return
        engine.runner.rest()
        if scoring.num_waiting and (seconds := scoring.seconds_until_work()) < math.inf:  # else `on_done` runs it
            self._loop.call_later(seconds, self._run)
