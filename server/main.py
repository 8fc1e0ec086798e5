"""Server process: assembly, signals, drain and exit.

Exit codes: 0 after a drain, 1 if an engine or frontend cannot start or a store does not answer, 2 if a setting or bundle is
unusable.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

from dragoman.export.signing import Keys
from dragoman.extras import own_version
from dragoman.server import config as settings
from dragoman.server.config import ServerConfig
from dragoman.server.listening import in_url
from dragoman.server.models.discovery import FoundModel, find_models
from dragoman.server.models.loader import VersionLoader
from dragoman.server.models.manager import ModelManager
from dragoman.server.models.memory import Placement
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.models.registry import ModelRegistry
from dragoman.server.models.source import ModelSource
from dragoman.server.operators import Operators
from dragoman.server.system import Terminal, end_process, freeze_heap, return_large_blocks
from dragoman.server.telemetry import logs
from dragoman.server.telemetry.admin import AdminAccess, AdminServer
from dragoman.server.telemetry.logs import Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.server_metrics import CallerMetrics
from dragoman.server.telemetry.tracers import make_tracer
from dragoman.server.watching import Source, Watcher
from dragoman.server.workers.engines import plan_engines
from dragoman.server.workers.frontend import Frontend
from dragoman.server.workers.frontend_workers import FrontendWorkers
from dragoman.server.workers.supervisor import CannotStart, EngineCannotStart

# Time for which a closing terminal may still exist after its SIGHUP.
HANGUP_SECONDS = 1.0

log = structlog.get_logger("dragoman")


def serve(overrides: Mapping[str, Any], config_file: Path | None) -> NoReturn:
    """Serve until SIGTERM, SIGINT or loss of the terminal, then end the process.

    Raises:
        InputError: If a setting or a bundle cannot be used.
        StoreError: If there is no local bundle, and the store of `models` does not answer.
    """
    config = settings.load(overrides, config_file)
    sampler = logs.configure_logging(config.log_level, config.log_format)
    return_large_blocks()
    terminal = Terminal()
    for number in _signals():
        if number != signal.SIGINT:
            signal.signal(number, partial(_before_start, terminal))
    keys = None if config.require_signatures is None else Keys.load(config.require_signatures)
    source = ModelSource(config, keys)
    source.fetch()
    found = find_models(source.folder, config.model_files)
    with asyncio.Runner() as runner:
        end_process(runner.run(Server(config, source, found, keys, terminal, sampler).run()))


def _before_start(terminal: Terminal, number: int, _: object) -> None:
    """Exit while bundles are being checked; without a handler, process 1 of a container ignores signals."""
    if number == signal.SIGHUP and not terminal.is_gone:
        log.info("nothing is in use yet that could be read again")
        return
    log.info("stopped before the start", signal=signal.Signals(number).name)
    sys.exit(0)


class Server:
    """One server process."""

    def __init__(
        self,
        config: ServerConfig,
        source: ModelSource,
        found: list[FoundModel],
        keys: Keys | None,
        terminal: Terminal,
        sampler: Sampler,
    ) -> None:
        """Make everything that can fail on a bad setting; raise `InputError` if a setting or model cannot be used."""
        self.config, self._source = config, source
        self._terminal = terminal
        tracer = make_tracer(config, own_version()) if config.front_ends == 1 else None
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.metrics = Metrics(registry, own_version())
        self.repository: ModelRegistry = ModelRegistry()
        self._loader = VersionLoader(
            config, self.metrics, keys, num_models=lambda: len(self.manager.models), on_change=self._on_change
        )
        self._placement = Placement(
            lambda: [model.candidate() for model in self.manager.models.values()],
            lambda name: self.manager.models[name].evict(),
            keep_seconds=config.keep_loaded_seconds,
            bound_bytes=config.models_memory_bytes,
        )
        self.manager = ModelManager(
            source.folder,
            found,
            lambda model: ModelReconciler(model, self._loader, lambda: self.front, self._placement, self._publish),
            config.models_poll_seconds,
            config.model_files,
        )
        self._open_models()
        self.metrics.versions.watch(self.manager.readings)
        self._operators = Operators(config, self.manager, self.metrics, CallerMetrics())
        self.front: Frontend | FrontendWorkers
        if config.front_ends == 1:
            self.front = Frontend(config, self.repository, self.metrics, tracer, sampler, operators=self._operators.over_http)
        else:
            self.front = FrontendWorkers(config, self.repository, self.metrics, own_version(), self._operators.over_http)
        self.front.on_awaited(self._on_awaited)
        self._metrics_access = AdminAccess.of(config)
        self._watcher = Watcher(self.metrics.reloads)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal; return the exit code."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _signals():
            loop.add_signal_handler(number, self._on_signal, number, stopping)
        front = self.front
        with AdminServer(
            self.config.metrics_host,
            self.config.metrics_port,
            self.metrics.summed(front.ask),
            lambda: front.is_ready,
            self._metrics_access,
            self.manager.troubles,
        ) as admin:
            try:
                if await self._unless(stopping, self._open(admin)) and await self._unless(stopping, self._start_engines()):
                    self._spawn(self.manager.run())
                    if self._source.is_followed:
                        self._spawn(self._source.follow(self.manager.scan, self.manager.uses))
                    self._operators.begin()
                    models = self.repository.all()
                    engines = {model.name: f"{model.engine.num_replicas} x {model.engine.settings.num_threads}" for model in models}
                    names = [model.name for model in models]
                    log.info("serving", **self._console(), **self._ports(admin), models=names, engines_and_threads=engines)
                    freeze_heap()
                    await stopping.wait()
                    self._operators.drain()
                    await front.drain(self.config.drain_seconds)
            except CannotStart as error:
                log.error("cannot serve", reason=str(error))
                return 1
            finally:
                await self._operators.end()
                for task in self._tasks:
                    task.cancel()
                await front.end()
                await asyncio.gather(front.flush(), self.manager.stop())
        log.info("stopped")
        return 0

    async def _open(self, admin: AdminServer) -> None:
        """Open the ports; requests are refused until models are ready."""
        await self.front.start()
        await self._operators.start()
        self._watch()
        self._spawn(self._watcher.run())
        log.info("listening", host=self.config.host, **self._ports(admin), pid=os.getpid())

    def _ports(self, admin: AdminServer) -> dict[str, Any]:
        ports = {"port": self.front.port, "http_port": self.front.http_port, "metrics_port": admin.port}
        return {name: port for name, port in ports.items() if port is not None}

    def _console(self) -> dict[str, str]:
        if not (self.config.http and self.config.console):
            return {}
        scheme = "http" if self.config.tls_certificate is None else "https"
        host = "localhost" if self.config.http_host in settings.ANY_ADDRESS else in_url(self.config.http_host)
        return {"console": f"{scheme}://{host}:{self.front.http_port}/"}

    async def _start_engines(self) -> None:
        """Start the engines of all models; return when those required by `ready_when` are ready."""
        needed = []
        for model in self.manager.models.values():
            if self.config.ready_rule.needs(model.name, model.found.file.settings.is_ready_needed):
                needed.append(model.start())
            else:
                self._spawn(self._start_beside(model))
        await asyncio.gather(*needed)
        await self.front.until_ready()

    async def _start_beside(self, model: ModelReconciler) -> None:
        """Start the engines of an optional model; failures are logged where they are retried."""
        with contextlib.suppress(EngineCannotStart):
            await model.start(is_persistent=True)

    async def _unless(self, stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """Await `work` unless a signal comes first and cancels it; return whether it was done."""
        working, signalled = asyncio.create_task(work), asyncio.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [working, signalled]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if working.done():
            await working
            return True
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return False

    def _on_signal(self, number: int, stopping: asyncio.Event) -> None:
        """Drain, or reload on SIGHUP; a second signal ends the process, except SIGHUP, which a closing terminal may repeat."""
        if number == signal.SIGHUP:
            if not stopping.is_set():
                self._spawn(self._hang_up(stopping))
            return
        if stopping.is_set():
            log.warning("second signal, ending at once", signal=signal.Signals(number).name)
            os._exit(130)
        stopping.set()

    async def _hang_up(self, stopping: asyncio.Event) -> None:
        """Drain if the terminal is gone, else reload; a shell may signal its jobs just before its terminal closes."""
        if not self._terminal.is_gone:
            log.info("reading again what has changed")
            await asyncio.gather(self._watcher.check(), self._scan_models())
            await asyncio.sleep(HANGUP_SECONDS)
        if self._terminal.is_gone:
            stopping.set()

    async def _scan_models(self) -> None:
        await self._source.sync(self.manager.scan)
        await self.manager.scan()

    def _watch(self) -> None:
        for source in (*self.front.sources(), *self._operators.sources()):
            self._watcher.add(source)
        if (access := self._metrics_access).paths:

            def update_expiry(_: object = None) -> None:
                if access.context is not None:
                    self.metrics.reloads.set_expiry("metrics", access.expires)

            update_expiry()
            self._watcher.add(Source("metrics_access", access.paths, access.reload, update_expiry))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _open_models(self) -> None:
        """Open the models to be served from the start, for which requests wait; raise `InputError` if one cannot be."""
        self.manager.check_ready_rule(self.config.ready_rule)
        own: dict[str, ServerConfig] = {}
        bundles = []
        for name, model in self.manager.models.items():
            own[name] = model.found.file.settings.within(self.config)
            bundles += model.open_first()[:1]
        self._loader.pin(plan_engines(self.config, bundles, own))
        for name, model in self.manager.models.items():
            model.set_first_route()
            if model.route is not None:
                self.repository.publish(name, model.route)
                self._describe(name)
                self.metrics.set_ready(name, model.route.default.engine.is_ready)

    def _on_awaited(self) -> None:
        """Reconsider which models to load, as the set of models with waiting requests has changed."""
        for model in self.manager.models.values():
            model.wake()
        self._placement.note()

    def _on_change(self, name: str) -> None:
        self._publish(name)
        if (model := self.manager.models.get(name)) is not None:
            model.wake()

    def _publish(self, name: str) -> None:
        """Publish a model's state to health and metrics, unless workers do not all serve it yet."""
        if (route := self.repository.find(name)) is not None:
            self._describe(name)
            self.metrics.set_ready(name, route.default.engine.is_ready)
        self.front.update_health()

    def _describe(self, name: str) -> None:
        route = self.repository.route(name)
        model, num_slots = route.default, sum(version.max_slots for version in route.versions.values())
        num_engines = 0 if model.is_asleep else 1  # no alert for a model that is asleep
        self.metrics.add_model(name, model.version, model.manifest.precision, model.device, num_slots, num_engines)
        self.metrics.versions.add_model(name)


def _signals() -> list[signal.Signals]:
    """Return the signals to handle: SIGHUP among them, unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]
