"""The versions of one model, led to where its policy wants them: found, loaded, proved, served, watched, retired.

Whatever happens to a version, the ones that serve go on until another has taken their place, and end when no request holds them.
What a policy wants is decided in `policy.py`; how a version is opened and its engine made is the workshop's business.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Container, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic

import structlog

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import ConfigError
from dragoman.server.repository.found import FoundModel, FoundVersion
from dragoman.server.repository.history import History
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.models import CannotServe, Route
from dragoman.server.repository.policy import NO_OVERRIDES, Overrides, Wanted, wanted
from dragoman.server.repository.trial import Trial
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Opened, Refused, State, Version
from dragoman.server.repository.workshop import E, Front, Workshop
from dragoman.server.supervisor import EngineCannotStart
from dragoman.server.telemetry.version_metrics import VersionReading

# Of what has no files.
NOWHERE = FoundVersion("", Path(), (0, 0, 0))
# Between two looks at a version on probation.
WATCH_SECONDS = 0.25

log = structlog.get_logger("dragoman.repository")


class ModelKeeper(Generic[E]):
    """See above.

    Attributes:
        name: Of the model.
        versions: That there are, refused ones among them until their files change.
        route: Who answers requests now; None while nobody does.
        overrides: What an operator has asked for.
        problems: Of what is wanted, what cannot be had.
        history: Versions that have been the default.
    """

    def __init__(self, found: FoundModel, workshop: Workshop[E], front: Callable[[], Front[E]]) -> None:
        """Start with nothing loaded.

        Args:
            found: What lies in its folder.
            workshop: See there.
            front: Returns what answers callers, once there is something that does.
        """
        self.name = found.name
        self.versions: list[Version[E]] = []
        self.route: Route[E] | None = None
        self.overrides: Overrides = NO_OVERRIDES
        self.problems: tuple[str, ...] = ()
        self.history = History()
        self._found, self._workshop, self._front_of = found, workshop, front
        self._trial: Trial[E] | None = None
        self._is_lost = False
        self._told = ""
        self._absent: Version[E] | None = None
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_gone(self) -> bool:
        """Whether its folder is gone, and all of its versions."""
        return self._is_lost and self.route is None and not any(version.loaded for version in self.versions)

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
            self._found = found
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
        """Try again what has been refused: versions of these names, or all. One that still has requests ends beside that."""
        for version in [one for one in self.versions if one.state is State.REFUSED and (names is None or one.found.name in names)]:
            if version.loaded is not None:
                version.enter(State.RETIRING)
            else:
                self.versions.remove(version)
        self.wake()

    def would_want(self, overrides: Overrides, forgiven: Container[str] = ()) -> Wanted:
        """Return what would be served if an operator asked for this, and versions of some names had not been refused."""
        refused = {}
        for found in self._found.versions:
            version = self._known(found)
            if version is not None and version.state is State.REFUSED and found.name not in forgiven:
                refused[found.name] = version.reason
        return wanted(self._found.versions, self._found.file, refused, overrides)

    def known(self) -> list[Version[E]]:
        """Return the versions that there are, without what stands for one that cannot answer."""
        return [version for version in list(self.versions) if version is not self._absent]

    def outcomes(self, version: Version[E]) -> Outcomes:
        """Return what became of a version's requests."""
        return Outcomes() if version.loaded is None else self._front_of().outcomes(version.loaded)

    def wake(self) -> None:
        """Have a look at what there is to do."""
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
            version = self._begin(missing)
            try:
                version.opened = self._workshop.open(self.name, missing, self._found.file)
            except Refused as refused:
                first = first or refused
                version.refuse(refused)
        opened = [version.opened.bundle for version in self.versions if version.opened is not None]
        if first is not None and not opened:
            raise BundleError(first.reason) if first.cause is Cause.BUNDLE else ConfigError(first.reason)
        return opened

    def hold_first(self) -> None:
        """Have requests be told to come back, until what was opened first serves: `route` says how."""
        for version in self.versions:
            if version.state is State.REFUSED:
                self._tell_refused(version)
        default = self._wanted().default
        opened = {version.found.name: version for version in self.versions if version.opened is not None}
        if default is not None and (version := opened[default]).opened is not None:
            self.route = Route.to(self._load_absent(version.opened, version.label))

    async def start(self, *, is_persistent: bool = False) -> None:
        """Load and prove what was opened first, and have it serve; what cannot be makes way for the policy's next.

        Args:
            is_persistent: Whether an engine that cannot be started is tried again and again, where there is no other version.

        Raises:
            EngineCannotStart: If nothing can be served.
        """
        opened = [version for version in self.versions if version.state is State.OPENING]
        is_persistent = is_persistent and len(self._found.versions) == 1
        await asyncio.gather(*(self._bring_up_first(version, is_persistent) for version in opened))
        await self._settle()
        if self._found.versions and not any(version.is_up for version in self.versions if version is not self._absent):
            reasons = [version.reason for version in self.versions if version.reason]
            raise EngineCannotStart(f"model {self.name!r}: {reasons[0] if reasons else 'no version can be served'}")

    async def run(self) -> None:
        """Do what there is to do, until the model is gone."""
        self.wake()
        while not self.is_gone:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS if self._trial is not None else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._watch()
                await self._settle()
            except Exception:
                log.exception("the versions of a model cannot be led to where they are to be", model=self.name)
                await asyncio.sleep(WATCH_SECONDS)
            if not self._wake.is_set():
                self._idle.set()
        self._idle.set()

    def readings(self) -> list[VersionReading]:
        """Return how versions are, for metrics; on any thread."""
        return [self._reading(version) for version in self.known() if version.label]

    async def stop(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(model.engine.stop() for model in self._loaded()))

    async def _settle(self) -> None:
        """Load what is wanted and not there, then have it serve, until there is nothing more to be done."""
        self._forget_refused()
        while missing := self._missing():
            await self._bring_up(missing)
        target = self._wanted()
        if target.problems != self.problems:
            self.problems = target.problems
            for problem in target.problems:
                log.warning("what is wanted of a model cannot be had", model=self.name, problem=problem)
        route = self._route_to(target)
        is_all_refused = route is None and bool(self._found.versions) and not self.overrides.is_unloaded
        if route != self.route and not is_all_refused:  # what serves goes on where nothing else can
            await self._change(route)
        self._retire_others()

    async def _bring_up(self, found: FoundVersion) -> None:
        """Load a version and prove it; what serves meanwhile goes on, unless `swap` says that a gap is accepted."""
        version = self._begin(found)
        log.info("loading a version", model=self.name, version=found.name or None, directory=str(found.directory))

        async def load() -> None:
            async with self._workshop.turn:
                opened = version.opened = await asyncio.to_thread(self._workshop.open, self.name, found, self._found.file)
                if self._found.file.swap.mode == "restart" and self.route is not None:
                    await self._make_way(opened, version.label)
                beside = self.route.default if self.route is not None else None
                self._workshop.check_memory(opened.bundle, self._found.file, beside)
                await self._start(self._load(version), version, self._workshop.load_seconds)

        if await self._try(version, load()):
            log.info("a version is loaded and proved", model=self.name, version=version.label, content=version.content)
        else:
            self._workshop.swapped(self.name, "refused")

    async def _bring_up_first(self, version: Version[E], is_persistent: bool) -> None:
        """Load a version that was opened before the server began to answer, beside all others; as long as it takes."""
        await self._try(version, self._start(self._load(version), version, None, is_persistent=is_persistent))

    async def _try(self, version: Version[E], work: Coroutine[Any, Any, None]) -> bool:
        """Do what makes a version ready; return whether it is, for it is given up if that fails."""
        try:
            await work
        except Exception as error:
            if isinstance(error, Refused):
                refused = error
            else:
                log.exception("a version cannot be loaded", model=self.name)
                refused = Refused(Cause.START, f"{type(error).__name__}: {error}")
            await self._give_up(version, refused)
            return False
        version.enter(State.STANDBY)
        return True

    async def _start(
        self, loaded: LoadedModel[E], version: Version[E], seconds: float | None, *, is_persistent: bool = False
    ) -> None:
        """Start a version's engine, prove it, and have front ends be able to reach it."""
        version.enter(State.STARTING)
        try:
            async with asyncio.timeout(seconds):
                await self._until_started(loaded, is_persistent)
        except EngineCannotStart as error:
            raise Refused(Cause.START, str(error).removeprefix(f"model {self.name!r}: ")) from error
        except TimeoutError:
            raise Refused(Cause.START, f"it is not ready after {seconds:g} s (load_timeout_seconds)") from None
        version.enter(State.PROVING)
        await self._workshop.prove(loaded)
        await self._front_of().adopt(loaded)

    async def _until_started(self, loaded: LoadedModel[E], is_persistent: bool) -> None:
        try:
            await loaded.engine.start(is_persistent=is_persistent)
        except EngineCannotStart:
            if not is_persistent:
                raise
            while not loaded.engine.is_ready:  # it is tried again, and the log says so each time
                await asyncio.sleep(WATCH_SECONDS)

    async def _make_way(self, opened: Opened, label: str) -> None:
        """Have nobody serve the model, so that there is memory for a version; requests are told to come back."""
        if self._absent is not None and _has(self.route, self._absent):
            return
        others = [one for one in self.versions if one.loaded is not None]
        loaded = self._load_absent(opened, label)
        await self._front_of().adopt(loaded)
        self._trial = None
        await self._publish(Route.to(loaded))
        await asyncio.gather(*(self._retire(one) for one in others))

    async def _change(self, route: Route[E] | None) -> None:
        """Have other versions answer, and keep those that did until their successors have passed their probation."""
        before, trial = self.route, self._trial
        new = [version for version in self.versions if _has(route, version) and not _has(before, version)]
        try:
            await self._publish(route)
        except CannotServe as error:
            await self._take_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused")
            return
        fallback = before if trial is None else trial.fallback
        tried = [*new, *(version for version in (trial.versions if trial is not None else ()) if _has(route, version))]
        swap = self._found.file.swap
        self._trial = None
        if tried and fallback is not None and fallback.default.engine.is_ready and swap.probation_seconds:
            keeps = trial is not None and not new
            self._trial = trial if keeps else Trial(tried, fallback, swap, self._front_of().outcomes(fallback.default))
        elif new and before is not None and not (self._absent is not None and _has(before, self._absent)):
            self._workshop.swapped(self.name, "done")
        for version in self.versions:
            if version.is_up:
                is_tried = self._trial is not None and version in tried
                version.enter(State.TRIAL if is_tried else State.SERVING if _has(route, version) else State.STANDBY)
        served = {} if route is None else {label: model.version for label, model in route.versions.items()}
        default = None if route is None else route.default.label
        log.info("versions that serve", model=self.name, default=default, versions=served, on_trial=self._trial is not None)

    async def _watch(self) -> None:
        """Look at the versions on probation; have those before them back if one has failed, let those go if all have passed."""
        trial = self._trial
        if trial is None:
            return
        front = self._front_of()
        try:
            trial.check(front.outcomes)
        except Refused as refused:
            await self._take_back(trial.versions, refused, trial.fallback, "rolled_back")
        else:
            if trial.is_over:
                self._trial = None
                for version in trial.versions:
                    version.enter(State.SERVING)
                log.info("probation passed", model=self.name, versions=[version.label for version in trial.versions])
                self._workshop.swapped(self.name, "done")

    async def _take_back(self, versions: Sequence[Version[E]], refused: Refused, route: Route[E] | None, outcome: str) -> None:
        """Have those answer again who did before."""
        self._trial = None
        for version in versions:
            self._refuse(version, refused)
        try:
            await self._publish(route)
        except CannotServe as error:
            log.error("a front end does not serve as before", model=self.name, reason=str(error))
        for version in self.versions:
            if version.is_up and _has(route, version):
                version.enter(State.SERVING)
        for version in versions:
            self._spawn(self._retire(version))
        self._workshop.swapped(self.name, outcome)
        self.wake()

    async def _publish(self, route: Route[E] | None) -> None:
        self.route = route
        await self._front_of().publish(self.name, route)
        if route is not None:
            self.history.note(route.default.label)
        self._workshop.published(self.name, route)

    def _retire_others(self) -> None:
        """End what serves nobody and will not be needed, as soon as no request holds it."""
        fallback = self._trial.fallback if self._trial is not None else None
        for version in self.versions:
            if version.is_up and not (_has(self.route, version) or _has(fallback, version)):
                version.enter(State.RETIRING)
                self._spawn(self._retire(version))

    async def _retire(self, version: Version[E]) -> None:
        """End a version that no route leads to; a refused one stays known."""
        loaded = version.loaded
        assert loaded is not None
        if version.state is not State.REFUSED:
            version.enter(State.RETIRING)
        await self._front_of().until_released(loaded)
        await self._end(version)
        if version in self.versions and version.state is not State.REFUSED:
            self.versions.remove(version)
        if version is not self._absent:
            log.info("a version has ended", model=self.name, version=version.label, content=version.content)
        self.wake()

    async def _end(self, version: Version[E]) -> None:
        if version.loaded is not None:
            await version.loaded.engine.stop()
            version.loaded = None
            self._workshop.forget(self.name, version.replicas)

    async def _give_up(self, version: Version[E], refused: Refused) -> None:
        self._refuse(version, refused)
        await self._end(version)
        if version.state is not State.REFUSED:  # it was forgiven meanwhile
            self.versions.remove(version)

    def _refuse(self, version: Version[E], refused: Refused) -> None:
        version.refuse(refused)
        self._tell_refused(version)

    def _tell_refused(self, version: Version[E]) -> None:
        log.error(
            "a version is refused",
            model=self.name,
            version=version.label or None,
            directory=str(version.found.directory),
            cause=version.cause,
            reason=version.reason,
        )

    def _reading(self, version: Version[E]) -> VersionReading:
        outcomes = self.outcomes(version)
        cause = "" if version.cause is None else version.cause.value
        return VersionReading(self.name, version.label, version.state.value, cause, outcomes.num_answered, outcomes.num_failed)

    def _begin(self, found: FoundVersion) -> Version[E]:
        version = Version[E](self.name, found)
        self.versions.append(version)
        return version

    def _load(self, version: Version[E]) -> LoadedModel[E]:
        assert version.opened is not None
        version.replicas = self._free_replicas(version.opened)
        version.loaded = self._workshop.load(
            version.opened,
            self._found.file,
            version.label,
            version.replicas,
            on_death=lambda: self._note_death(version),
            is_observed=lambda: version.has_been_proved,
        )
        return version.loaded

    def _note_death(self, version: Version[E]) -> None:
        if self._trial is not None:
            self._trial.dead.add(version)
            self.wake()

    def _load_absent(self, opened: Opened, label: str) -> LoadedModel[E]:
        """Return what stands for a version while it cannot answer: its engine is never started."""
        loaded = self._workshop.load(opened, self._found.file, label, range(0))
        self._absent = Version[E](self.name, NOWHERE, State.STANDBY, opened=opened, loaded=loaded)
        self.versions.append(self._absent)
        return loaded

    def _free_replicas(self, opened: Opened) -> range:
        """Return the lowest numbers that no engine of the model has."""
        num_replicas = self._workshop.num_replicas(opened.bundle, self._found.file)
        taken = {number for other in self.versions if other.loaded is not None for number in other.replicas}
        first = 0
        while taken & set(range(first, first + num_replicas)):
            first += 1
        return range(first, first + num_replicas)

    def _loaded(self) -> list[LoadedModel[E]]:
        return [version.loaded for version in self.versions if version.loaded is not None]

    def _known(self, found: FoundVersion) -> Version[E] | None:
        """Return the version of what was found, in whichever part of its life but the end; None if there is none."""
        versions = (one for one in self.versions if one.found == found and one.state is not State.RETIRING)
        return next(versions, None)

    def _forget_refused(self) -> None:
        """Forget what was refused of files that are gone, or are others now."""
        there = self._found.versions
        self.versions = [one for one in self.versions if one.state is not State.REFUSED or one.loaded or one.found in there]

    def _wanted(self) -> Wanted:
        return self.would_want(self.overrides)

    def _missing(self) -> FoundVersion | None:
        """Return a version that is wanted and that nothing has been done about."""
        return next((found for found in self._wanted().versions if self._known(found) is None), None)

    def _route_to(self, target: Wanted) -> Route[E] | None:
        """Return how requests are answered as is wanted; None if nobody can."""
        if target.default is None:
            return None
        models = {}
        for found in target.versions:
            version = self._known(found)
            if version is not None and version.loaded is not None:
                models[found.name] = version.loaded
        named = {name: model.label for name, model in models.items()}
        if target.default not in models:
            return None
        versions = {model.label: model for model in models.values()}
        shares = {named[name]: share for name, share in target.shares.items()}
        labels = {label: named[name] for label, name in target.labels.items()}
        return Route(models[target.default], versions, shares, labels, self._found.file.versions.sticky)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _has(route: Route[Any] | None, version: Version[Any]) -> bool:
    """Return whether a route leads to a version."""
    return route is not None and any(model is version.loaded for model in route.versions.values())
