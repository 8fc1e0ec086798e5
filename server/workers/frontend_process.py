"""The process of one frontend worker: a `Frontend`, and the pipes to the parent.

Its first message is `Start`. It exits on `Drain`, or when its standard input closes: then the parent and the engines are gone.
"""

import asyncio
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from dragoman.model.errors import InputError
from dragoman.server.config import ServerConfig
from dragoman.server.dispatch.calls import Calls
from dragoman.server.dispatch.remote import RemoteDispatcher
from dragoman.server.models.loaded import SleepingEngine
from dragoman.server.models.registry import ModelRegistry
from dragoman.server.system import end_process, freeze_heap, return_large_blocks
from dragoman.server.telemetry import logs
from dragoman.server.telemetry.logs import Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.series import take_series
from dragoman.server.telemetry.server_metrics import CallerMetrics
from dragoman.server.telemetry.tracers import make_tracer
from dragoman.server.watching import Source
from dragoman.server.workers.files import MemoryFiles
from dragoman.server.workers.frontend import Frontend
from dragoman.server.workers.messages import (
    AdminResponse,
    AwaitedModels,
    CollectMetrics,
    Drain,
    Failed,
    Files,
    FromWorker,
    LoadFailed,
    MetricsReport,
    Routes,
    Start,
    State,
    ToWorker,
    VersionAddress,
    read_message,
    to_bytes,
)
from dragoman.server.workers.operators import WorkerOperators
from dragoman.server.workers.served import ServedVersions
from dragoman.server.workers.shared_counters import UsageTable
from dragoman.server.workers.supervisor import RESTART_RETRY_SECONDS

SIGN_OF_LIFE_SECONDS = 1.0
# Metrics are also pushed, at most for a hundredth of the time, so that few are lost if the process dies.
METRICS_PAUSE = 100.0
EXIT_CANNOT_START = 3

log = structlog.get_logger("dragoman.workers")


class FrontendWorker:
    """The part of a frontend worker that communicates with the parent."""

    def __init__(self, start: Start, reader: asyncio.StreamReader, writer: asyncio.WriteTransport, sampler: Sampler) -> None:
        """Create everything that can fail, without starting it; raise `InputError` if a setting or a bundle is invalid."""
        self._start, self._reader, self._writer = start, reader, writer
        self._files = MemoryFiles(start.files)
        self._config = config = read_config(start, self._files)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._metrics = metrics = Metrics(self._registry, start.version)
        self._repository: ModelRegistry = ModelRegistry()
        self._served = ServedVersions(
            self._repository,
            self._attach,
            prepare=lambda model: self._front.service.generation.prepare(model),
            on_change=self._on_other_models,
            send=self._send,
        )
        table = UsageTable(start.table, config.front_ends, start.number)
        tracer = make_tracer(config, start.version)
        known = [route.name for route in start.routes.models if any(version.was_ready for version in route.versions)]
        self._operators: WorkerOperators | None = None
        if config.http_admin:
            self._operators = WorkerOperators(config, metrics, CallerMetrics(), self._send)
        admin_calls = None if self._operators is None else self._operators.calls
        folder = Path(start.folder)
        self._front = Frontend(config, self._repository, metrics, tracer, sampler, table.of, known, admin_calls, folder)
        self._front.on_awaited(lambda: self._send(AwaitedModels(sorted(self._repository.waiting.names))))
        self._state = State()
        self._is_listening = False
        self._drain: asyncio.Future[Drain] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the parent sends `Drain`."""
        await self._served.start(self._start.routes)
        self._describe_models()
        await self._front.start()
        self._is_listening = True
        log.info("front end listens", port=self._front.port, pid=os.getpid())
        self._publish()
        receiving = asyncio.create_task(self._receive())  # during the drain too: the parent may die
        reporting = asyncio.create_task(self._report())
        freeze_heap()
        drain = await self._drain
        if self._operators is not None:
            self._operators.drain()
        await self._front.drain(drain.seconds)
        reporting.cancel()
        await self._front.end()
        await self._front.flush()
        self._served.report_usage()
        self._send(MetricsReport(take_series(self._registry)))
        await flush(self._writer)
        receiving.cancel()

    async def _receive(self) -> None:
        """Process the parent's messages; exit when the parent is gone."""
        decoder = msgspec.msgpack.Decoder(ToWorker)
        sources = [*self._front.sources(), *(() if self._operators is None else self._operators.sources())]
        while (payload := await read_message(self._reader)) is not None:
            match decoder.decode(payload):
                case Files(contents):
                    self._files.replace(contents)
                    for source in sources:
                        await _reload(source)
                case Routes() as routes:
                    self._served.take(routes)
                case LoadFailed(model, reason, retry_after_seconds):
                    self._front.refuse_waiting(model, reason, retry_after_seconds)
                case AdminResponse() as response if self._operators is not None:
                    self._operators.receive(response)
                case CollectMetrics():
                    self._send(MetricsReport(take_series(self._registry), is_requested=True))
                case Drain() as drain if not self._drain.done():
                    self._drain.set_result(drain)
        shutil.rmtree(self._start.folder, ignore_errors=True)  # in place of the parent
        end_process(0)

    async def _report(self) -> None:
        """Send the state every second as a heartbeat, and metrics periodically."""
        loop, metrics_at = asyncio.get_running_loop(), 0.0
        while True:
            self._send(self._state)
            self._served.report_usage()
            if (began := loop.time()) >= metrics_at:
                self._send(MetricsReport(take_series(self._registry)))
                metrics_at = began + METRICS_PAUSE * (loop.time() - began)
            await asyncio.sleep(SIGN_OF_LIFE_SECONDS)

    def _publish(self) -> None:
        """Publish the state of the models to health watchers and to the parent."""
        self._front.update_health()
        if self._is_listening:
            self._state = State(is_listening=True, is_ready=self._front.is_ready)
            self._send(self._state)

    def _send(self, message: FromWorker) -> None:
        self._writer.write(to_bytes(message))

    def _on_other_models(self) -> None:
        self._describe_models()
        self._publish()

    def _describe_models(self) -> None:
        models = self._repository.all()
        self._metrics.keep_models(model.name for model in models)
        for model in models:
            # Without a device and engines: the parent has the engines' series, and removes them when a model is unloaded.
            self._metrics.add_model(model.name, model.version, model.manifest.precision, "", model.max_slots, 0)

    def _attach(self, name: str, version: VersionAddress) -> Calls:
        if version.is_asleep:
            return SleepingEngine(name, version.settings, version.num_replicas, version.device)
        where = (version.endpoint, self._start.identity, version.settings, version.num_replicas)
        return RemoteDispatcher(name, *where, RESTART_RETRY_SECONDS, on_change=self._publish)


async def _reload(source: Source) -> None:
    try:
        source.use(await asyncio.to_thread(source.load))
    except Exception:
        log.exception("cannot be used, what was read before stays in use", source=source.name)


def read_config(start: Start, files: MemoryFiles) -> ServerConfig:
    """Return the settings of a worker."""
    settings = msgspec.json.decode(start.config, type=dict[str, Any])
    ports = {"port": start.port, "http_port": start.http_port}
    return ServerConfig(**settings | ports | {name: str(path) for name, path in files.paths.items()})


async def flush(writer: asyncio.WriteTransport) -> None:
    """Wait until everything is written."""
    while writer.get_write_buffer_size():
        await asyncio.sleep(0.001)


async def serve(output: int) -> int:
    """Run the worker that the first message describes; return the exit code."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), os.fdopen(0, "rb", 0))
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(output, "wb", 0))
    if (payload := await read_message(reader)) is None:
        return 0
    start = msgspec.msgpack.decode(payload, type=Start)
    settings = msgspec.json.decode(start.config, type=dict[str, Any])
    sampler = logs.configure_logging(settings["log_level"], settings["log_format"], fields={"front_end": start.number})
    try:
        await FrontendWorker(start, reader, writer, sampler).run()
    except InputError as error:
        writer.write(to_bytes(Failed(str(error))))
        await flush(writer)
        return EXIT_CANNOT_START
    return 0


def main() -> NoReturn:
    """Run a frontend worker."""
    # The parent stops the worker; signals to the parent's process group must not.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # libraries that print must not write into the message pipe
    return_large_blocks()
    with asyncio.Runner() as runner:
        end_process(runner.run(serve(output)))


if __name__ == "__main__":
    main()
