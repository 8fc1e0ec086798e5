"""The server process: put the parts together, run until a signal, drain, stop.

The exit code is 0 after a drain, 1 if an engine cannot start, 2 if a setting or a bundle cannot be used.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

from dragoman.export.bundle import Bundle
from dragoman.extras import install_command
from dragoman.server import config as settings
from dragoman.server.allocator import give_back_large_blocks
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.core.access import read_callers, read_callers_book
from dragoman.server.core.core import Core
from dragoman.server.core.deadlines import Deadlines
from dragoman.server.cores import TooFewCores, available_cores, divide_cores
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.faces.grpc.server import GrpcServer, build_server
from dragoman.server.repository import LoadedModel, Repository, check_slots, find_bundles
from dragoman.server.supervisor import EngineCannotStart, RestartPolicy, SupervisedEngine
from dragoman.server.telemetry import logs
from dragoman.server.telemetry.admin import AdminServer
from dragoman.server.telemetry.admin_access import AdminAccess
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.sampling import TELL_SECONDS, Sampler
from dragoman.server.terminal import Terminal
from dragoman.server.watching import Source, Watcher

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import Tracer

# How long the last spans may take to leave, after the drain and while the engines stop.
FLUSH_SECONDS = 1.0
# How long after a hangup the terminal may still be there that is going.
HANGUP_SECONDS = 1.0

log = structlog.get_logger("dragoman")


def serve(overrides: Mapping[str, Any], config_file: Path | None) -> NoReturn:
    """Serve until SIGTERM or SIGINT, or until the terminal is gone, and end the process.

    Args:
        overrides: Settings given as flags, by name.
        config_file: TOML file of settings.

    Raises:
        InputError: If a setting or a bundle cannot be used.
    """
    config = settings.load(overrides, config_file)
    sampler = logs.configure_logging(config.log_level, config.log_format)
    give_back_large_blocks()
    terminal = Terminal()
    for number in _signals():
        if number != signal.SIGINT:
            signal.signal(number, partial(_before_start, terminal))
    bundles = find_bundles(config.models)
    with asyncio.Runner() as runner:
        code = runner.run(Service(config, bundles, terminal, sampler).run())
        # Not through the server's own shutdown: gRPC core would end calls that it has not handed over yet as CANCELLED, which
        # nobody retries. A connection that breaks ends them as UNAVAILABLE.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the terminal may be gone
                if stream is not None:  # as it is where the process was started without one
                    stream.flush()
        os._exit(code)


def _before_start(terminal: Terminal, number: int, _: object) -> None:
    """End while bundles are still being checked: the first process of a container would not end by itself."""
    if number == signal.SIGHUP and not terminal.is_gone:
        log.info("nothing is in use yet that could be read again")
        return
    log.info("stopped before the start", signal=signal.Signals(number).name)
    sys.exit(0)


class Service:
    """One server process."""

    def __init__(self, config: ServerConfig, bundles: list[Bundle], terminal: Terminal, sampler: Sampler) -> None:
        """Make everything that can fail on a bad setting; nothing runs yet.

        Args:
            config: The settings.
            bundles: What to serve.
            terminal: The one that the process was started in.
            sampler: What leaves out other libraries' log lines.
        """
        self.config = config
        self._terminal = terminal
        self._sampler = sampler
        for bundle in bundles:
            check_slots(bundle, config.max_slots, config.max_slots_per_request)
        self._engine_cores = _pin(config, bundles) if config.pin_engines else {}
        self._tracer = _make_tracer(config)
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.metrics = Metrics(registry, config.latency_buckets, _version())
        self._num_threads = config.num_threads or max(1, available_cores() // len(bundles))
        self.repository = Repository(bundles, self._make_engine)
        for model in self.repository.all():
            self._describe(model)
        deadlines = Deadlines(config.default_deadline_seconds, config.max_deadline_seconds)
        self._callers = read_callers(config, self.metrics, deadlines)
        self.core = Core(self.repository, self.metrics, self._tracer, self._callers, deadlines)
        self._face: GrpcServer | None = None
        self._metrics_access = AdminAccess.of(config)
        self._watcher = Watcher(self.metrics.reloads)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal; return the exit code."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _signals():
            loop.add_signal_handler(number, self._on_signal, number, stopping)
        face = self._face = build_server(self.config, self.core)
        with AdminServer(
            self.config.metrics_host,
            self.config.metrics_port,
            self.metrics.wsgi_app(),
            lambda: self.core.is_ready,
            self._metrics_access,
        ) as admin:
            await face.start()
            self._watch(face)
            self._spawn(self._watcher.run())
            self._spawn(self._tell_suppressed())
            log.info("listening", host=self.config.host, port=face.port, metrics_port=admin.port, pid=os.getpid())
            try:
                if await self._start_engines(stopping):
                    names = [model.name for model in self.repository.all()]
                    log.info("serving", port=face.port, metrics_port=admin.port, models=names, num_threads=self._num_threads)
                    gc.collect()
                    gc.freeze()  # what is there now stays: the collector need not look at it while requests wait
                    gc.set_threshold(10_000, 20, 100)
                    await stopping.wait()
                    await self._drain(face)
            except EngineCannotStart as error:
                log.error("cannot serve", reason=str(error))
                return 1
            finally:
                for task in self._tasks:
                    task.cancel()
                await self.core.end_calls()
                self._sampler.tell()
                self.core.calls.records.tell_suppressed()
                await asyncio.gather(self._flush_spans(), *(model.engine.stop() for model in self.repository.all()))
        log.info("stopped")
        return 0

    async def _start_engines(self, stopping: asyncio.Event) -> bool:
        """Start every engine at once; return whether all are ready, which they are not if a signal came first."""
        starting = asyncio.gather(*(model.engine.start() for model in self.repository.all()))
        signalled = asyncio.create_task(stopping.wait())
        either: list[asyncio.Future[Any]] = [starting, signalled]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if starting.done():
            await starting
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def _drain(self, face: GrpcServer) -> None:
        log.info("draining", num_running=self.core.num_running, seconds=self.config.drain_seconds)
        if not await self.core.drain(self.config.drain_seconds, face.tell_health):
            log.warning("drain time is over", num_running=self.core.num_running)

    async def _flush_spans(self) -> None:
        """Send what has been traced; a collector that does not answer is not waited for."""
        if self._tracer is not None and not await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS):
            log.warning("the collector takes no spans, the last ones are lost", endpoint=self.config.tracing_endpoint)

    def _on_signal(self, number: int, stopping: asyncio.Event) -> None:
        """Begin to drain, or with SIGHUP read files again, unless it says that the terminal is gone.

        A second signal ends the process at once, but a terminal that closes may send more than one SIGHUP.
        """
        if number == signal.SIGHUP:
            if not stopping.is_set():
                self._spawn(self._hang_up(stopping))
            return
        if stopping.is_set():
            log.warning("second signal, ending at once", signal=signal.Signals(number).name)
            os._exit(130)
        stopping.set()

    async def _hang_up(self, stopping: asyncio.Event) -> None:
        """Drain if the terminal is gone; read files again, if not. A shell that ends may tell its jobs a moment before it goes."""
        if not self._terminal.is_gone:
            log.info("reading again what has changed")
            await self._watcher.check()
            await asyncio.sleep(HANGUP_SECONDS)
        if self._terminal.is_gone:
            stopping.set()

    def _watch(self, face: GrpcServer) -> None:
        """Watch the files that may change while the server runs."""
        if (tls := face.tls) is not None:

            def tell_expiry(_: object = None) -> None:
                self.metrics.reloads.set_expiry("server", tls.expires)

            tell_expiry()
            self._watcher.add(Source("tls", tls.paths, tls.reload, tell_expiry))
        if (access := self._metrics_access).paths:
            self._watcher.add(Source("metrics_access", access.paths, access.reload))
        if (path := self.config.auth_tokens_file) is not None and self._callers is not None:
            read = partial(read_callers_book, self.config)
            self._watcher.add(Source("callers", (path,), read, self._callers.replace))

    async def _tell_suppressed(self) -> None:
        """Tell now and then how many lines were left out of the log."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self._sampler.tell()
            self.core.calls.records.tell_suppressed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make_engine(self, bundle: Bundle) -> SupervisedEngine:
        config, name = self.config, bundle.manifest.name
        engine_settings = EngineSettings(
            endpoint="",
            bundle=str(bundle.directory),
            num_threads=self._num_threads,
            max_slots=config.max_slots,
            max_slots_per_request=config.max_slots_per_request,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            prefill_tokens_per_step=config.prefill_tokens_per_step,
            max_ahead=config.max_ahead,
            is_warmed_up=config.warmup,
            log_level=config.log_level,
            log_format=config.log_format,
            version=bundle.manifest.version,
            device=DeviceSettings(
                config.device, int(config.gpu_memory_gib * 2**30), config.gpu_row_buckets, config.gpu_capacity_buckets
            ),
            cores=self._engine_cores.get(name, ()),
        )
        policy = RestartPolicy(config.restart_backoff_initial_seconds, config.restart_backoff_max_seconds, config.watchdog_seconds)
        return SupervisedEngine(
            name,
            engine_settings,
            policy,
            is_inline=config.engine == "inline",
            on_statistics=lambda statistics: self.metrics.observe_statistics(name, statistics),
            on_change=lambda: self._publish(name),
            on_restart=lambda: self.metrics.observe_restart(name),
        )

    def _publish(self, name: str) -> None:
        """Tell health and metrics how a model is now."""
        model = self.repository.get(name)
        if model.engine.ready is not None:
            self._describe(model)
            self.metrics.observe_load(name, model.engine.ready.load_seconds)
        self.metrics.set_process(name, model.engine.process_id)
        self.metrics.set_ready(name, model.engine.is_ready)
        if self._face is not None:
            self._face.update_health()

    def _describe(self, model: LoadedModel) -> None:
        self.metrics.add_model(model.name, model.version, model.manifest.precision, model.device, model.max_slots)


def _signals() -> list[signal.Signals]:
    """Return the signals that we hear: SIGHUP among them, unless nohup has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


def _make_tracer(config: ServerConfig) -> "Tracer | None":
    """Return what makes spans, if any are wanted.

    Raises:
        ConfigError: If OpenTelemetry is not installed or cannot use its own settings.
    """
    if not config.tracing_endpoint:
        return None
    try:
        from dragoman.server.telemetry.tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(f"tracing_endpoint: OpenTelemetry is not installed; {install_command('tracing')}") from error
    try:
        return Tracer(config.tracing_endpoint, config.tracing_sample_ratio, _version())
    except Exception as error:  # OpenTelemetry reads variables of its own, each with errors of its own
        raise ConfigError(f"tracing_endpoint: a variable OTEL_* cannot be used: {error}") from error


def _pin(config: ServerConfig, bundles: list[Bundle]) -> dict[str, tuple[int, ...]]:
    """Return the cores that each model's engine is to keep to.

    Raises:
        ConfigError: If there are too few.
    """
    try:
        cores = divide_cores(len(bundles), config.num_threads)
    except TooFewCores as error:
        raise ConfigError(f"pin_engines: {error}") from error
    return dict(zip((bundle.manifest.name for bundle in bundles), cores, strict=True))


def _version() -> str:
    try:
        return version("dragoman")
    except PackageNotFoundError:
        return "unknown"
