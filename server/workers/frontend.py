"""A frontend: protocol servers, service and dispatcher clients in one process.

A single frontend runs in the parent process, several run in workers (`frontend_process.py`).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import ModelRegistry, Route
from dragoman.server.models.use import Holding, Outcomes
from dragoman.server.protocols.grpc.server import GrpcServer
from dragoman.server.protocols.http.server import HttpServer
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.batch_store import GIB, BatchStore
from dragoman.server.service.callers import Callers, Deadlines, OwnUsage, Usage
from dragoman.server.service.callers_file import read_callers_book
from dragoman.server.service.documents import DocumentStore
from dragoman.server.service.glossary_store import GlossaryStore
from dragoman.server.service.result_cache import MIB, ResultCache
from dragoman.server.service.service import Readiness, Service
from dragoman.server.system import trim_memory
from dragoman.server.telemetry.logs import REPORT_SECONDS, Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.watching import Source

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import Tracer

# Time to send the last spans, after the drain and while the engines stop.
FLUSH_SECONDS = 1.0

log = structlog.get_logger("dragoman")


class Frontend:
    """The protocols' servers and the service below them."""

    def __init__(
        self,
        config: ServerConfig,
        models: ModelRegistry,
        metrics: Metrics,
        tracer: "Tracer | None",
        sampler: Sampler,
        usage_of: Callable[[str], Usage] = OwnUsage,
        known: Iterable[str] = (),
        operators: OperatorCalls | None = None,
        shared_folder: Path | None = None,
    ) -> None:
        """Create everything that can fail, without starting it; raise `ConfigError` if the file of callers is invalid.

        `shared_folder` is that of all frontends for files of callers; None with one frontend.
        """
        self._config, self._metrics, self._tracer, self._sampler = config, metrics, tracer, sampler
        self._models = models
        deadlines = Deadlines(config.default_deadline_seconds, config.max_deadline_seconds)
        book = read_callers_book(config)
        self._callers = None if book is None else Callers(book, metrics.callers, deadlines, usage_of=usage_of)
        readiness, most = Readiness(config.ready_rule, known), config.max_text_characters
        results = ResultCache(config.result_cache_mib * MIB, is_shared=config.result_cache_shared)
        self.service = Service(models, metrics, tracer, self._callers, deadlines, readiness, most, results)
        self._operators, self._documents = operators, DocumentStore(shared_folder and shared_folder / "documents")
        self._glossaries = GlossaryStore(config.glossaries_folder or (shared_folder and shared_folder / "glossaries"))
        self._batches: BatchStore | None = None
        if (folder := config.batch_folder) is not None:
            self._batches = BatchStore(folder, int(config.batch_folder_gib * GIB))
            try:
                self._batches.open()
            except OSError as error:
                raise ConfigError(f"batch_folder: {folder}: cannot be used: {error.strerror}") from None
        self._grpc: GrpcServer | None = None
        self._http: HttpServer | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted, and `ready_when` is met."""
        return self.service.is_ready

    @property
    def grpc(self) -> GrpcServer:
        """The gRPC server, once started."""
        assert self._grpc is not None
        return self._grpc

    @property
    def port(self) -> int:
        """Port of gRPC."""
        return self.grpc.port

    @property
    def http_port(self) -> int | None:
        """Port of HTTP; None if it is off."""
        return None if self._http is None else self._http.port

    async def start(self) -> None:
        """Listen and answer; raise `ConfigError` if a port is taken or credentials cannot be used."""
        self._grpc = GrpcServer(self._config, self.service)
        if self._config.http:
            where = (self._operators, self._grpc.port, self._documents, self._glossaries, self._batches)
            self._http = HttpServer(self._config, self.service, self._grpc.tls, *where)
            await self._http.start()
        await self._grpc.start()
        self._reporting = asyncio.create_task(self._report_and_trim())

    async def until_ready(self) -> None:
        """Return at once: the frontend is ready when the models are."""

    def sources(self) -> Iterator[Source]:
        """Yield the watched files."""
        if (tls := self.grpc.tls) is not None:

            def update_expiry(_: object = None) -> None:
                self._metrics.reloads.set_expiry("server", tls.expires)

            update_expiry()
            yield Source("tls", tls.paths, tls.reload, update_expiry)
        if (path := self._config.auth_tokens_file) is not None and self._callers is not None:
            yield Source("callers", (path,), partial(read_callers_book, self._config), self._callers.replace)

    def ask(self) -> tuple[()]:
        """Return the metrics of other processes: there are none."""
        return ()

    async def adopt(self, model: LoadedModel) -> None:
        """Prepare for requests for a version, before it is published."""
        await asyncio.to_thread(self.service.generation.prepare, model)

    async def publish(self, name: str, route: Route | None) -> None:
        """Route later requests for a model."""
        self._models.publish(name, route)
        self.update_health()

    async def until_released(self, model: LoadedModel) -> None:
        """Wait until no request holds a version without a route."""
        await model.use.until_free()

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return the outcomes of a version's requests."""
        return model.use.outcomes

    def holding(self, model: LoadedModel) -> Holding:
        """Return the use of a version by requests."""
        return Holding(model.use.num_held, model.use.last_used, model.use.warm_until)

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for an unloaded model."""
        return name in self._models.waiting.names

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Fail the requests that wait for a model."""
        self._models.waiting.refuse(name, reason, retry_after_seconds)

    def on_awaited(self, call: Callable[[], None]) -> None:
        """Set the callback for changes of the models that requests wait for."""
        self._models.waiting.on_change = call

    def update_health(self) -> None:
        """Publish the state of the models to health watchers."""
        if self._grpc is not None:
            self._grpc.update_health()

    async def drain(self, seconds: float) -> None:
        """Reject new requests and let the others finish, at most for some seconds."""
        log.info("draining", num_running=self.service.num_running, seconds=seconds)
        if not await self.service.drain(seconds, self.grpc.publish_health):
            log.warning("drain time is over", num_running=self.service.num_running)

    async def end(self) -> None:
        """End the calls that still run, and log the suppressed lines."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self.service.end_calls()
        if self._http is not None:
            await self._http.stop()
        self._documents.close()
        self._glossaries.close()
        self._sampler.flush()
        self.service.calls.log_suppressed()

    async def flush(self) -> None:
        """Send the last spans, after `end`, for at most `FLUSH_SECONDS`."""
        if self._tracer is not None and not await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS):
            log.warning("the collector takes no spans, the last ones are lost", endpoint=self._config.tracing_endpoint)

    async def _report_and_trim(self) -> None:
        """Report suppressed lines of the log, and return free memory of an idle server, on and on."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._sampler.flush()
            self.service.calls.log_suppressed()
            self._documents.purge()
            if not self.service.num_running:
                trim_memory()  # gRPC's arenas keep what a flood of calls took
