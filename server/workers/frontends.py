"""Several front ends on one port: this process starts them, stands between them and the engines, and answers no caller itself.

It owns the port, a desk's socket for each model, what callers have used of their limits, and the files that front ends are handed.
"""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import structlog

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.dispatch.desk_server import DeskServer
from dragoman.server.dispatch.replicated_engine import ReplicatedEngine
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import CannotServe, Repository, Route
from dragoman.server.models.use import Holding, Outcomes, together
from dragoman.server.protocols.tls import TlsFiles
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.callers import read_callers_book, read_operators_book
from dragoman.server.service.readiness import Readiness
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.series import Series, Totals, without_gauges
from dragoman.server.telemetry.tracers import make_tracer
from dragoman.server.watching import Source
from dragoman.server.workers.frontend_supervisor import FrontEndCannotStart, KeptFrontEnd
from dragoman.server.workers.messages import Desk, Files, NotLoaded, Serve, Served, Start, Used
from dragoman.server.workers.operators import answer_order
from dragoman.server.workers.port import HeldPort
from dragoman.server.workers.served import SETTINGS, HandedBundles, SleepingDesk, read_files
from dragoman.server.workers.shared_counters import UsageTable
from dragoman.server.workers.supervisor import RestartPolicy

# Settings that are not for front ends: what they name they have otherwise, or is the business of this process.
NOT_FOR_FRONT_ENDS = frozenset(
    (*SETTINGS, "metrics_token_file", "metrics_tls_certificate", "metrics_tls_key", "admin_host", "admin_port")
)
# Longer than each of them may take.
COLLECT_SECONDS = 5.0
# Reading tokenisers, and attaching to desks.
SERVE_SECONDS = 30.0

log = structlog.get_logger("dragoman.fronts")


class FrontEnds:
    """See above; for the rest of the server they are what a `FrontEnd` is."""

    def __init__(
        self,
        config: ServerConfig,
        repository: Repository,
        metrics: Metrics,
        version: str,
        operators: OperatorCalls | None = None,
    ) -> None:
        """Take the port, and find out whether front ends will be able to start; nothing runs yet.

        Args:
            config: The settings.
            repository: The models; each has a desk.
            metrics: What this process counts.
            version: Of the server.
            operators: Carries out what operators ask for at front ends; None where none can come.

        Raises:
            ConfigError: If the port is taken, or a setting cannot be used.
        """
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
        self._held = HeldPort(config.host, config.port)
        self._held_http = HeldPort(config.http_host, config.http_port, "http_port") if config.http else None
        self._table = UsageTable.open(config.front_ends)
        self._front_ends: list[KeptFrontEnd] = []
        self._desks: dict[LoadedModel, DeskServer | SleepingDesk] = {}
        self._last_used: dict[LoadedModel, float] = {}
        self._tell_awaited: Callable[[], None] = lambda: None
        self._used: dict[LoadedModel, Outcomes] = {}
        self._ending: set[LoadedModel] = set()
        self._publishing = asyncio.Lock()
        self._numbers = itertools.count()
        self._serial = 0
        self._folder = ""
        self._news = asyncio.Event()
        self._readiness = Readiness(config.ready_rule)
        self._is_draining = False
        self._ended = Totals()
        self._ready = asyncio.Event()
        self._around = contextlib.ExitStack()

    @property
    def is_ready(self) -> bool:
        """Whether every front end takes requests, and as many of the models as `ready_when` asks for."""
        return (
            not self._is_draining
            and bool(self._front_ends)
            and all(each.state.is_ready for each in self._front_ends)
            and self._readiness.is_met(self._repository.all())
        )

    @property
    def port(self) -> int:
        """Where they listen."""
        return self._held.port

    @property
    def http_port(self) -> int | None:
        """Where they answer HTTP; None where they do not."""
        return None if self._held_http is None else self._held_http.port

    async def start(self) -> None:
        """Start all of them, and wait until all listen.

        Raises:
            FrontEndCannotStart: If one ends before.
        """
        self._loop = asyncio.get_running_loop()
        folder = self._around.enter_context(tempfile.TemporaryDirectory(prefix="dragoman-", ignore_cleanup_errors=True))
        self._folder = folder
        self._handed = HandedBundles(Path(folder) / "bundles")
        try:
            for model in self._repository.versions():
                await self.adopt(model)
        except BundleError as error:
            raise FrontEndCannotStart(str(error)) from error
        config = self._config
        policy = RestartPolicy(watchdog_seconds=config.watchdog_seconds)
        self._front_ends = [
            KeptFrontEnd(
                number,
                partial(self._describe, number),
                policy,
                on_change=self._publish,
                on_end=partial(self._clear_up, number),
                on_used=self._note_used,
                on_awaited=lambda: self._tell_awaited(),
                carry_out=None if self._operators is None else partial(answer_order, self._operators.carry_out),
            )
            for number in range(config.front_ends)
        ]
        self._metrics.front_ends.watch(self._front_ends)
        await asyncio.gather(*(each.begin() for each in self._front_ends))

    async def until_ready(self) -> None:
        """Wait until they are ready."""
        await self._ready.wait()

    def sources(self) -> Iterator[Source]:
        """Yield the files that may change while they serve; those that are found good are handed on."""
        if (tls := self._tls) is not None:

            def use(_: object = None) -> None:
                self._metrics.reloads.set_expiry("server", tls.expires)
                self._hand(_tls_files(tls))

            self._metrics.reloads.set_expiry("server", tls.expires)
            yield Source("tls", tls.paths, tls.reload, use)
        if (path := self._config.auth_tokens_file) is not None:
            yield Source("callers", (path,), self._read_callers, self._hand)
        if self._operators is not None and (path := self._config.admin_tokens_file) is not None:
            yield Source("operators_over_http", (path,), self._read_operators, self._hand)

    async def adopt(self, model: LoadedModel) -> None:
        """Have front ends be able to reach a version of a model; none does until it is published.

        Raises:
            BundleError: If its manifest and tokenisers, which front ends read, are not those any more that were opened.
        """
        await asyncio.to_thread(self._handed.add, model.bundle)
        endpoint = f"ipc://{self._folder}/desk-{next(self._numbers)}"
        self._desks[model] = SleepingDesk(endpoint) if model.is_asleep else DeskServer(endpoint, _engine_of(model).pool.desk)
        self._used[model], self._last_used[model] = Outcomes(), time.monotonic()

    async def publish(self, name: str, route: Route | None) -> None:
        """Have a model's requests that come from now on be answered so; done when every front end does.

        Raises:
            CannotServe: If one cannot; others may do so until another route is published, or the one before again.
        """
        async with self._publishing:  # what one model's route has done to a front end is not to be taken for another's doing
            before = self._repository.find(name)
            self._repository.publish(name, route)
            try:
                await self._tell()
            except CannotServe:
                self._repository.publish(name, before)
                raise
            finally:
                self.update_health()

    async def _tell(self) -> None:
        """Have all front ends serve what is in the repository.

        Raises:
            CannotServe: If one does not.
        """
        serve = self._hand_out()
        await self._until(lambda: all(each.has_served(serve.serial) for each in self._front_ends), SERVE_SECONDS)
        for each in self._front_ends:
            if each.is_listening and not each.has_served(serve.serial):
                raise CannotServe(f"front end {each.number} does not answer")
            if each.serving.serial >= serve.serial and each.serving.problem:
                raise CannotServe(f"front end {each.number}: {each.serving.problem}")

    async def until_released(self, model: LoadedModel) -> None:
        """Wait until no request holds a version that no route leads to any more, and give up what front ends needed of it."""
        server = self._desks[model]
        self._ending.add(model)
        self._hand_out()
        await self._until(lambda: not any(server.endpoint in each.holding for each in self._front_ends), None)
        server.close()
        del self._desks[model], self._used[model], self._last_used[model]
        self._ending.discard(model)
        await asyncio.to_thread(self._handed.remove, model.bundle)

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return what became of the requests that held a version, as front ends have told."""
        return self._used.get(model, Outcomes())

    def holding(self, model: LoadedModel) -> Holding:
        """Return how requests use a version, as front ends have told last, about a second ago."""
        server = self._desks.get(model)
        if server is None:
            return Holding(0, model.use.last_used, model.use.last_used)
        told = [each.held[server.endpoint] for each in self._front_ends if server.endpoint in each.held]
        num_held = sum(number for number, _ in told)
        last_used = self._last_used[model]
        warm_until = together((model.use.last_used, *(warm for _, warm in told)))
        return Holding(num_held, time.monotonic() if num_held else last_used, warm_until)

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for a model that is asleep."""
        return any(name in each.awaited for each in self._front_ends)

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Tell the requests that wait for a model that it cannot be loaded now."""
        for each in self._front_ends:
            each.refuse_waiting(NotLoaded(name, reason, retry_after_seconds))

    def on_awaited(self, tell: Callable[[], None]) -> None:
        """Have something called when other models are waited for than before."""
        self._tell_awaited = tell

    def update_health(self) -> None:
        """Take note of how the models are. Front ends are told by the desks."""
        self._readiness.note(self._repository.all())
        self._publish()

    def ask(self) -> list[Series]:
        """Return what all have counted, those that are gone among them; for another thread than the event loop's."""
        if not self._front_ends:
            return []
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(COLLECT_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Have them take no new work and finish what runs, at most so long, and end."""
        log.info("draining", front_ends=len(self._front_ends), seconds=seconds)
        self._is_draining = True
        await asyncio.gather(*(each.drain(seconds) for each in self._front_ends))

    async def end(self) -> None:
        """End those that are still there."""
        self._is_draining = True
        await asyncio.gather(*(each.drain(0) for each in self._front_ends))

    async def flush(self) -> None:
        """Give up, after `end`, what front ends needed."""
        for server in self._desks.values():
            server.close()
        self._around.close()
        self._held.close()
        if self._held_http is not None:
            self._held_http.close()

    async def _collect(self) -> list[Series]:
        await asyncio.gather(*(each.collect() for each in self._front_ends))
        return [self._ended.take(), *(each.counted for each in self._front_ends)]

    def _describe(self, number: int, identity: str) -> Start:
        """Return what an incarnation of a front end is to be told."""
        config = self._config.model_dump_json(exclude=set(NOT_FOR_FRONT_ENDS))
        return Start(
            number,
            identity,
            self.port,
            self.http_port or 0,
            config,
            self._files,
            self._serve(),
            self._folder,
            self._table.descriptor,
            self._version,
        )

    def _hand_out(self) -> Serve:
        """Tell front ends what is served, as it is now."""
        self._serial += 1
        serve = self._serve()
        for each in self._front_ends:
            each.serve(serve)
        return serve

    def _serve(self) -> Serve:
        """Return what is served, as it is now."""
        kept = [server.endpoint for model, server in self._desks.items() if model not in self._ending]
        return Serve(self._serial, [self._served(self._repository.route(model.name)) for model in self._repository.all()], kept)

    def _served(self, route: Route) -> Served:
        desks = {
            label: Desk(
                self._desks[model].endpoint,
                label,
                str(self._handed.folder_of(model.bundle)),
                model.engine.settings,
                model.engine.num_replicas,
                model.engine.is_ready,
                bool(model.device),
                model.traits,
                model.is_asleep,
                model.device if model.is_asleep else "",
            )
            for label, model in route.versions.items()
        }
        default = self._desks[route.default].endpoint
        return Served(
            route.name, default, list(desks.values()), dict(route.shares), dict(route.labels), route.sticky, route.is_stand_in
        )

    def _note_used(self, used: Used) -> None:
        """Add to what became of requests; of a version that is given up nobody asks any more."""
        now = time.monotonic()
        by_endpoint = {server.endpoint: model for model, server in self._desks.items()}
        for endpoint, outcomes in used.outcomes.items():
            if (model := by_endpoint.get(endpoint)) is not None:
                self._used[model] = self._used[model].plus(Outcomes(*outcomes))
        for endpoint in used.held:
            if (model := by_endpoint.get(endpoint)) is not None:
                self._last_used[model] = now

    async def _until(self, is_so: Callable[[], bool], seconds: float | None) -> None:
        """Wait until something is so, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    self._news.clear()
                    await self._news.wait()

    def _clear_up(self, number: int, identity: str) -> None:
        """Take back what a front end had that is gone, and keep what it had counted."""
        for server in self._desks.values():
            server.detach(identity)
        self._table.clear(number)
        self._ended.add(without_gauges(self._front_ends[number].counted))

    def _publish(self) -> None:
        self._news.set()
        if self.is_ready:
            self._ready.set()

    def _read_callers(self) -> dict[str, bytes]:
        """Return what is in the file of callers; errors as `_read_book`."""
        return self._read_book("auth_tokens_file", read_callers_book)

    def _read_operators(self) -> dict[str, bytes]:
        """Return what is in the file of operators; errors as `_read_book`."""
        return self._read_book("admin_tokens_file", read_operators_book)

    def _read_book(self, setting: str, read: Callable[[ServerConfig], object]) -> dict[str, bytes]:
        """Return what is in the file of a setting, if it can be used.

        Args:
            setting: Its name.
            read: Reads the file, and refuses what cannot be used.

        Raises:
            ConfigError: If it cannot.
        """
        before = read_files(self._config, (setting,))
        read(self._config)
        if read_files(self._config, (setting,)) != before:
            raise ConfigError(f"{setting}: {getattr(self._config, setting)}: changed while it was read")
        return before

    def _hand(self, contents: dict[str, bytes]) -> None:
        """Hand files to the front ends there are, and to those that come."""
        self._files |= contents
        for each in self._front_ends:
            each.hand(Files(contents))


def _tls_files(tls: TlsFiles) -> dict[str, bytes]:
    """Return what of the files is in use, by setting."""
    contents = tls.contents
    files = {"tls_certificate": contents.certificate, "tls_key": contents.key, "tls_client_ca": contents.client_ca}
    return {name: content for name, content in files.items() if content is not None}


def _engine_of(model: LoadedModel) -> ReplicatedEngine:
    """Return a model's engine, which has a desk wherever there are several front ends."""
    assert isinstance(model.engine, ReplicatedEngine)
    return model.engine
