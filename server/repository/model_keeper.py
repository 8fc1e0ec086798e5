"""The versions of one model, led to where its policy wants them: found, loaded, proved, served, watched, retired.

Whatever happens to a version, the ones that serve go on until another has taken their place, and end when no request holds them.
What a policy wants is decided in `policy.py`; how a version is opened and its engine made is the workshop's business.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic

import structlog

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import ConfigError
from dragoman.server.repository.found import FoundModel, FoundVersion
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.loader import Loader
from dragoman.server.repository.model_versions import NOWHERE, ModelVersions, is_in
from dragoman.server.repository.models import CannotServe, Route
from dragoman.server.repository.placement import Placement, Stay
from dragoman.server.repository.policy import NO_OVERRIDES, Overrides, Wanted, wanted
from dragoman.server.repository.sleeper import Sleeper
from dragoman.server.repository.trial import Trial
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Opened, Refused, State, Version
from dragoman.server.repository.workshop import E, Front, Workshop
from dragoman.server.supervisor import EngineCannotStart
from dragoman.server.telemetry.version_metrics import VersionReading

# Between two looks at a version on probation.
WATCH_SECONDS = 0.25
# Before front ends that did not do as told are told again.
RETRY_SECONDS = 10.0

log = structlog.get_logger("dragoman.repository")


class ModelKeeper(Generic[E]):
    """See above.

    Attributes:
        name: Of the model.
        versions: That there are, refused ones among them until their files change.
        route: Who answers requests now; None while nobody does.
        overrides: What an operator has asked for.
        problems: Of what is wanted, what cannot be had.
    """

    def __init__(
        self, found: FoundModel, workshop: Workshop[E], front: Callable[[], Front[E]], placement: Placement | None = None
    ) -> None:
        """Start with nothing loaded.

        Args:
            found: What lies in its folder.
            workshop: See there.
            front: Returns what answers callers, once there is something that does.
            placement: Has models give way to each other; None if none ever sleeps.
        """
        self.name = found.name
        self.versions: ModelVersions[E] = ModelVersions(found.name)
        self.route: Route[E] | None = None
        self.overrides: Overrides = NO_OVERRIDES
        self.problems: tuple[str, ...] = ()
        self._found, self._workshop, self._front_of = found, workshop, front
        self._loader = Loader(self.versions, workshop, front, self._note_death, placement)
        self._placement = placement or Placement()
        self._sleeper = Sleeper(self.versions, self._loader, workshop, front, self._placement, found.file)
        self._trial: Trial[E] | None = None
        self._is_lost = False
        self._told = ""
        self._absent: Version[E] | None = None
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        # Held by who changes what is served; versions are loaded beside that, so that those on probation are watched meanwhile.
        self._deciding = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        self._ending: dict[Version[E], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_gone(self) -> bool:
        """Whether its folder is gone, and all of its versions."""
        return self._is_lost and self.route is None and self._loading is None and not self.versions.loaded()

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

    def forgive(self) -> None:
        """Try again what has been refused."""
        self.versions.forget_refused()
        self.wake()

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
            version = self.versions.begin(missing)
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
        target = self._wanted()
        default = target.default
        for version in self.versions:
            if version.cause is not None:
                self._loader.refuse(version, Refused(version.cause, version.reason))
            elif version.opened is not None and self._sleeper.is_asleep:
                self._sleeper.lay_down(version, self._found.file)
            elif version.opened is not None and version.found.name == default:
                self._have_nobody_answer(version.opened, version.label)
        if self._sleeper.is_asleep:
            self.route = self._route_to(target)

    async def start(self, *, is_persistent: bool = False) -> None:
        """Load and prove what was opened first, and have it serve; what cannot be makes way for the policy's next.

        Args:
            is_persistent: Whether an engine that cannot be started is tried again and again, where there is no other version.

        Raises:
            EngineCannotStart: If nothing can be served.
        """
        opened = [version for version in self.versions if version.state is State.OPENING]
        is_persistent = is_persistent and len(self._found.versions) == 1
        file = self._found.file
        bring_up = partial(self._loader.bring_up_opened, file=file, is_needed=self._is_needed if is_persistent else None)
        await asyncio.gather(*map(bring_up, opened))
        while True:
            async with self._deciding:
                await self._settle()
            if self._loading is None:
                break
            await asyncio.wait([self._loading])
        is_served = any(version.answering is not None for version in self.versions if version.found is not NOWHERE)
        if self._found.versions and not is_served:
            reasons = [version.reason for version in self.versions if version.reason]
            raise EngineCannotStart(f"model {self.name!r}: {reasons[0] if reasons else 'no version can be served'}")

    async def run(self) -> None:
        """Do what there is to do, until the model is gone."""
        self.wake()
        try:
            while not self.is_gone:
                await self._run_once()
        finally:
            self._idle.set()

    def readings(self) -> list[VersionReading]:
        """Return how versions are, for metrics; on any thread."""
        shown = [one for one in self.versions if (one.label or one.state is State.REFUSED) and one.found is not NOWHERE]
        return [self._reading(version) for version in shown]

    @property
    def is_leaving(self) -> bool:
        """See `Tenant`, as the next three."""
        return self._sleeper.is_leaving or any(version.found is not NOWHERE for version in self._ending)

    def memory_bytes(self) -> int:
        """See `Tenant`."""
        return self._sleeper.memory_bytes()

    def stay(self) -> Stay | None:
        """See `Tenant`."""
        return self._sleeper.stay(self.route, is_busy=self._loading is not None or self._trial is not None)

    def give_way(self) -> None:
        """See `Tenant`."""
        self._sleeper.sleep.is_asked = True
        self.wake()

    async def stop(self) -> None:
        """End all engines."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(model.engine.stop() for model in self.versions.loaded()))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_once(self) -> None:
        """Wait until there may be something to do, and do it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_SECONDS if self._trial is not None else self._sleeper.pause(self.route)):
                await self._wake.wait()
        self._wake.clear()
        try:
            async with self._deciding:
                await self._watch()
                await self._settle()
        except Exception:
            log.exception("the versions of a model cannot be led to where they are to be", model=self.name)
            await asyncio.sleep(WATCH_SECONDS)
        self._placement.note()
        if self._loading is None and not self._wake.is_set():
            self._idle.set()

    async def _settle(self) -> None:
        """Begin to load what is wanted and not there; once nothing is missing, have it serve."""
        self.versions.forget_refused(self._found.versions)
        self._refuse_dead()
        if self._loading is None:
            self._sleeper.decide(self._found.file, self.route, is_tried=self._trial is not None)
            if self._sleeper.is_asleep:
                await self._sleeper.lie_down(self._found.file)
        if self._loading is None and (missing := self._missing()) is not None:
            self._loading = self._spawn(self._bring_up(missing))
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
            await self._give_up(self.route.default)
        if route != self.route and not is_all_refused:  # what serves goes on where nothing else can
            await self._change(route)
        self.versions.forget_asleep(target.versions)
        self._retire_others()

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
            elif await self._loader.bring_up(version, file, self._serving, self._make_way if has_gap else None):
                log.info("a version is loaded and proved", model=self.name, version=version.label, content=version.content)
            else:
                self._workshop.swapped(self.name, "refused")
        finally:
            self._loading = None
            self.wake()

    def _serving(self) -> LoadedModel[E] | None:
        return None if self.route is None else self.route.default

    async def _make_way(self, opened: Opened, label: str) -> None:
        """Have nobody serve the model, so that there is memory for a version; requests are told to come back."""
        async with self._deciding:
            if self._absent is not None and is_in(self._absent, self.route):
                return
            others = [one for one in self.versions if one.is_up]
            route = self._have_nobody_answer(opened, label)
            await self._front_of().adopt(route.default)
            self._trial = None
            await self._publish(route)
        for one in others:
            self._end_soon(one)
        await asyncio.gather(*self._ending.values())

    def _have_nobody_answer(self, opened: Opened, label: str) -> Route[E]:
        self._absent = self._loader.stand_in(opened, label, self._found.file)
        assert self._absent.loaded is not None
        self.route = Route.to(self._absent.loaded)
        return self.route

    async def _give_up(self, sleeping: LoadedModel[E]) -> None:
        """Have requests be told to come back: the model sleeps, and no version of it can be woken."""
        route = self._have_nobody_answer(Opened(sleeping.bundle, sleeping.tokenizers, sleeping.frames), sleeping.label)
        await self._front_of().adopt(route.default)
        await self._publish(route)

    async def _change_asleep(self, route: Route[E] | None) -> None:
        """Have a model fall asleep or wake up. There is no probation: nobody could come back."""
        before = self.route
        new = [version for version in self.versions if is_in(version, route) and not is_in(version, before)]
        is_asleep = route is not None and route.default.is_asleep
        try:
            await self._publish(route)
        except CannotServe as error:
            if is_asleep:  # who serves goes on, and is told again
                log.error("a front end does not let a model sleep", model=self.name, reason=str(error))
                self.route = before
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self.wake)
            else:
                await self._take_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused")
            return
        self._trial = None
        self._tell_apart()
        if route is not None and not is_asleep:
            self._sleeper.sleep.wake()
            self._workshop.woken(self.name, "loaded")
            log.info("a model is awake", model=self.name)
        elif is_asleep and before is not None and not before.default.is_asleep:
            self._workshop.slept(self.name, self._sleeper.sleep.why.value)
            log.info("a model has fallen asleep", model=self.name, why=self._sleeper.sleep.why.value)

    async def _change(self, route: Route[E] | None) -> None:
        """Have other versions answer, and keep those that did until their successors have passed their probation."""
        if any(one is not None and one.default.is_asleep for one in (self.route, route)):
            await self._change_asleep(route)
            return
        before, trial = self.route, self._trial
        fallback = before if trial is None else trial.fallback
        # Those to fall back on have answered before, and need not be tried.
        in_route = [version for version in self.versions if is_in(version, route) and not is_in(version, fallback)]
        new = [version for version in in_route if not is_in(version, before)]
        tried = [version for version in in_route if version in new or (trial is not None and version in trial.versions)]
        try:
            await self._publish(route)
        except CannotServe as error:
            await self._take_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused", trial)
            return
        swap = self._found.file.swap
        self._trial = None
        if tried and fallback is not None and fallback.default.engine.is_ready and swap.probation_seconds:
            if trial is not None and not new:
                trial.versions, self._trial = tried, trial
            else:
                self._trial = Trial(tried, fallback, swap, self._front_of().outcomes(fallback.default))
        elif new and before is not None and not (self._absent is not None and is_in(self._absent, before)):
            self._workshop.swapped(self.name, "done")
        self._tell_apart()
        served = {} if route is None else {label: model.version for label, model in route.versions.items()}
        default = None if route is None else route.default.label
        log.info("versions that serve", model=self.name, default=default, versions=served, on_trial=self._trial is not None)

    async def _watch(self) -> None:
        """Look at the versions on probation; have those before them back if one has failed, let those go if all have passed."""
        trial = self._trial
        if trial is None:
            return
        if (failed := trial.failed(self._front_of().outcomes)) is not None:
            version, refused = failed
            await self._take_back([version], refused, trial.fallback, "rolled_back")
        elif trial.is_over:
            self._trial = None
            for version in trial.versions:
                version.enter(State.SERVING)
            log.info("probation passed", model=self.name, versions=[version.label for version in trial.versions])
            self._workshop.swapped(self.name, "done")

    async def _take_back(
        self, versions: Sequence[Version[E]], refused: Refused, route: Route[E] | None, outcome: str, trial: Trial[E] | None = None
    ) -> None:
        """Have those answer again who did before, with the trial that they had; others begin theirs anew if still wanted."""
        self._trial = trial
        for version in versions:
            self._loader.refuse(version, refused)
        try:
            await self._publish(route)
        except CannotServe as error:
            log.error("a front end does not serve as before", model=self.name, reason=str(error))
        self._tell_apart()
        for version in versions:
            self._end_soon(version)
        self._workshop.swapped(self.name, outcome)
        if versions:
            self.wake()
        else:  # nothing that was wanted is any different
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.wake)

    def _tell_apart(self) -> None:
        """Have versions know whether requests get them."""
        for version in self.versions:
            if version.is_up:
                is_tried = self._trial is not None and version in self._trial.versions
                version.enter(State.TRIAL if is_tried else State.SERVING if is_in(version, self.route) else State.STANDBY)

    async def _publish(self, route: Route[E] | None) -> None:
        self.route = route
        await self._front_of().publish(self.name, route)
        self._workshop.published(self.name, route)

    def _retire_others(self) -> None:
        """End what serves nobody and will not be needed, as soon as no request holds it."""
        fallback = self._trial.fallback if self._trial is not None else None
        for version in self.versions:
            is_there = version.is_up or version.state is State.RETIRING
            if is_there and not (is_in(version, self.route) or is_in(version, fallback)):
                self._end_soon(version)

    def _refuse_dead(self) -> None:
        """Refuse versions whose engine has ended by itself before they have answered anybody."""
        fallback = self._trial.fallback if self._trial is not None else None
        for version in self.versions:
            if version.is_up and version.has_died and not (is_in(version, self.route) or is_in(version, fallback)):
                self._loader.refuse(version, Refused(Cause.DEATH, "its engine ended before it began to serve"))
                self._workshop.swapped(self.name, "refused")
                self._end_soon(version)

    def _end_soon(self, version: Version[E]) -> None:
        """End a version that no route leads to, as soon as no request holds it; one that is refused stays known."""
        if version.state is not State.REFUSED:
            version.enter(State.RETIRING)
        if version not in self._ending:
            self._ending[version] = self._spawn(self._retire(version))

    async def _retire(self, version: Version[E]) -> None:
        loaded = version.loaded
        assert loaded is not None
        try:
            await self._front_of().until_released(loaded)
            await self._loader.end(version)
        finally:
            del self._ending[version]
        self.versions.remove(version)
        self._placement.note()
        if version.found is not NOWHERE:
            log.info("a version has ended", model=self.name, version=version.label, content=version.content)
        self.wake()

    def _reading(self, version: Version[E]) -> VersionReading:
        loaded = version.loaded  # another thread may let go of it at any time
        outcomes = Outcomes() if loaded is None else self._front_of().outcomes(loaded)
        cause = "" if version.cause is None else version.cause.value
        return VersionReading(self.name, version.label, version.state.value, cause, outcomes.num_answered, outcomes.num_failed)

    def _note_death(self, version: Version[E]) -> None:
        version.note_death()
        self.wake()

    def _is_needed(self, version: Version[E]) -> bool:
        """Return whether a version that cannot be started is tried again: while it is there, and nobody has taken its place."""
        is_nobody_there = self.route is None or (self._absent is not None and is_in(self._absent, self.route))
        return version.found in self._found.versions and is_nobody_there

    def _wanted(self) -> Wanted:
        refused = {}
        for found in self._found.versions:
            version = self.versions.known(found)
            if version is not None and version.state is State.REFUSED:
                refused[found.name] = version.reason
        return wanted(self._found.versions, self._found.file, refused, self.overrides)

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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
