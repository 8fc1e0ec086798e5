"""Execution of one model's actions: open, load, self-test, publish, roll back, unload, drain.

Serving versions stay until others have replaced them, and end when no request holds them.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.models import reconcile as actions
from dragoman.server.models.discovery import FoundModel
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.loader import VersionLoader, engine_of
from dragoman.server.models.memory import NotWanted, Placement
from dragoman.server.models.policy import History
from dragoman.server.models.reconcile import Action, Canary, Idle, Loaded, LoadMode, Observed, is_in, next_canary
from dragoman.server.models.registry import CannotServe, Route
from dragoman.server.models.use import Holding, Outcomes, together
from dragoman.server.models.version import NOWHERE, Cause, Opened, Refused, State, Version
from dragoman.server.workers.supervisor import EngineCannotStart

# Pause before a route that a frontend has failed to take is published again.
RETRY_SECONDS = 10.0
# Poll interval for an engine that is started again and again.
POLL_SECONDS = 0.25
# Transient causes, with the text for clients: the reason itself may name other models, or files.
PASSING = {Cause.MEMORY: "there is no memory for it now", Cause.START: "its engine cannot be started now"}

log = structlog.get_logger("dragoman.repository")


class Front(Protocol):
    """The frontend of this process, or all frontend workers: `Frontend` or `FrontendWorkers`."""

    async def adopt(self, model: LoadedModel) -> None:
        """Prepare for requests for a version; raise `BundleError` if its files have changed or cannot be read."""

    async def publish(self, name: str, route: Route | None) -> None:
        """Route later requests for a model; raise `CannotServe` if a frontend cannot."""

    async def until_released(self, model: LoadedModel) -> None:
        """Wait until no request holds a version that has left the route."""

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return the outcomes of the requests that held a version."""
        ...

    def holding(self, model: LoadedModel) -> Holding:
        """Return the use of a version by requests."""
        ...

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for an unloaded model."""
        ...

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Fail the requests that wait for a model."""


class Executor:
    """Executes the actions of one model and observes the facts for decisions; `lock` is held while the route is changed."""

    def __init__(
        self,
        found: FoundModel,
        loader: VersionLoader,
        front: Callable[[], Front],
        placement: Placement,
        on_published: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        """Start with nothing loaded; `wake` schedules a reconciliation, `on_published` is called after a change of the route."""
        self.found, self.history, self.lock = found, History(), asyncio.Lock()
        self._loader, self._front_of, self._placement, self._on_published = loader, front, placement, on_published
        self._wake, self._metrics = wake, loader.metrics
        self.loaded = Loaded(found.name, Idle(self.keep_seconds, time.monotonic()))
        self.loading: asyncio.Task[None] | None = None
        self._name, self._waiting_reason = found.name, ""
        self._drains: dict[Version, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_published = asyncio.Event()
        self._is_published.set()

    @property
    def keep_seconds(self) -> float:
        """Idle time after which the model is unloaded."""
        own = self.found.file.settings.keep_loaded
        return self._placement.keep_seconds if own is None else own

    def observe(self) -> Observed:
        """Return the present facts for `reconcile`."""
        is_awaited, is_loading = self._front_of().is_awaited(self._name), self.loading is not None
        return Observed(time.monotonic(), self._holding(), is_awaited, is_loading, self._is_published.is_set())

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return the outcomes of the requests that held a version."""
        return self._front_of().outcomes(model)

    async def stop(self) -> None:
        """Stop all engines and cancel all running work."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(engine_of(one.loaded).stop() for one in self.loaded.versions if one.loaded is not None))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def execute(self, action: Action) -> bool:
        """Execute an action; return False if the following ones have to wait for a change."""
        loaded, versions = self.loaded, self._metrics.versions
        match action:
            case actions.Load(found, mode):
                log.info("loading a version", model=self._name, version=found.name or None, directory=str(found.directory))
                self.loading = self._spawn(self.load(loaded.known(found) or loaded.add(found), mode))
            case actions.Publish(route):
                return await (self._publish_again() if route == loaded.route else self._publish(route))
            case actions.GiveUp():
                assert loaded.route is not None
                model = loaded.route.default
                opened = Opened(model.bundle, model.tokenizers, model.templates)
                await self._notify_frontends(await self._adopt_stand_in(opened, model.label))
            case actions.Refuse(version, refused):
                self.refuse(version, refused)
                versions.swapped(self._name, "refused")
                self._drain(version)
            case actions.RollBack(version, refused):
                assert loaded.canary is not None
                await self._roll_back([version], refused, loaded.canary.fallback, "rolled_back")
            case actions.Promote():
                assert loaded.canary is not None
                tried, loaded.canary = loaded.canary.versions, None
                for version in tried:
                    version.enter(State.SERVING)
                log.info("probation passed", model=self._name, versions=[version.label for version in tried])
                versions.swapped(self._name, "done")
            case actions.Sleep(why):
                await self._sleep(why)
            case actions.Wake():
                loaded.idle.is_asleep = False
            case actions.Drain(version):
                self._drain(version)
            case actions.Forget(version):
                loaded.remove(version)
        return True

    # Publish and roll back.

    async def _publish(self, route: Route | None) -> bool:
        """Change the route; earlier versions stay until the canary check has passed."""
        loaded, before, canary = self.loaded, self.loaded.route, self.loaded.canary
        fallback = before if canary is None else canary.fallback
        new = [one for one in loaded.versions if is_in(one, route) and not is_in(one, before) and not is_in(one, fallback)]
        was_asleep = before is not None and before.default.is_asleep
        is_asleep = route is not None and route.default.is_asleep
        try:
            await self._notify_frontends(route)
        except CannotServe as error:
            if is_asleep:  # the serving versions stay, and unloading is tried again
                log.error("a front end does not let a model sleep", model=self._name, reason=str(error))
                loaded.route = before
                self.wake_later()
            else:
                await self._roll_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused", canary)
            return False
        # A check begins once frontends answer by the route.
        check = loaded.canary = next_canary(loaded, before, route, self.found.file.swap, self.outcomes, time.monotonic())
        self._update_states()
        if not (is_asleep or was_asleep):
            if check is None and new and before is not None and not before.is_stand_in:
                self._metrics.versions.swapped(self._name, "done")
            self._log_route()
        elif route is not None and not is_asleep:
            loaded.idle.note_awake(time.monotonic())
            self._metrics.versions.woken(self._name, "loaded")
            log.info("a model is awake", model=self._name)
        elif before is not None and not was_asleep:
            self._metrics.versions.slept(self._name, loaded.idle.why.value)
            log.info("a model has fallen asleep", model=self._name, why=loaded.idle.why.value)
        return True

    async def _publish_again(self) -> bool:
        try:
            await self._notify_frontends(self.loaded.route)
        except CannotServe as error:
            log.error("a front end still does not serve as it is to", model=self._name, reason=str(error))
            self.wake_later()
            return False
        self._update_states()
        return True

    async def _notify_frontends(self, route: Route | None) -> None:
        """Publish a route to the frontends; no version ends until all have taken it."""
        self.loaded.route = route
        self._is_published.clear()
        await self._front_of().publish(self._name, route)
        self._is_published.set()
        if route is None:
            self._metrics.remove_model(self._name)
        else:
            self.history.note(route.default.label)
        self._on_published(self._name)

    async def _roll_back(
        self, versions: Sequence[Version], refused: Refused, route: Route | None, outcome: str, canary: Canary | None = None
    ) -> None:
        self.loaded.canary = canary
        for version in versions:
            self.refuse(version, refused)
        try:
            await self._notify_frontends(route)
        except Exception as error:  # the refused versions end anyway, and the route is published again later
            is_expected = isinstance(error, CannotServe)
            log.error("a front end does not serve as before", model=self._name, reason=str(error), exc_info=not is_expected)
        self._update_states()
        for version in versions:
            self._drain(version)
        self._log_route()
        self._metrics.versions.swapped(self._name, outcome)
        if versions:
            self._wake()
        else:  # the wanted state has not changed
            self.wake_later()

    def _update_states(self) -> None:
        route, canary = self.loaded.route, self.loaded.canary
        for version in self.loaded.versions:
            if version.is_up:
                is_tried = canary is not None and version in canary.versions
                version.enter(State.TRIAL if is_tried else State.SERVING if is_in(version, route) else State.STANDBY)

    def _log_route(self) -> None:
        route, is_tried = self.loaded.route, self.loaded.canary is not None
        versions = {} if route is None else {label: model.version for label, model in route.versions.items()}
        default = None if route is None else route.default.label
        log.info("versions that serve", model=self._name, default=default, versions=versions, on_trial=is_tried)

    # Stand-ins for a model that cannot answer now.

    def add_stand_in(self, opened: Opened, label: str) -> Route:
        """Return a route to a stand-in, which rejects requests: its engine is never ready."""
        return self._keep_stand_in(self._loader.make(opened, self.found.file, label, range(0)))

    async def _adopt_stand_in(self, opened: Opened, label: str) -> Route:
        await self._front_of().adopt(model := self._loader.make(opened, self.found.file, label, range(0)))
        return self._keep_stand_in(model)

    def _keep_stand_in(self, model: LoadedModel) -> Route:
        self.loaded.versions.append(Version(self._name, NOWHERE, State.STANDBY, loaded=model))
        return Route.to(model, is_stand_in=True)

    async def _end_all(self, opened: Opened, label: str) -> None:
        """End all versions to free memory for another one; requests are rejected meanwhile."""
        async with self.lock:
            if self.loaded.route is not None and self.loaded.route.is_stand_in:
                return
            others = [one for one in self.loaded.versions if one.is_up]
            route = await self._adopt_stand_in(opened, label)
            self.loaded.canary = None
            await self._notify_frontends(route)
        for one in others:
            self._drain(one)
        await asyncio.gather(*self._drains.values())

    # Load.

    async def load(self, version: Version, mode: LoadMode, *, is_persistent: bool = False, is_logged: bool = True) -> None:
        """Load a version, or refuse it; `is_persistent` retries the start of its engine, `is_logged` logs a refusal."""
        versions, idle = self._metrics.versions, self.loaded.idle
        try:
            await self._bring_up(version, mode, is_persistent)
        except NotWanted:
            version.enter(State.ASLEEP)
            idle.is_asleep = True
        except Exception as error:
            refused = self._refusal(error)
            if mode == "wake" and (refused.cause is Cause.MEMORY or (refused.cause in PASSING and version.was_proved)):
                await self._end(version)
                version.enter(State.ASLEEP)
                self._note_failed_wake(refused)
                return
            self.refuse(version, refused, is_logged=is_logged)
            await self._end(version)
            if version.state is not State.REFUSED:  # retried meanwhile
                self.loaded.remove(version)
            if mode == "wake":
                versions.woken(self._name, "refused")
            elif mode in ("beside", "instead"):
                versions.swapped(self._name, "refused")
        else:
            if mode != "describe":
                version.enter(State.STANDBY)
            if mode in ("beside", "instead"):
                log.info("a version is loaded and proved", model=self._name, version=version.label, content=version.content)
        finally:
            if mode != "first":
                self.loading = None
                self._wake()

    async def _bring_up(self, version: Version, mode: LoadMode, is_persistent: bool) -> None:
        loader = self._loader
        match mode:
            case "first":
                await self._start(version, mode, is_persistent)
            case "describe":
                await self._open(version)
                await self._front_of().adopt(sleeping := self._sleeping(version))
                self._describe_asleep(version, sleeping)
            case "wake":
                async with loader.turn:
                    await self._start(version, mode)
            case _:
                async with loader.turn:
                    opened = await self._open(version)
                    if self.loaded.route is not None:
                        loader.measure(self.loaded.route.default)
                    if mode == "beside":
                        await self._start(version, mode)
                        return
                await self._end_all(opened, version.label)  # outside the lock: requests may run for long
                async with loader.turn:
                    await self._start(version, mode)

    async def _open(self, version: Version) -> Opened:
        opened = await asyncio.to_thread(self._loader.open, self._name, version.found, self.found.file)
        version.open(opened)
        return opened

    async def _start(self, version: Version, mode: LoadMode, is_persistent: bool = False) -> None:
        """Start a version's engine when there is memory, self-test it, and make it reachable from frontends."""
        opened, file, loader = version.opened, self.found.file, self._loader
        assert opened is not None
        await loader.measure_engines(opened.bundle, file, self._placement.free_bytes)
        version.has_died, version.reserved_bytes = False, loader.needed_bytes(opened.bundle, file)
        await self._make_room(version.reserved_bytes, mode)
        version.replicas = self.loaded.free_replicas(loader.num_replicas(opened.bundle, file))
        version.loaded = loader.make(
            opened,
            file,
            version.label,
            version.replicas,
            on_death=partial(self._note_death, version),
            is_observed=lambda: version.is_self_tested,
        )
        version.enter(State.STARTING)
        seconds = None if mode == "first" else loader.load_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._until_started(version, version.loaded, is_persistent)
        except EngineCannotStart as error:
            raise Refused(Cause.START, str(error).removeprefix(f"model {self._name!r}: ")) from error
        except TimeoutError:
            raise Refused(Cause.START, f"it is not ready after {seconds:g} s (load_timeout_seconds)") from None
        version.enter(State.PROVING)
        await loader.prove(version.loaded)
        await self._front_of().adopt(version.loaded)

    async def _make_room(self, needed_bytes: int, mode: LoadMode) -> None:
        """Wait until there is memory for engines; raise `Refused` or `NotWanted`."""
        if mode == "first":
            self._placement.check(needed_bytes, is_start=True)
        elif mode == "wake":
            is_wanted = lambda: self._front_of().is_awaited(self._name) or not self.loaded.idle.may_sleep  # noqa: E731
            await self._placement.make_room(self._name, needed_bytes, is_wanted)
        else:
            try:
                await self._placement.make_room(self._name, needed_bytes, lambda: True)
            except Refused as refused:
                raise Refused(refused.cause, f'{refused.reason}; swap.mode = "restart" ends what serves first') from None

    async def _until_started(self, version: Version, model: LoadedModel, is_persistent: bool) -> None:
        try:
            await engine_of(model).start(is_persistent=is_persistent)
        except EngineCannotStart:
            while not model.engine.is_ready:  # the supervisor restarts the engine and logs each failure
                is_answered = self.loaded.route is not None and not self.loaded.route.is_stand_in
                if not is_persistent or is_answered or version.found not in self.found.versions:
                    raise
                await asyncio.sleep(POLL_SECONDS)

    def refuse(self, version: Version, refused: Refused, *, is_logged: bool = True) -> None:
        """Refuse a version; its engine, if any, is stopped elsewhere."""
        version.refuse(refused)
        if version.loaded is None:
            version.let_go()
        if is_logged:
            names = {"model": self._name, "version": version.label or None, "directory": str(version.found.directory)}
            log.error("a version is refused", **names, cause=refused.cause.value, reason=refused.reason)

    def _refusal(self, error: Exception) -> Refused:
        """Return the refusal for an error; an unexpected error is logged."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, BundleError):
            return Refused(Cause.BUNDLE, str(error))
        if isinstance(error, CannotServe):  # of the stand-in's route, with `swap.mode = "restart"`
            return Refused(Cause.FRONT_END, str(error))
        log.error("a version cannot be loaded", model=self._name, exc_info=error)
        return Refused(Cause.START, f"{type(error).__name__}: {error}")

    # Idle unloading.

    async def _sleep(self, why: actions.UnloadCause) -> None:
        """Start to unload all versions that are up, and replace them by sleeping stand-ins."""
        idle = self.loaded.idle
        idle.is_asleep, idle.why, idle.is_evicted = True, why, False
        up = [version for version in self.loaded.versions if version.is_up and not version.is_stand_in]
        try:
            sleeping = [self._sleeping(version) for version in up]
        except ConfigError as error:  # the file has changed since they were loaded
            log.warning("a model does not sleep, for it could not be woken", model=self._name, reason=str(error))
            idle.is_asleep, idle.awake_since = False, time.monotonic()
            return
        for version, model in zip(up, sleeping, strict=True):
            assert version.opened is not None and version.loaded is not None
            self._loader.measure(version.loaded)
            await self._front_of().adopt(model)
            version.enter(State.RETIRING)
            successor = self.loaded.add(version.found)
            successor.open(version.opened)
            successor.was_proved = True
            self._describe_asleep(successor, model)

    def describe_first(self, version: Version) -> None:
        """Mark a version as asleep at server start."""
        self._describe_asleep(version, self._sleeping(version))

    def _sleeping(self, version: Version) -> LoadedModel:
        """Return the stand-in of an unloaded version; raise `ConfigError` if it could not be loaded again."""
        assert version.opened is not None
        device = "" if version.loaded is None else version.loaded.device
        return self._loader.sleeping(version.opened, self.found.file, version.label, device)

    def _describe_asleep(self, version: Version, sleeping: LoadedModel) -> None:
        version.sleeping = sleeping
        self._keep_stand_in(sleeping)
        version.enter(State.ASLEEP)

    def _note_failed_wake(self, refused: Refused) -> None:
        self.loaded.idle.note_failure(refused.reason, time.monotonic())
        log.warning("a model cannot be woken", model=self._name, cause=refused.cause.value, reason=refused.reason)
        self._metrics.versions.woken(self._name, "failed")
        self._waiting_reason = PASSING[refused.cause]
        self.refuse_waiting()

    def refuse_waiting(self) -> None:
        """Fail requests that wait for a model while its load is backing off."""
        if seconds := self.loaded.idle.retry_seconds(time.monotonic()):
            self._front_of().refuse_waiting(self._name, self._waiting_reason, seconds)

    # End.

    def _drain(self, version: Version) -> None:
        """End a version without a route once no request holds it; a refused one stays known."""
        if version.state is not State.REFUSED:
            version.enter(State.RETIRING)
        if not version.is_draining:
            version.is_draining = True
            self._drains[version] = self._spawn(self._drain_and_end(version))

    async def _drain_and_end(self, version: Version) -> None:
        assert version.loaded is not None
        try:
            await self._is_published.wait()
            await self._front_of().until_released(version.loaded)
            await self._end(version)
        finally:
            version.is_draining = False
            del self._drains[version]
        if version.state is not State.REFUSED:
            self.loaded.remove(version)
        self._placement.note()
        if not version.is_stand_in:
            log.info("a version has ended", model=self._name, version=version.label, content=version.content)
        self._wake()

    async def _end(self, version: Version) -> None:
        if version.loaded is not None:
            await engine_of(version.loaded).stop()
            version.loaded = None
            self._loader.forget(self._name, version.replicas)
        if version.state in (State.RETIRING, State.REFUSED):
            version.let_go()

    # Helpers.

    def _holding(self) -> Holding:
        models = [] if self.loaded.route is None else list(self.loaded.route.versions.values())
        uses = [self._front_of().holding(model) for model in models if not model.is_asleep]
        if not uses:
            return Holding(0, self.loaded.idle.awake_since, self.loaded.idle.awake_since)
        last_used, warm_until = max(use.last_used for use in uses), together(use.warm_until for use in uses)
        return Holding(sum(use.num_held for use in uses), last_used, warm_until)

    def _note_death(self, version: Version) -> None:
        version.note_death()
        self._wake()

    def wake_later(self) -> None:
        """Reconcile the model after a pause."""
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._wake)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
