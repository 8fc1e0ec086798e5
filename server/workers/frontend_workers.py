"""Several frontend workers on one port, as seen by the parent, which answers no caller itself.

The parent owns the port, a dispatcher socket for each version, the shared counters, and the files that workers read.
"""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.dispatch.remote import DispatcherServer
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import CannotServe, ModelRegistry, Route
from dragoman.server.models.use import Holding, Outcomes, together
from dragoman.server.protocols.tls import TlsFiles
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.callers_file import read_callers_book, read_operators_book
from dragoman.server.service.service import Readiness
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.series import Series, add_up, without_gauges
from dragoman.server.telemetry.tracers import make_tracer
from dragoman.server.watching import Source
from dragoman.server.workers.files import FILE_SETTINGS, BundleCopies, read_files
from dragoman.server.workers.frontend_supervisor import FrontendSupervisor
from dragoman.server.workers.messages import Files, LoadFailed, ModelRoute, Routes, Start, UsageReport, VersionAddress
from dragoman.server.workers.operators import answer_admin_request
from dragoman.server.workers.pool import ReplicaPool
from dragoman.server.workers.port import BoundPort
from dragoman.server.workers.shared_counters import UsageTable
from dragoman.server.workers.supervisor import CannotStart, RestartPolicy

# Settings that are not sent to workers: files, which are sent as content, and settings of the parent's own ports.
PARENT_SETTINGS = frozenset(
    (*FILE_SETTINGS, "metrics_token_file", "metrics_tls_certificate", "metrics_tls_key", "admin_host", "admin_port")
)
# Longer than `COLLECT_SECONDS` of a single worker.
COLLECT_SECONDS = 5.0
# Bound on reading tokenizers and connecting to dispatchers.
SERVE_SECONDS = 30.0

log = structlog.get_logger("dragoman.workers")


@dataclass(slots=True, eq=False)
class _Adopted:
    """A version that workers can reach: its dispatcher's address and socket (none while asleep), and the workers' reports."""

    endpoint: str
    server: DispatcherServer | None
    outcomes: Outcomes = field(default_factory=Outcomes)
    last_used: float = field(default_factory=time.monotonic)
    is_ending: bool = False


class FrontendWorkers:
    """The frontend workers of a server, with the interface of a `Frontend`."""

    def __init__(
        self,
        config: ServerConfig,
        repository: ModelRegistry,
        metrics: Metrics,
        version: str,
        operators: OperatorCalls | None = None,
    ) -> None:
        """Bind the ports, without starting workers; raise `ConfigError` if a port is taken, or a setting is invalid."""
        self._operators = operators
        self._config, self._repository, self._metrics, self._version = config, repository, metrics, version
        self._tls = TlsFiles.of(config)
        if config.auth_tokens_file is not None:
            self._read_callers()
        if (tracer := make_tracer(config, version)) is not None:
            tracer.close(0)
        self._files = read_files(config, ("auth_tokens_file",)) | ({} if self._tls is None else _tls_files(self._tls))
        if operators is not None:
            self._files |= self._read_operators()
        self._grpc_port = BoundPort(config.host, config.port)
        self._http_port = BoundPort(config.http_host, config.http_port, "http_port") if config.http else None
        self._table = UsageTable.open(config.front_ends)
        self._workers: list[FrontendSupervisor] = []
        self._adopted: dict[LoadedModel, _Adopted] = {}
        self._on_awaited: Callable[[], None] = lambda: None
        self._publishing = asyncio.Lock()
        self._numbers = itertools.count()
        self._serial = 0
        self._folder = ""
        self._changed = asyncio.Event()
        self._readiness = Readiness(config.ready_rule)
        self._is_draining = False
        self._ended: Series = {}
        self._ready = asyncio.Event()
        self._resources = contextlib.ExitStack()

    @property
    def is_ready(self) -> bool:
        """Whether every worker accepts requests, and `ready_when` is met."""
        return (
            not self._is_draining
            and bool(self._workers)
            and all(worker.state.is_ready for worker in self._workers)
            and self._readiness.is_met(self._repository.all())
        )

    @property
    def port(self) -> int:
        """Port of gRPC."""
        return self._grpc_port.port

    @property
    def http_port(self) -> int | None:
        """Port of HTTP; None if it is off."""
        return None if self._http_port is None else self._http_port.port

    async def start(self) -> None:
        """Start the workers, and wait until all listen; raise `CannotStart` if a worker exits before."""
        self._loop = asyncio.get_running_loop()
        folder = tempfile.TemporaryDirectory(prefix="dragoman-", ignore_cleanup_errors=True)
        self._folder = self._resources.enter_context(folder)
        self._bundles = BundleCopies(Path(self._folder) / "bundles")
        try:
            for model in self._repository.versions():
                await self.adopt(model)
        except BundleError as error:
            raise CannotStart(str(error)) from error
        config = self._config
        policy = RestartPolicy(watchdog_seconds=config.watchdog_seconds)
        self._workers = [
            FrontendSupervisor(
                number,
                partial(self._describe, number),
                policy,
                [self._table.descriptor],
                on_change=self._note_change,
                on_end=partial(self._clear_up, number),
                on_usage=self._note_usage,
                on_awaited=lambda: self._on_awaited(),
                carry_out=None if self._operators is None else partial(answer_admin_request, self._operators.carry_out),
            )
            for number in range(config.front_ends)
        ]
        self._metrics.watch_front_ends(lambda: [(each.number, each.is_listening, each.num_restarts) for each in self._workers])
        await asyncio.gather(*(worker.begin() for worker in self._workers))

    async def until_ready(self) -> None:
        """Wait until the workers are ready."""
        await self._ready.wait()

    def sources(self) -> Iterator[Source]:
        """Yield the watched files; valid contents are sent to the workers."""
        if (tls := self._tls) is not None:

            def use(_: object = None) -> None:
                self._metrics.reloads.set_expiry("server", tls.expires)
                self._send_files(_tls_files(tls))

            self._metrics.reloads.set_expiry("server", tls.expires)
            yield Source("tls", tls.paths, tls.reload, use)
        if (path := self._config.auth_tokens_file) is not None:
            yield Source("callers", (path,), self._read_callers, self._send_files)
        if self._operators is not None and (path := self._config.admin_tokens_file) is not None:
            yield Source("operators_over_http", (path,), self._read_operators, self._send_files)

    async def adopt(self, model: LoadedModel) -> None:
        """Make a version reachable for workers; raise `BundleError` if its manifest or tokenizer files have changed."""
        await asyncio.to_thread(self._bundles.add, model.bundle)
        endpoint = f"ipc://{self._folder}/dispatcher-{next(self._numbers)}"
        server = DispatcherServer(endpoint, model.engine) if isinstance(model.engine, ReplicaPool) else None
        self._adopted[model] = _Adopted(endpoint, server)

    async def publish(self, name: str, route: Route | None) -> None:
        """Route later requests for a model; return when every worker does.

        Raises:
            CannotServe: If a worker cannot; the others keep the failed route until the next `publish`.
        """
        async with self._publishing:  # a worker's problem belongs to the last published route
            before = self._repository.find(name)
            self._repository.publish(name, route)
            try:
                await self._publish_routes()
            except CannotServe:
                self._repository.publish(name, before)
                raise
            finally:
                self.update_health()

    async def until_released(self, model: LoadedModel) -> None:
        """Wait until no request holds a version without a route, and release its resources."""
        adopted = self._adopted[model]
        adopted.is_ending = True
        self._send_routes()
        await self._until(lambda: not any(adopted.endpoint in worker.holding for worker in self._workers), None)
        if adopted.server is not None:
            adopted.server.close()
        del self._adopted[model]
        await asyncio.to_thread(self._bundles.remove, model.bundle)

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return the outcomes of a version's requests, as last reported."""
        return Outcomes() if (adopted := self._adopted.get(model)) is None else adopted.outcomes

    def holding(self, model: LoadedModel) -> Holding:
        """Return the use of a version by requests, as reported by workers about a second ago."""
        if (adopted := self._adopted.get(model)) is None:
            return Holding(0, model.use.last_used, model.use.last_used)
        held = [worker.held[adopted.endpoint] for worker in self._workers if adopted.endpoint in worker.held]
        num_held = sum(number for number, _ in held)
        warm_until = together((model.use.last_used, *(warm for _, warm in held)))
        return Holding(num_held, time.monotonic() if num_held else adopted.last_used, warm_until)

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for an unloaded model."""
        return any(name in worker.awaited for worker in self._workers)

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Fail the requests that wait for a model."""
        for worker in self._workers:
            worker.send(LoadFailed(name, reason, retry_after_seconds))

    def on_awaited(self, call: Callable[[], None]) -> None:
        """Set the callback for changes of the models that requests wait for."""
        self._on_awaited = call

    def update_health(self) -> None:
        """Update the readiness of the models; workers learn it from the dispatchers."""
        self._readiness.note(self._repository.all())
        self._note_change()

    def ask(self) -> list[Series]:
        """Return the metrics of all workers, exited ones included; not callable on the event loop's thread."""
        if not self._workers:
            return []
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(COLLECT_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Reject new requests, let the others finish for at most some seconds, and stop the workers."""
        log.info("draining", front_ends=len(self._workers), seconds=seconds)
        self._is_draining = True
        await asyncio.gather(*(worker.drain(seconds) for worker in self._workers))

    async def end(self) -> None:
        """Stop the remaining workers."""
        self._is_draining = True
        await asyncio.gather(*(worker.drain(0) for worker in self._workers))

    async def flush(self) -> None:
        """Release, after `end`, the workers' resources."""
        for adopted in self._adopted.values():
            if adopted.server is not None:
                adopted.server.close()
        self._resources.close()
        self._grpc_port.close()
        if self._http_port is not None:
            self._http_port.close()

    async def _collect(self) -> list[Series]:
        await asyncio.gather(*(worker.collect() for worker in self._workers))
        return [self._ended, *(worker.counted for worker in self._workers)]

    def _describe(self, number: int, identity: str) -> Start:
        return Start(
            number,
            identity,
            self.port,
            self.http_port or 0,
            self._config.model_dump_json(exclude=set(PARENT_SETTINGS)),
            self._files,
            self._routes(),
            self._folder,
            self._table.descriptor,
            self._version,
        )

    async def _publish_routes(self) -> None:
        """Send the repository's routes and wait until every worker has taken them; raise as `publish`."""
        serial = self._send_routes()
        await self._until(lambda: all(worker.has_taken(serial) for worker in self._workers), SERVE_SECONDS)
        for worker in self._workers:
            if worker.is_listening and not worker.has_taken(serial):
                raise CannotServe(f"front end {worker.number} does not answer")
            if worker.taken.serial >= serial and worker.taken.problem:
                raise CannotServe(f"front end {worker.number}: {worker.taken.problem}")

    def _send_routes(self) -> int:
        """Send the present routes to the workers; return the serial number of the message."""
        self._serial += 1
        routes = self._routes()
        for worker in self._workers:
            worker.set_routes(routes)
        return self._serial

    def _routes(self) -> Routes:
        kept = [adopted.endpoint for adopted in self._adopted.values() if not adopted.is_ending]
        return Routes(
            self._serial, [self._model_route(self._repository.route(model.name)) for model in self._repository.all()], kept
        )

    def _model_route(self, route: Route) -> ModelRoute:
        versions = [
            VersionAddress(
                self._adopted[model].endpoint,
                label,
                str(self._bundles.folder_of(model.bundle)),
                model.engine.settings,
                model.engine.num_replicas,
                model.engine.is_ready,
                bool(model.device),
                model.traits,
                model.is_asleep,
                model.device if model.is_asleep else "",
            )
            for label, model in route.versions.items()
        ]
        default = self._adopted[route.default].endpoint
        return ModelRoute(route.name, default, versions, dict(route.shares), dict(route.labels), route.sticky, route.is_stand_in)

    def _note_usage(self, usage: UsageReport) -> None:
        now = time.monotonic()
        for adopted in self._adopted.values():
            if (outcomes := usage.outcomes.get(adopted.endpoint)) is not None:
                adopted.outcomes = adopted.outcomes.plus(outcomes)
            if adopted.endpoint in usage.held:
                adopted.last_used = now

    async def _until(self, is_so: Callable[[], bool], seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()

    def _clear_up(self, number: int, identity: str) -> None:
        """End the requests of an exited worker process, and keep its counters."""
        for adopted in self._adopted.values():
            if adopted.server is not None:
                adopted.server.detach(identity)
        self._table.clear(number)
        self._ended = add_up([self._ended, without_gauges(self._workers[number].counted)])

    def _note_change(self) -> None:
        self._changed.set()
        if self.is_ready:
            self._ready.set()

    def _read_callers(self) -> dict[str, bytes]:
        return self._read_book("auth_tokens_file", read_callers_book)

    def _read_operators(self) -> dict[str, bytes]:
        return self._read_book("admin_tokens_file", read_operators_book)

    def _read_book(self, setting: str, read: Callable[[ServerConfig], object]) -> dict[str, bytes]:
        """Return the content of a setting's file; raise `ConfigError` if it is invalid or changes meanwhile."""
        before = read_files(self._config, (setting,))
        read(self._config)
        if read_files(self._config, (setting,)) != before:
            raise ConfigError(f"{setting}: {getattr(self._config, setting)}: changed while it was read")
        return before

    def _send_files(self, contents: dict[str, bytes]) -> None:
        """Send files to the workers, and keep them for workers that start later."""
        self._files |= contents
        for worker in self._workers:
            worker.send(Files(contents))


def _tls_files(tls: TlsFiles) -> dict[str, bytes]:
    contents = tls.contents
    files = {"tls_certificate": contents.certificate, "tls_key": contents.key, "tls_client_ca": contents.client_ca}
    return {name: content for name, content in files.items() if content is not None}
