"""A front end: what one process needs to answer callers, from the port to the engines' clients. Engines are not its business.

It lives in the process that was started where that is the only front end, or in each of several (`workers/frontend_process.py`).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import structlog

from dragoman.server.config import ServerConfig
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import Repository, Route
from dragoman.server.models.use import Holding, Outcomes
from dragoman.server.protocols.grpc.server import GrpcServer, build_server
from dragoman.server.protocols.http.server import HttpServer
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.callers import Callers, Deadlines, OwnUsage, Usage
from dragoman.server.service.callers_file import read_callers_book
from dragoman.server.service.service import Core, Readiness
from dragoman.server.telemetry.logs import TELL_SECONDS, Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.watching import Source

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import Tracer

# How long the last spans may take to leave, after the drain and while the engines stop.
FLUSH_SECONDS = 1.0

log = structlog.get_logger("dragoman")


class FrontEnd:
    """See above.

    Attributes:
        core: What answers.
    """

    def __init__(
        self,
        config: ServerConfig,
        models: Repository,
        metrics: Metrics,
        tracer: "Tracer | None",
        sampler: Sampler,
        usage_of: Callable[[str], Usage] = OwnUsage,
        known: Iterable[str] = (),
        operators: OperatorCalls | None = None,
    ) -> None:
        """Make everything that can fail on a bad setting; nothing runs yet.

        Args:
            config: The settings.
            models: What is served; may change.
            metrics: Where it counts.
            tracer: What makes spans; None for none.
            sampler: What leaves out other libraries' log lines.
            usage_of: Returns what a caller of a name has used of its limits.
            known: Names of models that have been ready before.
            operators: The way in for operators over HTTP; None if there is none.

        Raises:
            ConfigError: If the file of callers cannot be used.
        """
        self._config, self._metrics, self._tracer, self._sampler = config, metrics, tracer, sampler
        self._models = models
        deadlines = Deadlines(config.default_deadline_seconds, config.max_deadline_seconds)
        book = read_callers_book(config)
        self._callers = None if book is None else Callers(book, metrics.callers, deadlines, usage_of=usage_of)
        self.core = Core(models, metrics, tracer, self._callers, deadlines, Readiness(config.ready_rule, known))
        self._operators = operators
        self._face: GrpcServer | None = None
        self._http: HttpServer | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, and as many of its models as `ready_when` asks for."""
        return self.core.is_ready

    @property
    def face(self) -> GrpcServer:
        """What listens, once it does."""
        assert self._face is not None
        return self._face

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.face.port

    @property
    def http_port(self) -> int | None:
        """Where it answers HTTP; None where it does not."""
        return None if self._http is None else self._http.port

    async def start(self) -> None:
        """Listen and begin to answer.

        Raises:
            ConfigError: If a port is taken or credentials cannot be used.
        """
        self._face = build_server(self._config, self.core)
        if self._config.http:
            self._http = HttpServer(self._config, self.core, self._face.tls, self._operators, self._face.port)
            await self._http.start()
        await self._face.start()
        self._telling = asyncio.create_task(self._tell_suppressed())

    async def until_ready(self) -> None:
        """Do nothing: it is ready when the models are."""

    def sources(self) -> Iterator[Source]:
        """Yield the files that may change while it serves."""
        if (tls := self.face.tls) is not None:

            def tell_expiry(_: object = None) -> None:
                self._metrics.reloads.set_expiry("server", tls.expires)

            def use(_: object = None) -> None:
                tell_expiry()
                if self._http is not None:
                    self._http.renew()

            tell_expiry()
            yield Source("tls", tls.paths, tls.reload, use)
        if (path := self._config.auth_tokens_file) is not None and self._callers is not None:
            yield Source("callers", (path,), partial(read_callers_book, self._config), self._callers.replace)

    def ask(self) -> tuple[()]:
        """Return what other processes have counted: there are none."""
        return ()

    async def adopt(self, model: LoadedModel) -> None:
        """Be ready for requests for a version of a model; none gets it until it is published."""
        await asyncio.to_thread(self.core.generation.prepare, model)

    async def publish(self, name: str, route: Route | None) -> None:
        """Have a model's requests that come from now on be answered so."""
        self._models.publish(name, route)
        self.update_health()

    async def until_released(self, model: LoadedModel) -> None:
        """Wait until no request holds a version that no route leads to any more."""
        await model.use.until_free()

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return what became of the requests that held a version."""
        return model.use.outcomes

    def holding(self, model: LoadedModel) -> Holding:
        """Return how requests use a version."""
        return Holding(model.use.num_held, model.use.last_used, model.use.warm_until)

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for a model that is asleep."""
        return name in self._models.waiting.names

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Tell the requests that wait for a model that it cannot be loaded now."""
        self._models.waiting.refuse(name, reason, retry_after_seconds)

    def on_awaited(self, tell: Callable[[], None]) -> None:
        """Have something called when other models are waited for than before."""
        self._models.waiting.on_change = tell

    def update_health(self) -> None:
        """Publish how the models are now."""
        if self._face is not None:
            self._face.update_health()

    async def drain(self, seconds: float) -> None:
        """Take no new work and let what runs finish, at most so long."""
        log.info("draining", num_running=self.core.num_running, seconds=seconds)
        if not await self.core.drain(seconds, self.face.tell_health):
            log.warning("drain time is over", num_running=self.core.num_running)

    async def end(self) -> None:
        """End what still runs, and say the last words but spans; the process is to end after that."""
        if self._telling is not None:
            self._telling.cancel()
        await self.core.end_calls()
        if self._http is not None:
            await self._http.stop()
        self._sampler.tell()
        self.core.calls.records.tell_suppressed()

    async def flush(self) -> None:
        """Send what has been traced, after `end`; a collector that does not answer is not waited for."""
        if self._tracer is not None and not await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS):
            log.warning("the collector takes no spans, the last ones are lost", endpoint=self._config.tracing_endpoint)

    async def _tell_suppressed(self) -> None:
        """Tell now and then how many lines were left out of the log."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self._sampler.tell()
            self.core.calls.records.tell_suppressed()
