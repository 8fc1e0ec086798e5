"""The versions of one model, led to where its policy wants them: found, loaded, proved, served, watched, retired.

Whatever happens to a version, the ones that serve go on until another has taken their place, and end when no request holds them.
What a policy wants is decided in `policy.py`; how a version is opened and its engine made is the workshop's business.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic

import structlog

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import ConfigError
from dragoman.server.models.discovery import FoundModel, FoundVersion
from dragoman.server.models.idle import Sleeper
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.loader import NOWHERE, Loader, ModelVersions
from dragoman.server.models.memory import Placement, Stay
from dragoman.server.models.policy import NO_OVERRIDES, History, Overrides, Wanted, wanted
from dragoman.server.models.registry import Route
from dragoman.server.models.rollout import Switch
from dragoman.server.models.use import Outcomes
from dragoman.server.models.version import Cause, Refused, State, Version
from dragoman.server.models.workshop import E, Front, Workshop
from dragoman.server.telemetry.server_metrics import VersionReading
from dragoman.server.workers.supervisor import EngineCannotStart

# Between two looks at a version on probation.
WATCH_SECONDS = 0.25

# Why a version may be refused that the model's settings are to blame for.
OF_SETTINGS = frozenset((Cause.SETTINGS, Cause.MEMORY, Cause.START))

log = structlog.get_logger("dragoman.repository")


class ModelKeeper(Generic[E]):
    """See above.

    Attributes:
        name: Of the model.
        versions: That there are, refused ones among them until their files change.
        overrides: What an operator has asked for.
        problems: Of what is wanted, what cannot be had.
    """

    def __init__(self, found: FoundModel, workshop: Workshop[E], front: Callable[[], Front[E]], placement: Placement) -> None:
        """Start with nothing loaded.

        Args:
            found: What lies in its folder.
            workshop: See there.
            front: Returns what answers callers, once there is something that does.
            placement: Has models give way to each other.
        """
        self.name = found.name
        self.versions: ModelVersions[E] = ModelVersions(found.name)
        self.overrides: Overrides = NO_OVERRIDES
        self.problems: tuple[str, ...] = ()
        self._found, self._workshop, self._front_of, self._placement = found, workshop, front, placement
        self._loader = Loader(self.versions, workshop, front, self._note_death, placement)
        self._sleeper = Sleeper(self.versions, self._loader, workshop, front, self._placement, found.file)
        self._switch = Switch(
            self.versions,
            self._loader,
            self._sleeper.sleep,
            workshop,
            front,
            self._placement,
            file=lambda: self._found.file,
            wake=self.wake,
        )
        self._is_lost = False
        self._told = ""
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._is_over = False
        self._loading: asyncio.Task[None] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether its folder is gone, and all of its versions."""
        return self._is_lost and self.route is None and self._loading is None and not self.versions.loaded()

    @property
    def route(self) -> Route[E] | None:
        """Who answers requests now; None while nobody does."""
        return self._switch.route

    @property
    def history(self) -> History:
        """Versions that have been the default."""
        return self._switch.history

    @property
    def sleep_problem(self) -> str:
        """Why it could not be woken the last time; empty if it could."""
        return self._sleeper.sleep.problem

    @property
    def found(self) -> FoundModel:
        """What lies in its folder, as far as that could be told."""
        return self._found

    def find(self, found: FoundModel) -> None:
        """Take note of what lies in its folder now."""
        if found.problem and found.problem != self._told:
            log.error("the folder of a model cannot be used, what is served stays", model=self.name, reason=found.problem)
        self._told = found.problem
        if self._is_lost or (found.versions, found.file) != (self._found.versions, self._found.file):
            self._is_lost = False
            file, before = found.file, self._found.file
            if (file.settings, file.swap.mode) != (before.settings, before.swap.mode):
                self.versions.forgive(causes=OF_SETTINGS)
            self.wake()
        self._found = found

    def lose(self) -> None:
        """Take note that its folder is gone."""
        if not self._is_lost:
            self._is_lost, self._found = True, replace(self._found, versions=())
            self.wake()

    def ask(self, overrides: Overrides) -> None:
        """Take note of what an operator wants."""
        self.overrides = overrides
        self.wake()

    def forgive(self, names: Collection[str] | None = None) -> None:
        """Try again what has been refused: versions of these names, or all."""
        self.versions.forgive(names)
        self.wake()

    def would_want(self, overrides: Overrides, forgiven: Container[str] = ()) -> Wanted:
        """Return what would be served if an operator asked for this, and versions of some names had not been refused."""
        refused = {}
        for found in self._found.versions:
            version = self.versions.known(found)
            if version is not None and version.state is State.REFUSED and found.name not in forgiven:
                refused[found.name] = version.reason
        return wanted(self._found.versions, self._found.file, refused, overrides)

    def known(self) -> list[Version[E]]:
        """Return the versions that there are, without what stands for one that cannot answer."""
        return [version for version in self.versions if version.found is not NOWHERE]

    def uses(self, directory: Path) -> bool:
        """Return whether a version lies there that has not ended and has not been refused; on any thread."""
        return any(
            version.found.directory == directory and (version.loaded is not None or version.state is not State.REFUSED)
            for version in self.versions
        )

    def outcomes(self, version: Version[E]) -> Outcomes:
        """Return what became of a version's requests; on any thread."""
        loaded = version.loaded  # another thread may let go of it at any time
        return Outcomes() if loaded is None else self._front_of().outcomes(loaded)

    def wake(self) -> None:
        """Have a look at what there is to do."""
        if not self._is_over:  # who waits for what is gone would wait for ever
            self._idle.clear()
        self._wake.set()

    async def settled(self) -> None:
        """Wait until nothing is to be done, but for probations that last and versions that still finish what they have."""
        await self._idle.wait()

    def open_first(self) -> list[Bundle]:
        """Open what is to be served from the start; what cannot be makes way for the policy's next. Call it first.

        Raises:
            BundleError: If there is something, and nothing of it can be.
            ConfigError: The same, because of settings.
        """
        first: Refused | None = None
        while missing := self._missing():
            version = self.versions.begin(missing)
            try:
                version.open(self._workshop.open(self.name, missing, self._found.file))
            except Refused as refused:
                first = first or refused
                version.refuse(refused)
        opened = [version.opened.bundle for version in self.versions if version.opened is not None]
        if first is not None and not opened:
            raise ConfigError(first.reason) if first.cause is Cause.SETTINGS else BundleError(first.reason)
        return opened

    def hold_first(self) -> None:
        """Have requests be told to come back, until what was opened first serves: `route` says how."""
        target = self._wanted()
        default = target.default
        for version in self.versions:
            if version.cause is not None:
                self._loader.refuse(version, Refused(version.cause, version.reason))
            elif version.opened is not None and self._sleeper.is_asleep:
                self._sleeper.lay_down(version, self._found.file)
            elif version.opened is not None and version.found.name == default:
                self._switch.have_nobody_answer(version.opened, version.label)
        if self._sleeper.is_asleep:
            self._switch.route = self._route_to(target)

    async def start(self, *, is_persistent: bool = False) -> None:
        """Load and prove what was opened first, and have it serve; what cannot be makes way for the policy's next.

        Args:
            is_persistent: Whether an engine that cannot be started is tried again and again, where there is no other version.

        Raises:
            EngineCannotStart: If nothing can be served.
        """
        opened = [version for version in self.versions if version.state is State.OPENING]
        file, is_only = self._found.file, len(self._found.versions) == 1
        is_needed = self._is_needed if is_persistent and is_only else None
        bring_up = partial(self._loader.bring_up_opened, file=file, is_needed=is_needed, is_told=not is_only)
        await asyncio.gather(*map(bring_up, opened))
        while self._missing() is not None or self._is_any_up():
            async with self._switch.deciding:
                await self._settle()
            if self._loading is None:
                break
            await asyncio.wait([self._loading])
        if self._found.versions and not self._is_any_up():
            reasons = [version.reason for version in self.versions if version.reason]
            raise EngineCannotStart(f"model {self.name!r}: {reasons[0] if reasons else 'no version can be served'}")

    async def run(self) -> None:
        """Do what there is to do, until the model is gone."""
        self._is_over = False
        self.wake()
        try:
            while not self.is_gone:
                await self._run_once()
            self._workshop.gone(self.name)
        finally:
            self._is_over = True
            self._idle.set()

    def readings(self) -> list[VersionReading]:
        """Return how versions are, for metrics; on any thread."""
        return [self._reading(version) for version in self.known() if version.label or version.state is State.REFUSED]

    @property
    def told_problems(self) -> tuple[str, ...]:
        """What is not as is wanted, but for versions, a line each."""
        found = self._found
        problems = [*found.problem.splitlines(), *found.file_problem.splitlines(), *found.left_out, *self.problems]
        if self.sleep_problem:
            problems.append(f"the model cannot be woken: {self.sleep_problem}")
        return tuple(dict.fromkeys(problems))

    def troubles(self) -> list[str]:
        """Return a line for each version that is refused, and for whatever else is not as is wanted; on any thread."""
        refused = [version for version in self.known() if version.state is State.REFUSED]
        lines = [
            f"version {version.label} is refused ({version.cause.value}): {version.reason}" for version in refused if version.cause
        ]
        return [*lines, *self.told_problems]

    @property
    def is_leaving(self) -> bool:
        """See `Tenant`, as the next three."""
        return self._sleeper.is_leaving or any(version.found is not NOWHERE for version in self._switch.ending)

    def memory_bytes(self) -> int:
        """See `Tenant`."""
        return self._sleeper.memory_bytes()

    def stay(self) -> Stay | None:
        """See `Tenant`."""
        return self._sleeper.stay(self.route, is_busy=self._loading is not None or self._switch.trial is not None)

    def give_way(self) -> None:
        """See `Tenant`."""
        self._sleeper.sleep.is_asked = True
        self.wake()

    async def stop(self) -> None:
        """End all engines."""
        await self._switch.stop()

    async def _run_once(self) -> None:
        """Wait until there may be something to do, and do it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause()):
                await self._wake.wait()
        self._wake.clear()
        try:
            async with self._switch.deciding:
                await self._switch.watch()
                await self._settle()
        except Exception:
            log.exception("the versions of a model cannot be led to where they are to be", model=self.name)
            await asyncio.sleep(WATCH_SECONDS)
            self._switch.wake_later()
        self._placement.note()
        if self._loading is None and not self._wake.is_set():
            self._idle.set()

    def _pause(self) -> float | None:
        """Return after how long to look again if nothing happens; None for never."""
        if self._switch.trial is not None:
            return WATCH_SECONDS
        return None if self._loading is not None else self._sleeper.pause(self.route)

    async def _settle(self) -> None:
        """Begin to load what is wanted and not there; once nothing is missing, have it serve."""
        self.versions.forget_refused(self._found.versions)
        self._switch.refuse_dead()
        if self._loading is None:
            self._sleeper.decide(self._found.file, self.route, is_tried=self._switch.trial is not None)
            if self._sleeper.is_asleep:
                await self._sleeper.lie_down(self._found.file)
        if self._loading is None and (missing := self._missing()) is not None:
            self._loading = self._switch.spawn(self._bring_up(missing))
        if self._loading is not None:  # half of what is wanted is not what is wanted
            return
        target = self._wanted()
        if target.problems != self.problems:
            self.problems = target.problems
            for problem in target.problems:
                log.warning("what is wanted of a model cannot be had", model=self.name, problem=problem)
        route = self._route_to(target)
        is_all_refused = route is None and bool(self._found.versions) and not self.overrides.is_unloaded
        if is_all_refused and self.route is not None and self.route.default.is_asleep:
            await self._switch.give_up(self.route.default)
        if route != self.route and not is_all_refused:  # what serves goes on where nothing else can
            await self._switch.change(route)
        else:
            await self._switch.tell_again()
        self.versions.forget_asleep(target.versions)
        self._switch.retire_others()

    async def _bring_up(self, found: FoundVersion) -> None:
        """Load a version and prove it; what serves meanwhile goes on, unless `swap` says that a gap is accepted."""
        version, file = self.versions.known(found) or self.versions.begin(found), self._found.file
        log.info("loading a version", model=self.name, version=found.name or None, directory=str(found.directory))
        has_gap = file.swap.mode == "restart" and self.route is not None
        try:
            if version.state is State.ASLEEP:
                await self._sleeper.wake(version, file)
            elif self._sleeper.is_to_be_opened_only(version, self.route):
                await self._sleeper.open(version, file)
            elif await self._loader.bring_up(version, file, self._serving, self._switch.make_way if has_gap else None):
                log.info("a version is loaded and proved", model=self.name, version=version.label, content=version.content)
            else:
                self._workshop.swapped(self.name, "refused")
        finally:
            self._loading = None
            self.wake()

    def _serving(self) -> LoadedModel[E] | None:
        return None if self.route is None else self.route.default

    def _reading(self, version: Version[E]) -> VersionReading:
        outcomes = self.outcomes(version)
        cause = "" if version.cause is None else version.cause.value
        return VersionReading(self.name, version.label, version.state.value, cause, outcomes.num_answered, outcomes.num_failed)

    def _note_death(self, version: Version[E]) -> None:
        version.note_death()
        self.wake()

    def _is_needed(self, version: Version[E]) -> bool:
        """Return whether a version that cannot be started is tried again: while it is there, and nobody has taken its place."""
        return version.found in self._found.versions and not self._switch.is_answered

    def _is_any_up(self) -> bool:
        return any(version.answering is not None for version in self.known())

    def _wanted(self) -> Wanted:
        return self.would_want(self.overrides)

    def _missing(self) -> FoundVersion | None:
        """Return a version that is wanted and that nothing has been done about, or that is to be woken."""
        for found in self._wanted().versions:
            version = self.versions.known(found)
            if version is None or (version.state is State.ASLEEP and not self._sleeper.is_asleep):
                return found
        return None

    def _route_to(self, target: Wanted) -> Route[E] | None:
        """Return how requests are answered as is wanted; None if nobody can."""
        if target.default is None:
            return None
        models = {}
        for found in target.versions:
            version = self.versions.known(found)
            if version is not None and (version.is_up or version.state is State.ASLEEP) and version.answering is not None:
                models[found.name] = version.answering
        named = {name: model.label for name, model in models.items()}
        if target.default not in models:
            return None
        versions = {model.label: model for model in models.values()}
        shares = {named[name]: share for name, share in target.shares.items()}
        labels = {label: named[name] for label, name in target.labels.items()}
        return Route(models[target.default], versions, shares, labels, self._found.file.versions.sticky)
