"""Reconciliation loop of one model with its folder, its `model.toml` and the overrides of operators."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Container
from dataclasses import replace
from pathlib import Path

import structlog

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import ConfigError
from dragoman.server.models.discovery import FoundModel
from dragoman.server.models.executor import Executor, Front
from dragoman.server.models.loader import VersionLoader
from dragoman.server.models.memory import Candidate, Placement
from dragoman.server.models.policy import NO_OVERRIDES, History, Overrides, Wanted
from dragoman.server.models.reconcile import missing, reconcile, route_to, target_of
from dragoman.server.models.registry import Route
from dragoman.server.models.use import Outcomes
from dragoman.server.models.version import Cause, Refused, State, Version
from dragoman.server.telemetry.server_metrics import VersionReading
from dragoman.server.workers.supervisor import EngineCannotStart

# Interval of observations during a canary check.
WATCH_SECONDS = 0.25
# Causes that changed model settings may resolve.
OF_SETTINGS = frozenset((Cause.SETTINGS, Cause.MEMORY, Cause.START))

log = structlog.get_logger("dragoman.repository")


class ModelReconciler:
    """Reconciles a model whenever something has changed; `problems` are fields that cannot be satisfied, a line each."""

    def __init__(
        self,
        found: FoundModel,
        loader: VersionLoader,
        front: Callable[[], Front],
        placement: Placement,
        on_published: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.name, self.overrides, self.problems = found.name, NO_OVERRIDES, tuple[str, ...]()
        self._executor = Executor(found, loader, front, placement, on_published, self.wake)
        self.loaded = self._executor.loaded
        self._loader, self._placement = loader, placement
        self._is_lost = self._is_over = False
        self._logged_problem = ""
        self._changed, self._settled = asyncio.Event(), asyncio.Event()

    # State.

    @property
    def found(self) -> FoundModel:
        """Folder of the model, as last read."""
        return self._executor.found

    @property
    def history(self) -> History:
        """Versions that have been the default."""
        return self._executor.history

    @property
    def route(self) -> Route | None:
        """Present route; None while no version answers."""
        return self.loaded.route

    @property
    def is_gone(self) -> bool:
        """Whether the folder and all versions are gone."""
        is_loaded = any(version.loaded is not None for version in self.loaded.versions)
        return self._is_lost and self.route is None and self._executor.loading is None and not is_loaded

    @property
    def all_problems(self) -> tuple[str, ...]:
        """All problems apart from refused versions, a line each."""
        found = self.found
        problems = [*found.problem.splitlines(), *found.file_problem.splitlines(), *found.left_out, *self.problems]
        if problem := self.loaded.idle.problem:
            problems.append(f"the model cannot be woken: {problem}")
        return tuple(dict.fromkeys(problems))

    def troubles(self) -> list[str]:
        """Return a line for each refused version and each other problem; callable on any thread."""
        refused = [version for version in self.loaded.with_files() if version.state is State.REFUSED and version.cause]
        return [*(f"version {one.label} is refused ({one.cause}): {one.reason}" for one in refused), *self.all_problems]

    def readings(self) -> list[VersionReading]:
        """Return the states of its versions, for metrics; callable on any thread."""
        readings = []
        for one in self.loaded.with_files():
            if one.label or one.state is State.REFUSED:
                outcomes = self.outcomes(one)
                numbers = outcomes.num_answered, outcomes.num_failed
                readings.append(VersionReading(self.name, one.label, one.state.value, one.cause or "", *numbers))
        return readings

    def uses(self, directory: Path) -> bool:
        """Return whether the version in a directory is loaded, asleep or loading; callable on any thread."""
        there = (version for version in list(self.loaded.versions) if version.found.directory == directory)
        return any(version.loaded is not None or version.state is not State.REFUSED for version in there)

    def outcomes(self, version: Version) -> Outcomes:
        """Return the outcomes of a version's requests; callable on any thread."""
        loaded = version.loaded  # another thread may clear it at any time
        return Outcomes() if loaded is None else self._executor.outcomes(loaded)

    def candidate(self) -> Candidate:
        """Return the model as seen by eviction."""
        loaded, idle, seen = self.loaded, self.loaded.idle, self._executor.observe()
        with_engines = [(one, one.loaded) for one in loaded.with_files() if one.loaded is not None]
        is_waking = self.route is None or self.route.default.is_asleep
        return Candidate(
            self.name,
            memory_bytes=sum(max(one.reserved_bytes, self._loader.resident_bytes(model)) for one, model in with_engines),
            is_leaving=idle.is_evicted or any(one.is_draining or one.state is State.RETIRING for one, _ in with_engines),
            may_leave=idle.may_sleep and not idle.is_asleep and (not is_waking or any(one.is_up for one, _ in with_engines)),
            is_busy=seen.is_loading or seen.is_awaited or is_waking or idle.is_evicted or loaded.canary is not None,
            num_held=seen.holding.num_held,
            warm_until=seen.holding.warm_until,
            awake_since=idle.awake_since,
        )

    def target(self, overrides: Overrides, retried: Container[str] = ()) -> Wanted:
        """Return the versions to serve with other overrides, ignoring refusals of `retried` names."""
        return target_of(self.found, overrides, self.loaded, retried)

    # External changes.

    def update(self, found: FoundModel) -> None:
        """Apply the present contents of the folder."""
        if found.problem and found.problem != self._logged_problem:
            log.error("the folder of a model cannot be used, what is served stays", model=self.name, reason=found.problem)
        self._logged_problem, before, self._executor.found = found.problem, self.found, found
        if self._is_lost or (found.versions, found.file) != (before.versions, before.file):
            self._is_lost = False
            if (found.file.settings, found.file.swap.mode) != (before.file.settings, before.file.swap.mode):
                self.loaded.retry_refused(None, OF_SETTINGS)
            self.wake()

    def note_removed(self) -> None:
        """Record that the folder is gone."""
        if not self._is_lost:
            self._is_lost, self._executor.found = True, replace(self.found, versions=())
            self.wake()

    def override(self, overrides: Overrides) -> None:
        """Replace the overrides of operators."""
        self.overrides = overrides
        self.wake()

    def retry_refused(self, names: Collection[str] | None = None) -> None:
        """Retry refused versions with these names; None for all."""
        self.loaded.retry_refused(names)
        self.wake()

    def evict(self) -> None:
        """Unload the model as soon as possible, to free memory."""
        self.loaded.idle.is_evicted = True
        self.wake()

    def wake(self) -> None:
        """Reconcile soon."""
        if not self._is_over:  # after the end nothing would set the event again
            self._settled.clear()
        self._changed.set()

    async def settled(self) -> None:
        """Wait until nothing is to be done, apart from canary checks and draining versions."""
        await self._settled.wait()

    # Start, run, stop.

    def open_first(self) -> list[Bundle]:
        """Open the initial versions; the policy's next version replaces one that cannot be opened. Must be called first.

        Raises:
            BundleError: If there are versions, and none can be opened.
            ConfigError: If this is because of settings.
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

    def set_first_route(self) -> None:
        """Set the initial route: to versions that are asleep, or to a stand-in until a version is loaded."""
        target, loaded, executor = self.target(self.overrides), self.loaded, self._executor
        for version in list(loaded.versions):
            if version.cause is not None:
                executor.refuse(version, Refused(version.cause, version.reason))
            elif loaded.idle.is_asleep:
                executor.describe_first(version)
            elif version.opened is not None and version.found.name == target.default:
                loaded.route = executor.add_stand_in(version.opened, version.label)
        if loaded.idle.is_asleep:
            loaded.route = route_to(target, self.found, loaded)

    async def start(self, *, is_persistent: bool = False) -> None:
        """Load and publish the opened versions; the policy's next version replaces one that cannot be loaded.

        With `is_persistent`, the start of an engine is retried forever if there is no other version. Raises `EngineCannotStart` if
        no version can be served.
        """
        executor, is_only = self._executor, len(self.found.versions) == 1
        opened = [version for version in self.loaded.versions if version.state is State.OPENING]
        how = {"is_persistent": is_persistent and is_only, "is_logged": not is_only}
        await asyncio.gather(*(executor.load(version, "first", **how) for version in opened))
        while missing(self.found, self.overrides, self.loaded) or self._is_any_up():
            async with executor.lock:
                await self._reconcile()
            if executor.loading is None:
                break
            await asyncio.wait([executor.loading])
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
            self._loader.metrics.remove_model(self.name)
            self._loader.metrics.versions.remove_model(self.name)
        finally:
            self._is_over = True
            self._settled.set()

    async def stop(self) -> None:
        """Stop all engines and cancel all running work."""
        await self._executor.stop()

    async def _run_once(self) -> None:
        executor = self._executor
        if self.loaded.canary is not None:
            pause: float | None = WATCH_SECONDS
        else:
            pause = None if executor.loading is not None else self.loaded.idle.pause(executor.observe())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()
        self._changed.clear()
        try:
            async with executor.lock:
                await self._reconcile()
        except Exception:
            log.exception("the versions of a model cannot be led to where they are to be", model=self.name)
            await asyncio.sleep(WATCH_SECONDS)
            executor.wake_later()
        self._placement.note()
        if executor.loading is None and not self._changed.is_set():
            self._settled.set()

    async def _reconcile(self) -> None:
        loaded, executor = self.loaded, self._executor
        loaded.idle.keep_seconds = executor.keep_seconds
        if loaded.canary is not None:
            loaded.canary.observe(executor.outcomes, time.monotonic())
        while todo := reconcile(self.found, self.overrides, loaded, executor.observe()):
            for action in todo:
                if not await executor.execute(action):
                    return
        if executor.loading is not None:
            return
        loaded.idle.is_evicted = False
        if loaded.idle.is_asleep and executor.observe().is_awaited:
            executor.refuse_waiting()
        if (problems := self.target(self.overrides).problems) != self.problems:
            self.problems = problems
            for problem in problems:
                log.warning("what is wanted of a model cannot be had", model=self.name, problem=problem)

    def _is_any_up(self) -> bool:
        return any(version.answering is not None for version in self.loaded.with_files())
