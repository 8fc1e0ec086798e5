"""Rollouts: a version replaces another, is checked as a canary, and is rolled back on failure."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import structlog

from dragoman.server.models.idle import Sleep
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.loader import NOWHERE, Loader, ModelVersions, is_in
from dragoman.server.models.memory import Placement
from dragoman.server.models.model_file import ModelFile, Swap
from dragoman.server.models.policy import History
from dragoman.server.models.registry import CannotServe, Route
from dragoman.server.models.use import Outcomes
from dragoman.server.models.version import Cause, Opened, Refused, State, Version
from dragoman.server.models.workshop import E, Front, Workshop

MIN_REQUESTS = 20
"""Fewer say little of a rate, or of a mean."""
JUDGED_SECONDS = 5.0
"""So long at the least what a version's answers take is added up before it is called too slow, or to the end of its probation."""
SETTLING, SETTLING_SECONDS = 0.25, 10.0
"""Part of a probation, and at most so long, in which nobody is too slow: loading has taken the cores, and queues have grown."""


@dataclass(slots=True, eq=False)
class Trial(Generic[E]):
    """See above.

    Attributes:
        versions: On probation.
        fallback: Who answered before, and does so again if one of them fails.
        swap: What is allowed, and how long it lasts.
        usual: What became of the requests of the one that answered most of them before.
        clock: Seconds, monotonic.
    """

    versions: Sequence[Version[E]]
    fallback: Route[E]
    swap: Swap
    usual: Outcomes
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0
    _while_settling: dict[Version[E], Outcomes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def is_over(self) -> bool:
        """Whether it has been long enough."""
        return self.clock() - self.began >= self.swap.probation_seconds

    def failed(self, outcomes: Callable[[LoadedModel[E]], Outcomes]) -> tuple[Version[E], Refused] | None:
        """Return a version that has failed, and why; None if all is well so far. What becomes of the others is told of themselves.

        Args:
            outcomes: Returns what became of a version's requests.
        """
        for version in self.versions:
            try:
                self._check(version, outcomes)
            except Refused as refused:
                return version, refused
        return None

    def _check(self, version: Version[E], outcomes: Callable[[LoadedModel[E]], Outcomes]) -> None:
        if version.has_died or (version.loaded is not None and not version.loaded.engine.is_ready):
            raise Refused(Cause.DEATH, f"its engine ended within {self.clock() - self.began:.1f} s of beginning to serve")
        if version.loaded is not None:
            found = outcomes(version.loaded)
            self._check_errors(found)
            if version.loaded.version != self.fallback.default.version:  # the same files are as fast; the machine is busier
                self._check_latency(version, found)

    def _check_errors(self, outcomes: Outcomes) -> None:
        total = outcomes.num_answered + outcomes.num_failed
        if total < MIN_REQUESTS:
            return
        if (rate := outcomes.num_failed / total) > self.swap.max_error_rate:
            limit = f"max_error_rate is {self.swap.max_error_rate:g}"
            raise Refused(Cause.ERRORS, f"{outcomes.num_failed} of {total} requests failed, {rate:.1%}; {limit}")

    def _check_latency(self, version: Version[E], outcomes: Outcomes) -> None:
        settling_seconds = min(self.swap.probation_seconds * SETTLING, SETTLING_SECONDS)
        if (seconds_passed := self.clock() - self.began) < settling_seconds:
            self._while_settling[version] = outcomes
        if seconds_passed < settling_seconds + JUDGED_SECONDS and not self.is_over:
            return
        outcomes = outcomes.since(self._while_settling.get(version, Outcomes()))
        if min(outcomes.num_answered, self.usual.num_answered) < MIN_REQUESTS:
            return
        seconds, usual = outcomes.seconds / outcomes.num_answered, self.usual.seconds / self.usual.num_answered
        if seconds > usual * self.swap.max_latency_factor:
            limit = f"max_latency_factor is {self.swap.max_latency_factor:g}"
            mean = f"its answers take {1000 * seconds:.0f} ms in the mean, those of the version before {1000 * usual:.0f} ms"
            raise Refused(Cause.LATENCY, f"{mean}; {limit}")


# Before front ends that did not do as told are told again.
RETRY_SECONDS = 10.0
log = structlog.get_logger("dragoman.repository")


class Switch(Generic[E]):
    """See above.

    Attributes:
        route: Who answers requests now; None while nobody does.
        history: Versions that have been the default.
        trial: Versions on probation; None while there are none.
        absent: What stands for a version that cannot answer, or did so last.
        ending: Versions that end when no request holds them.
        deciding: Held by who changes what is served; versions are loaded beside that, so that probations are watched meanwhile.
    """

    def __init__(
        self,
        versions: ModelVersions[E],
        loader: Loader[E],
        sleep: Sleep,
        workshop: Workshop[E],
        front: Callable[[], Front[E]],
        placement: Placement,
        *,
        file: Callable[[], ModelFile],
        wake: Callable[[], None],
    ) -> None:
        """Start with nobody who answers.

        Args:
            versions: Of the model.
            loader: Loads them.
            sleep: Of the model.
            workshop: See there.
            front: Returns what answers callers.
            placement: Is told when memory has become free.
            file: Returns the model's file.
            wake: Has the keeper look what there is to do.
        """
        self.route: Route[E] | None = None
        self.history = History()
        self.trial: Trial[E] | None = None
        self.absent: Version[E] | None = None
        self.ending: dict[Version[E], asyncio.Task[None]] = {}
        self.deciding = asyncio.Lock()
        self._model, self._versions, self._loader, self._sleep = versions.model, versions, loader, sleep
        self._workshop, self._front_of, self._placement, self._file, self._wake = workshop, front, placement, file, wake
        self._tasks: set[asyncio.Task[None]] = set()
        # While front ends may still answer by another route than the one that is, nothing ends.
        self._told = asyncio.Event()
        self._told.set()

    @property
    def is_answered(self) -> bool:
        """Whether requests get a version, and not what stands for one."""
        return self.route is not None and not (self.absent is not None and is_in(self.absent, self.route))

    async def stop(self) -> None:
        """End all engines, and whatever is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(model.engine.stop() for model in self._versions.loaded()))
        await asyncio.gather(*tasks, return_exceptions=True)

    def have_nobody_answer(self, opened: Opened, label: str) -> None:
        """Have `route` tell requests to come back; who answers callers is still to be told."""
        self._route_to_nobody(self._loader.stand_in(opened, label, self._file()))

    async def make_way(self, opened: Opened, label: str) -> None:
        """Have nobody serve the model, so that there is memory for a version; requests are told to come back."""
        async with self.deciding:
            if self.absent is not None and is_in(self.absent, self.route):
                return
            others = [one for one in self._versions if one.is_up]
            route = await self._adopt_nobody(opened, label)
            self.trial = None
            await self._publish(route)
        for one in others:
            self._end_soon(one)
        await asyncio.gather(*self.ending.values())

    async def give_up(self, sleeping: LoadedModel[E]) -> None:
        """Have requests be told to come back: the model sleeps, and no version of it can be woken."""
        opened = Opened(sleeping.bundle, sleeping.tokenizers, sleeping.frames)
        await self._publish(await self._adopt_nobody(opened, sleeping.label))

    async def _adopt_nobody(self, opened: Opened, label: str) -> Route[E]:
        """Return a route by which requests are told to come back; whoever answers callers is ready for it."""
        absent = self._loader.stand_in(opened, label, self._file())
        assert absent.loaded is not None
        try:
            await self._front_of().adopt(absent.loaded)
        except BaseException:
            self._versions.remove(absent)
            raise
        return self._route_to_nobody(absent)

    def _route_to_nobody(self, absent: Version[E]) -> Route[E]:
        assert absent.loaded is not None
        self.absent, self.route = absent, Route.to(absent.loaded, is_stand_in=True)
        return self.route

    async def change(self, route: Route[E] | None) -> None:
        """Have other versions answer, and keep those that did until their successors have passed their probation."""
        if any(one is not None and one.default.is_asleep for one in (self.route, route)):
            await self._change_asleep(route)
            return
        before, trial = self.route, self.trial
        fallback = before if trial is None else trial.fallback
        # Those to fall back on have answered before, and need not be tried.
        in_route = [version for version in self._versions if is_in(version, route) and not is_in(version, fallback)]
        new = [version for version in in_route if not is_in(version, before)]
        tried = [version for version in in_route if version in new or (trial is not None and version in trial.versions)]
        try:
            await self._publish(route)
        except CannotServe as error:
            await self._take_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused", trial)
            return
        swap = self._file().swap
        self.trial = None
        if tried and fallback is not None and fallback.default.engine.is_ready and swap.probation_seconds:
            if trial is not None and not new:
                trial.versions, self.trial = tried, trial
            else:
                self.trial = Trial(tried, fallback, swap, self._front_of().outcomes(fallback.default))
        elif new and before is not None and not (self.absent is not None and is_in(self.absent, before)):
            self._workshop.swapped(self._model, "done")
        self._tell_apart()
        self._say_who_serves()

    async def _change_asleep(self, route: Route[E] | None) -> None:
        """Have a model fall asleep or wake up. There is no probation: nobody could come back."""
        before = self.route
        new = [version for version in self._versions if is_in(version, route) and not is_in(version, before)]
        is_asleep = route is not None and route.default.is_asleep
        try:
            await self._publish(route)
        except CannotServe as error:
            if is_asleep:  # who serves goes on, and is told again
                log.error("a front end does not let a model sleep", model=self._model, reason=str(error))
                self.route = before
                self.wake_later()
            else:
                await self._take_back(new, Refused(Cause.FRONT_END, str(error)), before, "refused")
            return
        self.trial = None
        self._tell_apart()
        if route is not None and not is_asleep:
            self._sleep.wake()
            self._workshop.woken(self._model, "loaded")
            log.info("a model is awake", model=self._model)
        elif is_asleep and before is not None and not before.default.is_asleep:
            self._workshop.slept(self._model, self._sleep.why.value)
            log.info("a model has fallen asleep", model=self._model, why=self._sleep.why.value)

    async def watch(self) -> None:
        """Look at the versions on probation; have those before them back if one has failed, let those go if all have passed."""
        trial = self.trial
        if trial is None:
            return
        if (failed := trial.failed(self._front_of().outcomes)) is not None:
            version, refused = failed
            await self._take_back([version], refused, trial.fallback, "rolled_back")
        elif trial.is_over:
            self.trial = None
            for version in trial.versions:
                version.enter(State.SERVING)
            log.info("probation passed", model=self._model, versions=[version.label for version in trial.versions])
            self._workshop.swapped(self._model, "done")

    async def _take_back(
        self, versions: Sequence[Version[E]], refused: Refused, route: Route[E] | None, outcome: str, trial: Trial[E] | None = None
    ) -> None:
        """Have those answer again who did before, with the trial that they had; others begin theirs anew if still wanted."""
        self.trial = trial
        for version in versions:
            self._loader.refuse(version, refused)
        try:
            await self._publish(route)
        except Exception as error:  # what is refused is to end all the same, and `tell_again` sees to the rest
            is_expected = isinstance(error, CannotServe)
            log.error("a front end does not serve as before", model=self._model, reason=str(error), exc_info=not is_expected)
        self._tell_apart()
        for version in versions:
            self._end_soon(version)
        self._say_who_serves()
        self._workshop.swapped(self._model, outcome)
        if versions:
            self._wake()
        else:  # nothing that was wanted is any different
            self.wake_later()

    async def tell_again(self) -> None:
        """Have front ends answer by the route that is, if they could not be told of it."""
        if self._told.is_set():
            return
        try:
            await self._publish(self.route)
        except CannotServe as error:
            log.error("a front end still does not serve as it is to", model=self._model, reason=str(error))
            self.wake_later()
        else:
            self._tell_apart()

    def wake_later(self) -> None:
        """Have the keeper look again after a pause."""
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._wake)

    def _say_who_serves(self) -> None:
        versions = {} if self.route is None else {label: model.version for label, model in self.route.versions.items()}
        default = None if self.route is None else self.route.default.label
        log.info("versions that serve", model=self._model, default=default, versions=versions, on_trial=self.trial is not None)

    def _tell_apart(self) -> None:
        """Have versions know whether requests get them."""
        for version in self._versions:
            if version.is_up:
                is_tried = self.trial is not None and version in self.trial.versions
                version.enter(State.TRIAL if is_tried else State.SERVING if is_in(version, self.route) else State.STANDBY)

    async def _publish(self, route: Route[E] | None) -> None:
        self.route = route
        self._told.clear()
        await self._front_of().publish(self._model, route)
        self._told.set()
        if route is not None:
            self.history.note(route.default.label)
        self._workshop.published(self._model, route)

    def retire_others(self) -> None:
        """End what serves nobody and will not be needed, as soon as no request holds it."""
        fallback = self.trial.fallback if self.trial is not None else None
        for version in self._versions:
            is_there = version.is_up or version.state is State.RETIRING
            if is_there and not (is_in(version, self.route) or is_in(version, fallback)):
                self._end_soon(version)

    def refuse_dead(self) -> None:
        """Refuse versions whose engine has ended by itself before they have answered anybody."""
        fallback = self.trial.fallback if self.trial is not None else None
        for version in self._versions:
            if version.is_up and version.has_died and not (is_in(version, self.route) or is_in(version, fallback)):
                self._loader.refuse(version, Refused(Cause.DEATH, "its engine ended before it began to serve"))
                self._workshop.swapped(self._model, "refused")
                self._end_soon(version)

    def _end_soon(self, version: Version[E]) -> None:
        """End a version that no route leads to, as soon as no request holds it; one that is refused stays known."""
        if version.state is not State.REFUSED:
            version.enter(State.RETIRING)
        if version not in self.ending:
            self.ending[version] = self.spawn(self._retire(version))

    async def _retire(self, version: Version[E]) -> None:
        loaded = version.loaded
        assert loaded is not None
        try:
            await self._told.wait()
            await self._front_of().until_released(loaded)
            await self._loader.end(version)
        finally:
            del self.ending[version]
        self._versions.remove(version)
        self._placement.note()
        if version.found is not NOWHERE:
            log.info("a version has ended", model=self._model, version=version.label, content=version.content)
        self._wake()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have something done beside everything else, until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
