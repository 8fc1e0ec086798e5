"""The versions of one model, reconciled with its folder, its `model.toml` and the wishes of operators.

`reconcile` decides; this executes: open, load, self-test, publish, roll back, unload, drain. Versions that serve go on until others
have taken their place, and end when no request holds them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Container, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import ConfigError
from dragoman.server.models import reconcile as actions
from dragoman.server.models.discovery import FoundModel
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.loader import VersionLoader
from dragoman.server.models.memory import Candidate, NotWanted, Placement
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.policy import NO_OVERRIDES, History, Overrides, Wanted
from dragoman.server.models.reconcile import (
    Action,
    Idle,
    Load,
    Loaded,
    Observed,
    is_in,
    missing,
    next_canary,
    reconcile,
    route_to,
    target_of,
)
from dragoman.server.models.registry import CannotServe, Route
from dragoman.server.models.use import Holding, Outcomes, together
from dragoman.server.models.version import NOWHERE, Cause, Opened, Refused, State, Version
from dragoman.server.telemetry.server_metrics import VersionReading
from dragoman.server.workers.supervisor import EngineCannotStart

# Between two observations of a canary check, and of an engine that is started again and again.
WATCH_SECONDS = 0.25
# Before frontends that could not be told of a route are told again.
RETRY_SECONDS = 10.0
# Causes for which the model's settings may be to blame.
OF_SETTINGS = frozenset((Cause.SETTINGS, Cause.MEMORY, Cause.START))
# Causes that may have passed at the next attempt, and the text for clients: the reason may name other models, or files.
PASSING = {Cause.MEMORY: "there is no memory for it now", Cause.START: "its engine cannot be started now"}

log = structlog.get_logger("dragoman.repository")


class Front(Protocol):
    """Frontend of this process, or all frontend processes; see `FrontEnd` and `FrontEnds`."""

    async def adopt(self, model: LoadedModel) -> None:
        """Get ready for requests for a version; raise `BundleError` if its files are gone."""
        ...

    async def publish(self, name: str, route: Route | None) -> None:
        """Answer a model's requests by a route from now on; raise `CannotServe` if a frontend cannot."""
        ...

    async def until_released(self, model: LoadedModel) -> None:
        """Wait until no request holds a version that no route leads to any more."""
        ...

    def outcomes(self, model: LoadedModel) -> Outcomes:
        """Return the outcomes of the requests that held a version."""
        ...

    def holding(self, model: LoadedModel) -> Holding:
        """Return how requests use a version."""
        ...

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for a model that is asleep."""
        ...

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Refuse the requests that wait for a model."""
        ...


class ModelReconciler:
    """Executor of one model's actions.

    Attributes:
        name: Of the model.
        found: Its folder, as far as that could be read.
        overrides: Wishes of operators.
        loaded: Its versions and route.
        history: Versions that have been the default.
        problems: Wishes that cannot be met, a line each.
    """

    def __init__(
        self,
        found: FoundModel,
        loader: VersionLoader,
        front: Callable[[], Front],
        placement: Placement,
        on_published: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Start with nothing loaded.

        Args:
            found: Folder of the model.
            loader: Loads versions.
            front: Returns the frontend.
            placement: Memory that models share.
            on_published: Called with the model's name when its route has changed.
        """
        self.name, self.found = found.name, found
        self.overrides: Overrides = NO_OVERRIDES
        self.history, self.problems = History(), tuple[str, ...]()
        self._loader, self._front_of, self._placement, self._on_published = loader, front, placement, on_published
        self._metrics = loader.metrics
        self.loaded = Loaded(found.name, Idle(self._keep_seconds, time.monotonic()))
        self._is_lost = self._is_over = False
        self._told, self._told_waiting = "", ""
        self._changed, self._settled, self._published = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._published.set()
        self._acting = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        self._drains: dict[Version, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # State.

    @property
    def route(self) -> Route | None:
        """Route of its requests; None while nothing answers."""
        return self.loaded.route

    @property
    def is_gone(self) -> bool:
        """Whether its folder is gone, and all of its versions."""
        is_loaded = any(version.loaded is not None for version in self.loaded.versions)
        return self._is_lost and self.route is None and self._loading is None and not is_loaded

    @property
    def told_problems(self) -> tuple[str, ...]:
        """Everything that is not as wanted, refused versions aside, a line each."""
        found = self.found
        problems = [*found.problem.splitlines(), *found.file_problem.splitlines(), *found.left_out, *self.problems]
        if problem := self.loaded.idle.problem:
            problems.append(f"the model cannot be woken: {problem}")
        return tuple(dict.fromkeys(problems))

    def troubles(self) -> list[str]:
        """Return a line for each refused version, and for everything else that is not as wanted; callable on any thread."""
        refused = [version for version in self.loaded.with_files() if version.state is State.REFUSED and version.cause]
        lines = [f"version {one.label} is refused ({one.cause}): {one.reason}" for one in refused]
        return [*lines, *self.told_problems]

    def readings(self) -> list[VersionReading]:
        """Return the states of its versions, for metrics; callable on any thread."""
        readings = []
        for one in self.loaded.with_files():
            if one.label or one.state is State.REFUSED:
                outcomes, cause = self.outcomes(one), "" if one.cause is None else one.cause.value
                numbers = outcomes.num_answered, outcomes.num_failed
                readings.append(VersionReading(self.name, one.label, one.state.value, cause, *numbers))
        return readings

    def uses(self, directory: Path) -> bool:
        """Return whether a version of a folder is loaded, asleep or on its way; callable on any thread."""
        there = (version for version in list(self.loaded.versions) if version.found.directory == directory)
        return any(version.loaded is not None or version.state is not State.REFUSED for version in there)

    def outcomes(self, version: Version) -> Outcomes:
        """Return the outcomes of a version's requests; callable on any thread."""
        loaded = version.loaded  # another thread may let go of it at any time
        return Outcomes() if loaded is None else self._front_of().outcomes(loaded)

    def candidate(self) -> Candidate:
        """Return what eviction from memory has to know of the model."""
        loaded, idle, holding = self.loaded, self.loaded.idle, self._holding()
        with_engines = [(one, one.loaded) for one in loaded.with_files() if one.loaded is not None]
        is_waking = self.route is None or self.route.default.is_asleep
        is_up = any(one.is_up for one, _ in with_engines)
        return Candidate(
            self.name,
            memory_bytes=sum(max(one.reserved_bytes, self._loader.resident_bytes(model)) for one, model in with_engines),
            is_leaving=idle.is_asked or any(one.is_draining or one.state is State.RETIRING for one, _ in with_engines),
            may_leave=idle.may_sleep and not idle.is_asleep and (is_up or not is_waking),
            is_busy=self._loading is not None or loaded.canary is not None or is_waking or self._is_awaited or idle.is_asked,
            num_held=holding.num_held,
            warm_until=holding.warm_until,
            awake_since=idle.awake_since,
        )

    def would_want(self, overrides: Overrides, forgiven: Container[str] = ()) -> Wanted:
        """Return what would be served by other wishes, and if versions of some names had not been refused."""
        return target_of(self.found, overrides, self.loaded, forgiven)

    # Changes from outside.

    def find(self, found: FoundModel) -> None:
        """Note the present contents of its folder."""
        if found.problem and found.problem != self._told:
            log.error("the folder of a model cannot be used, what is served stays", model=self.name, reason=found.problem)
        self._told, before, self.found = found.problem, self.found, found
        if self._is_lost or (found.versions, found.file) != (before.versions, before.file):
            self._is_lost = False
            if (found.file.settings, found.file.swap.mode) != (before.file.settings, before.file.swap.mode):
                self.loaded.forgive(None, OF_SETTINGS)
            self.wake()

    def lose(self) -> None:
        """Note that its folder is gone."""
        if not self._is_lost:
            self._is_lost, self.found = True, replace(self.found, versions=())
            self.wake()

    def ask(self, overrides: Overrides) -> None:
        """Note the wishes of operators."""
        self.overrides = overrides
        self.wake()

    def forgive(self, names: Collection[str] | None = None) -> None:
        """Try refused versions again: those of some names, or all."""
        self.loaded.forgive(names)
        self.wake()

    def evict(self) -> None:
        """Unload the model as soon as it can be, to free memory."""
        self.loaded.idle.is_asked = True
        self.wake()

    def wake(self) -> None:
        """Reconcile soon."""
        if not self._is_over:  # nobody would ever be told that the model is settled
            self._settled.clear()
        self._changed.set()

    async def settled(self) -> None:
        """Wait until nothing is to be done, apart from canary checks that last and versions that drain."""
        await self._settled.wait()

    # Start, run, stop.

    def open_first(self) -> list[Bundle]:
        """Open the versions of the start; one that cannot be opened is replaced by the policy's next. Call it first.

        Raises:
            BundleError: If there are versions, and none can be opened.
            ConfigError: The same, because of settings.
        """
        first: Refused | None = None
        while found := missing(self.found, self.overrides, self.loaded):
            version = self.loaded.add(found)
            try:
                version.open(self._loader.open(self.name, found, self.found.file))
            except Refused as refused:
                first = first or refused
                version.refuse(refused)
        opened = [version.opened.bundle for version in self.loaded.versions if version.opened is not None]
        if first is not None and not opened:
            raise ConfigError(first.reason) if first.cause is Cause.SETTINGS else BundleError(first.reason)
        return opened

    def hold_first(self) -> None:
        """Set the route of the start: to versions that are asleep, or to a stand-in until one serves."""
        target, loaded = self.would_want(self.overrides), self.loaded
        for version in list(loaded.versions):
            if version.cause is not None:
                self._refuse(version, Refused(version.cause, version.reason))
            elif version.opened is not None and loaded.idle.is_asleep:
                self._lay_down(version, self._sleeping(version))
            elif version.opened is not None and version.found.name == target.default:
                loaded.route = self._route_to_stand_in(self._stand_in(version.opened, version.label))
        if loaded.idle.is_asleep:
            loaded.route = route_to(target, self.found, loaded)

    async def start(self, *, is_persistent: bool = False) -> None:
        """Load and publish what was opened first; what cannot be loaded is replaced by the policy's next.

        Args:
            is_persistent: Whether an engine that cannot be started is tried again and again, where there is no other version.

        Raises:
            EngineCannotStart: If nothing can be served.
        """
        is_only = len(self.found.versions) == 1
        opened = [version for version in self.loaded.versions if version.state is State.OPENING]
        await asyncio.gather(*(self._start_first(one, is_persistent and is_only, is_told=not is_only) for one in opened))
        while missing(self.found, self.overrides, self.loaded) or self._is_any_up():
            async with self._acting:
                await self._reconcile()
            if self._loading is None:
                break
            await asyncio.wait([self._loading])
        if self.found.versions and not self._is_any_up():
            reasons = [version.reason for version in self.loaded.versions if version.reason]
            raise EngineCannotStart(f"model {self.name!r}: {reasons[0] if reasons else 'no version can be served'}")

    async def run(self) -> None:
        """Reconcile until the model is gone."""
        self._is_over = False
        self.wake()
        try:
            while not self.is_gone:
                await self._run_once()
            self._metrics.remove_model(self.name)
            self._metrics.versions.remove_model(self.name)
        finally:
            self._is_over = True
            self._settled.set()

    async def stop(self) -> None:
        """End all engines, and everything that is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(one.loaded.engine.stop() for one in self.loaded.versions if one.loaded is not None))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_once(self) -> None:
        """Wait until there may be something to do, and do it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause()):
                await self._changed.wait()
        self._changed.clear()
        try:
            async with self._acting:
                await self._reconcile()
        except Exception:
            log.exception("the versions of a model cannot be led to where they are to be", model=self.name)
            await asyncio.sleep(WATCH_SECONDS)
            self._wake_later()
        self._placement.note()
        if self._loading is None and not self._changed.is_set():
            self._settled.set()

    def _pause(self) -> float | None:
        if self.loaded.canary is not None:
            return WATCH_SECONDS
        return None if self._loading is not None else self.loaded.idle.pause(self._observe())

    async def _reconcile(self) -> None:
        """Execute actions until there are none, or one has failed."""
        loaded, idle = self.loaded, self.loaded.idle
        idle.keep_seconds = self._keep_seconds
        if loaded.canary is not None:
            loaded.canary.observe(self._front_of().outcomes, time.monotonic())
        while todo := reconcile(self.found, self.overrides, loaded, self._observe()):
            for action in todo:
                if not await self._execute(action):
                    return
        if self._loading is not None:
            return
        idle.is_asked = False
        if idle.is_asleep and self._is_awaited:  # it could not be loaded a moment ago
            self._refuse_waiting()
        if (problems := self.would_want(self.overrides).problems) != self.problems:
            self.problems = problems
            for problem in problems:
                log.warning("what is wanted of a model cannot be had", model=self.name, problem=problem)

    async def _execute(self, action: Action) -> bool:
        """Execute an action; return whether to go on at once, and not when something changes or after a pause."""
        loaded = self.loaded
        match action:
            case actions.Load():
                self._loading = self._spawn(self._load(action))
            case actions.Publish(route):
                return await (self._publish_again() if route == loaded.route else self._publish(route))
            case actions.GiveUp():
                assert loaded.route is not None
                model = loaded.route.default
                route = await self._adopt_stand_in(Opened(model.bundle, model.tokenizers, model.frames), model.label)
                await self._tell(route)
            case actions.Refuse(version, refused):
                self._refuse(version, refused)
                self._metrics.versions.swapped(self.name, "refused")
                self._drain(version)
            case actions.RollBack(version, refused):
                assert loaded.canary is not None
                await self._take_back([version], refused, loaded.canary.fallback, "rolled_back")
            case actions.Promote():
                self._promote()
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
        """Change the route; those that answered before stay until the canary check has passed. Return whether all frontends did."""
        loaded, before, canary, front = self.loaded, self.loaded.route, self.loaded.canary, self._front_of()
        fallback = before if canary is None else canary.fallback
        new = [one for one in loaded.versions if is_in(one, route) and not is_in(one, before) and not is_in(one, fallback)]
        was_asleep = before is not None and before.default.is_asleep
        is_asleep = route is not None and route.default.is_asleep
        check = next_canary(loaded, route, self.found.file.swap, front.outcomes, time.monotonic())
        try:
            await self._tell(route)
        except CannotServe as error:
            if is_asleep:  # what serves goes on, and sleep is tried again
                log.error("a front end does not let a model sleep", model=self.name, reason=str(error))
                loaded.route = before
                self._wake_later()
            else:
                await self._take_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused", canary)
            return False
        loaded.canary = check
        self._tell_apart()
        if is_asleep or was_asleep:
            self._note_sleep(was_asleep, is_asleep, route, before)
            return True
        if check is None and new and before is not None and not before.is_stand_in:
            self._metrics.versions.swapped(self.name, "done")
        self._log_route()
        return True

    def _note_sleep(self, was_asleep: bool, is_asleep: bool, route: Route | None, before: Route | None) -> None:
        """Count and log that the model has been unloaded, or loaded again."""
        idle = self.loaded.idle
        if route is not None and not is_asleep:
            idle.note_awake(time.monotonic())
            self._metrics.versions.woken(self.name, "loaded")
            log.info("a model is awake", model=self.name)
        elif before is not None and not was_asleep:
            self._metrics.versions.slept(self.name, idle.why.value)
            log.info("a model has fallen asleep", model=self.name, why=idle.why.value)

    async def _publish_again(self) -> bool:
        """Have frontends answer by the present route, which they could not be told of; return whether they do."""
        try:
            await self._tell(self.route)
        except CannotServe as error:
            log.error("a front end still does not serve as it is to", model=self.name, reason=str(error))
            self._wake_later()
            return False
        self._tell_apart()
        return True

    async def _tell(self, route: Route | None) -> None:
        """Have frontends answer by a route; until all do, no version ends."""
        self.loaded.route = route
        self._published.clear()
        await self._front_of().publish(self.name, route)
        self._published.set()
        if route is None:
            self._metrics.remove_model(self.name)
        else:
            self.history.note(route.default.label)
        self._on_published(self.name)

    async def _take_back(
        self, versions: Sequence[Version], refused: Refused, route: Route | None, outcome: str, canary: actions.Canary | None = None
    ) -> None:
        """Refuse versions, and restore the route and the canary check before them."""
        self.loaded.canary = canary
        for version in versions:
            self._refuse(version, refused)
        try:
            await self._tell(route)
        except Exception as error:  # the refused versions end all the same, and the route is published again later
            is_expected = isinstance(error, CannotServe)
            log.error("a front end does not serve as before", model=self.name, reason=str(error), exc_info=not is_expected)
        self._tell_apart()
        for version in versions:
            self._drain(version)
        self._log_route()
        self._metrics.versions.swapped(self.name, outcome)
        if versions:
            self.wake()
        else:  # nothing that is wanted has changed
            self._wake_later()

    def _promote(self) -> None:
        """End the probation of versions that have passed."""
        canary, self.loaded.canary = self.loaded.canary, None
        assert canary is not None
        for version in canary.versions:
            version.enter(State.SERVING)
        log.info("probation passed", model=self.name, versions=[version.label for version in canary.versions])
        self._metrics.versions.swapped(self.name, "done")

    def _tell_apart(self) -> None:
        """Set the states of versions that are up: on probation, serving, or neither."""
        canary = self.loaded.canary
        for version in self.loaded.versions:
            if version.is_up:
                is_tried = canary is not None and version in canary.versions
                version.enter(State.TRIAL if is_tried else State.SERVING if is_in(version, self.route) else State.STANDBY)

    def _log_route(self) -> None:
        versions = {} if self.route is None else {label: model.version for label, model in self.route.versions.items()}
        default, is_tried = None if self.route is None else self.route.default.label, self.loaded.canary is not None
        log.info("versions that serve", model=self.name, default=default, versions=versions, on_trial=is_tried)

    # Stand-ins, for a model that cannot answer now.

    def _stand_in(self, opened: Opened, label: str) -> LoadedModel:
        """Return a stand-in whose engine is never ready."""
        return self._loader.make(opened, self.found.file, label, range(0))

    def _route_to_stand_in(self, model: LoadedModel) -> Route:
        """Keep a stand-in until no route leads to it, and return the route that does."""
        self.loaded.versions.append(Version(self.name, NOWHERE, State.STANDBY, loaded=model))
        return Route.to(model, is_stand_in=True)

    async def _adopt_stand_in(self, opened: Opened, label: str) -> Route:
        """Return a route that refuses requests for now, which frontends are ready for."""
        await self._front_of().adopt(model := self._stand_in(opened, label))
        return self._route_to_stand_in(model)

    async def _make_way(self, opened: Opened, label: str) -> None:
        """End all versions, so that there is memory for another one; requests are refused for now."""
        async with self._acting:
            if self.route is not None and self.route.is_stand_in:
                return
            others = [one for one in self.loaded.versions if one.is_up]
            route = await self._adopt_stand_in(opened, label)
            self.loaded.canary = None
            await self._tell(route)
        for one in others:
            self._drain(one)
        await asyncio.gather(*self._drains.values())

    # Load.

    async def _load(self, action: Load) -> None:
        """Load a version; those that serve go on meanwhile unless `swap` says otherwise."""
        found, file = action.found, self.found.file
        version = self.loaded.known(found) or self.loaded.add(found)
        log.info("loading a version", model=self.name, version=found.name or None, directory=str(found.directory))
        try:
            match action.mode:
                case "wake":
                    await self._load_again(version, file)
                case "describe":
                    await self._describe(version, file)
                case _:
                    if await self._try(version, self._load_new(version, file, is_instead=action.mode == "instead")):
                        log.info("a version is loaded and proved", model=self.name, version=version.label, content=version.content)
                    else:
                        self._metrics.versions.swapped(self.name, "refused")
        finally:
            self._loading = None
            self.wake()

    async def _load_new(self, version: Version, file: ModelFile, *, is_instead: bool) -> None:
        async with self._loader.turn:
            opened = await self._open(version, file)
            if self.route is not None:
                self._loader.measure(self.route.default)
            if not is_instead:
                await self._start_in_memory(version, opened, file)
                return
        await self._make_way(opened, version.label)  # without the turn: requests may take as long as they like
        async with self._loader.turn:
            await self._start_in_memory(version, opened, file)

    async def _start_in_memory(self, version: Version, opened: Opened, file: ModelFile) -> None:
        """Start a version if there is memory, or other models make room."""
        try:
            await self._placement.make_room(self.name, self._loader.needed_bytes(opened.bundle, file), lambda: True)
        except Refused as refused:
            raise Refused(refused.cause, f'{refused.reason}; swap.mode = "restart" ends what serves first') from None
        await self._start(version, file, self._loader.load_seconds)

    async def _start_first(self, version: Version, is_persistent: bool, *, is_told: bool) -> None:
        """Start a version of the start: beside all others, however long it takes; `is_told` logs a refusal."""

        def is_needed() -> bool:
            is_answered = self.route is not None and not self.route.is_stand_in
            return version.found in self.found.versions and not is_answered

        async def start() -> None:
            assert version.opened is not None
            file = self.found.file
            self._placement.check(self._loader.needed_bytes(version.opened.bundle, file), is_start=True)
            await self._start(version, file, None, is_needed if is_persistent else None)

        await self._try(version, start(), is_told=is_told)

    async def _load_again(self, version: Version, file: ModelFile) -> None:
        """Load a version that is asleep, if there is memory and requests still wait."""
        idle, opened = self.loaded.idle, version.opened
        assert opened is not None
        try:
            async with self._loader.turn:
                version.has_died = False
                needed_bytes = self._loader.needed_bytes(opened.bundle, file)
                await self._placement.make_room(self.name, needed_bytes, lambda: self._is_awaited or not idle.may_sleep)
                await self._start(version, file, self._loader.load_seconds)
        except NotWanted:
            version.enter(State.ASLEEP)
            idle.is_asleep = True
        except Exception as error:
            refused = self._refusal(version, error)
            await self._end(version)
            if refused.cause is Cause.MEMORY or (refused.cause in PASSING and version.was_proved):
                version.enter(State.ASLEEP)
                idle.note_failure(refused.reason, time.monotonic())
                log.warning("a model cannot be woken", model=self.name, cause=refused.cause.value, reason=refused.reason)
                self._metrics.versions.woken(self.name, "failed")
                self._told_waiting = PASSING[refused.cause]
                self._refuse_waiting()
            else:
                self._refuse(version, refused)
                self._metrics.versions.woken(self.name, "refused")
        else:
            version.enter(State.STANDBY)

    async def _open(self, version: Version, file: ModelFile) -> Opened:
        opened = await asyncio.to_thread(self._loader.open, self.name, version.found, file)
        version.open(opened)
        return opened

    async def _start(
        self, version: Version, file: ModelFile, seconds: float | None, is_needed: Callable[[], bool] | None = None
    ) -> None:
        """Start a version's engine, self-test it, and have frontends be able to reach it.

        Args:
            version: That was opened.
            file: Of the model.
            seconds: Bound on the time until it is ready; None for none.
            is_needed: Returns whether an engine that cannot be started is tried again; None for not at all.
        """
        opened = version.opened
        assert opened is not None
        version.reserved_bytes = self._loader.needed_bytes(opened.bundle, file)
        version.replicas = self.loaded.free_replicas(self._loader.num_replicas(opened.bundle, file))
        version.loaded = loaded = self._loader.make(
            opened,
            file,
            version.label,
            version.replicas,
            on_death=partial(self._note_death, version),
            is_observed=lambda: version.has_been_proved,
        )
        version.enter(State.STARTING)
        try:
            async with asyncio.timeout(seconds):
                await _until_started(loaded, is_needed)
        except EngineCannotStart as error:
            raise Refused(Cause.START, str(error).removeprefix(f"model {self.name!r}: ")) from error
        except TimeoutError:
            raise Refused(Cause.START, f"it is not ready after {seconds:g} s (load_timeout_seconds)") from None
        version.enter(State.PROVING)
        await self._loader.prove(loaded)
        await self._front_of().adopt(loaded)

    async def _try(self, version: Version, work: Coroutine[Any, Any, None], *, is_told: bool = True) -> bool:
        """Do what makes a version able to serve; refuse and end it if that fails."""
        try:
            await work
        except Exception as error:
            refused = self._refusal(version, error)
            if is_told:
                self._refuse(version, refused)
            else:
                version.refuse(refused)
            await self._end(version)
            if version.state is not State.REFUSED:  # it was forgiven meanwhile
                self.loaded.remove(version)
            return False
        version.enter(State.STANDBY)
        return True

    # Idle unloading.

    async def _sleep(self, why: actions.Why) -> None:
        """Have everything that is up be about to end, and descriptions take its place."""
        idle, front = self.loaded.idle, self._front_of()
        idle.is_asleep, idle.why, idle.is_asked = True, why, False
        up = [version for version in self.loaded.versions if version.is_up and not version.is_stand_in]
        try:
            sleeping = [self._sleeping(version) for version in up]
        except ConfigError as error:  # the file has changed since they were loaded
            log.warning("a model does not sleep, for it could not be woken", model=self.name, reason=str(error))
            idle.is_asleep, idle.awake_since = False, time.monotonic()
            return
        for version, model in zip(up, sleeping, strict=True):
            assert version.opened is not None and version.loaded is not None
            self._loader.measure(version.loaded)
            await front.adopt(model)
            version.enter(State.RETIRING)
            successor = self.loaded.add(version.found)
            successor.open(version.opened)
            successor.was_proved = True
            self._lay_down(successor, model)

    async def _describe(self, version: Version, file: ModelFile) -> None:
        """Open a version of a model that is asleep, and describe it; or refuse it."""
        try:
            await self._open(version, file)
            await self._front_of().adopt(sleeping := self._sleeping(version))
        except Exception as error:
            self._refuse(version, self._refusal(version, error))
            return
        self._lay_down(version, sleeping)

    def _sleeping(self, version: Version) -> LoadedModel:
        """Return the description of a version while it is asleep; raise `ConfigError` if it could not be loaded again."""
        assert version.opened is not None
        device = "" if version.loaded is None else version.loaded.device
        return self._loader.sleeping(version.opened, self.found.file, version.label, device)

    def _lay_down(self, version: Version, sleeping: LoadedModel) -> None:
        version.sleeping = sleeping
        self._route_to_stand_in(sleeping)
        version.enter(State.ASLEEP)

    def _refuse_waiting(self) -> None:
        seconds = self.loaded.idle.retry_seconds(time.monotonic())
        if seconds:
            self._front_of().refuse_waiting(self.name, self._told_waiting, seconds)

    # End.

    def _refuse(self, version: Version, refused: Refused) -> None:
        """Refuse a version; its engine, if it has one, is ended elsewhere."""
        version.refuse(refused)
        if version.loaded is None:
            version.let_go()
        log.error(
            "a version is refused",
            model=self.name,
            version=version.label or None,
            directory=str(version.found.directory),
            cause=refused.cause.value,
            reason=refused.reason,
        )

    def _refusal(self, version: Version, error: Exception) -> Refused:
        """Return the refusal that an error means; an unforeseen error is logged."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, BundleError):
            return Refused(Cause.BUNDLE, str(error))
        log.error("a version cannot be loaded", model=self.name, exc_info=error)
        return Refused(Cause.START, f"{type(error).__name__}: {error}")

    def _drain(self, version: Version) -> None:
        """End a version that no route leads to, as soon as no request holds it; a refused one stays known."""
        if version.state is not State.REFUSED:
            version.enter(State.RETIRING)
        if not version.is_draining:
            version.is_draining = True
            self._drains[version] = self._spawn(self._drain_and_end(version))

    async def _drain_and_end(self, version: Version) -> None:
        assert version.loaded is not None
        try:
            await self._published.wait()
            await self._front_of().until_released(version.loaded)
            await self._end(version)
        finally:
            version.is_draining = False
            del self._drains[version]
        if version.state is not State.REFUSED:
            self.loaded.remove(version)
        self._placement.note()
        if not version.is_stand_in:
            log.info("a version has ended", model=self.name, version=version.label, content=version.content)
        self.wake()

    async def _end(self, version: Version) -> None:
        """End the engine of a version that no request holds."""
        if version.loaded is not None:
            await version.loaded.engine.stop()
            version.loaded = None
            self._loader.forget(self.name, version.replicas)
        if version.state in (State.RETIRING, State.REFUSED):
            version.let_go()

    # Helpers.

    @property
    def _keep_seconds(self) -> float:
        own = self.found.file.settings.keep_loaded
        return self._placement.keep_seconds if own is None else own

    @property
    def _is_awaited(self) -> bool:
        return self._front_of().is_awaited(self.name)

    def _observe(self) -> Observed:
        return Observed(time.monotonic(), self._holding(), self._is_awaited, self._loading is not None, self._published.is_set())

    def _holding(self) -> Holding:
        """Return how requests use the model, all of its versions together."""
        models = [] if self.route is None else list(self.route.versions.values())
        uses = [self._front_of().holding(model) for model in models if not model.is_asleep]
        if not uses:
            since = self.loaded.idle.awake_since
            return Holding(0, since, since)
        last_used, warm_until = max(use.last_used for use in uses), together(use.warm_until for use in uses)
        return Holding(sum(use.num_held for use in uses), last_used, warm_until)

    def _note_death(self, version: Version) -> None:
        version.note_death()
        self.wake()

    def _is_any_up(self) -> bool:
        return any(version.answering is not None for version in self.loaded.with_files())

    def _wake_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self.wake)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside everything else, until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _until_started(model: LoadedModel, is_needed: Callable[[], bool] | None) -> None:
    try:
        await model.engine.start(is_persistent=is_needed is not None)
    except EngineCannotStart:
        if is_needed is None:
            raise
        while not model.engine.is_ready:  # it is started again and again, and the log says so each time
            if not is_needed():
                raise
            await asyncio.sleep(WATCH_SECONDS)
