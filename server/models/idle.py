"""Idle unloading: unload a model after `idle_seconds` without requests, load it again on demand."""

import math
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Generic

import structlog

from dragoman.server.config import ConfigError
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.loader import NOWHERE, Loader, ModelVersions
from dragoman.server.models.memory import NotWanted, Placement, Stay
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.registry import Route
from dragoman.server.models.use import Holding, together
from dragoman.server.models.version import Cause, Refused, State, Version
from dragoman.server.models.workshop import E, Front, Workshop

# After a model could not be woken nobody tries again for so long, twice as long each further time up to the second.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class Why(StrEnum):
    """Why a model has fallen asleep."""

    IDLE = "idle"
    MEMORY = "memory"


class Sleep:
    """See above. It decides; who leads the model's versions does it.

    Attributes:
        keep_seconds: How long the model stays loaded without a request; infinite for always.
        is_asleep: What has been decided.
        why: Why it is asleep, if it has fallen asleep.
        is_asked: Whether it is to give way to another model.
        awake_since: When it was loaded last, by the clock.
        problem: Why it could not be woken the last time; empty if it could.
        retry_at: Before then it is not tried again.
    """

    def __init__(self, keep_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin asleep, unless it is always loaded.

        Args:
            keep_seconds: How long the model stays loaded without a request.
            clock: In seconds.
        """
        self.keep_seconds = keep_seconds
        self.is_asleep = keep_seconds < math.inf
        self.why = Why.IDLE
        self.is_asked = False
        self.awake_since = clock()
        self.problem = ""
        self.retry_at = -math.inf
        self._clock = clock
        self._num_failures = 0

    @property
    def may_sleep(self) -> bool:
        """Whether it is unloaded at all."""
        return self.keep_seconds < math.inf

    @property
    def retry_seconds(self) -> float:
        """Time until it may be tried again to wake it; 0 for at once."""
        return max(0.0, self.retry_at - self._clock())

    def decide(self, holding: Holding, *, is_awaited: bool, is_tried: bool) -> None:
        """Decide anew.

        Args:
            holding: How requests use it.
            is_awaited: Whether some wait for it.
            is_tried: Whether one of its versions is on probation: then it stays.
        """
        asked, self.is_asked = self.is_asked, False
        if not self.may_sleep:
            self.is_asleep = self.is_asleep and self.retry_seconds > 0
        elif self.is_asleep:
            self.is_asleep = not is_awaited or self.retry_seconds > 0
        elif not (is_awaited or is_tried):
            if asked:
                self.is_asleep, self.why = True, Why.MEMORY
            elif not holding.num_held and self._idle_seconds(holding) >= self.keep_seconds:
                self.is_asleep, self.why = True, Why.IDLE

    def pause(self, holding: Holding) -> float | None:
        """Return after how long it is to be decided anew if nothing happens; None for never."""
        if self.is_asleep:
            return self.retry_seconds or None
        if not self.may_sleep:
            return None
        return self.keep_seconds if holding.num_held else max(0.001, self.keep_seconds - self._idle_seconds(holding))

    def wake(self) -> None:
        """Take note that it has been loaded."""
        self.awake_since, self.problem, self._num_failures = self._clock(), "", 0

    def stay(self) -> None:
        """Be loaded for a while longer: it cannot sleep now."""
        self.is_asleep, self.awake_since = False, self._clock()

    def lie_down(self) -> None:
        """Sleep on: nobody waits any more."""
        self.is_asleep = True

    def fail(self, problem: str) -> None:
        """Sleep on: it could not be loaded, and may be the next time."""
        self.is_asleep, self.problem = True, problem
        seconds = min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(self._num_failures, 10))
        self._num_failures += 1
        self.retry_at = self._clock() + seconds

    def _idle_seconds(self, holding: Holding) -> float:
        return self._clock() - max(holding.last_used, self.awake_since)


# What may be otherwise the next time, and what requests are told of it: the reason may name other models, or files.
PASSING = {Cause.MEMORY: "there is no memory for it now", Cause.START: "its engine cannot be started now"}

log = structlog.get_logger("dragoman.repository")


class Sleeper(Generic[E]):
    """See above.

    Attributes:
        sleep: What is decided.
    """

    def __init__(
        self,
        versions: ModelVersions[E],
        loader: Loader[E],
        workshop: Workshop[E],
        front: Callable[[], Front[E]],
        placement: Placement,
        file: ModelFile,
    ) -> None:
        """Decide nothing yet.

        Args:
            versions: Of the model.
            loader: Of the model.
            workshop: See there.
            front: Returns what answers callers.
            placement: See there.
            file: Of the model.
        """
        self._name = versions.model
        self._versions, self._loader, self._workshop, self._front_of = versions, loader, workshop, front
        self._placement = placement
        self.sleep = Sleep(self._keep_seconds(file))
        self._told = ""

    @property
    def is_asleep(self) -> bool:
        """Whether nothing of the model is to be loaded."""
        return self.sleep.is_asleep

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for the model."""
        return self._front_of().is_awaited(self._name)

    @property
    def is_leaving(self) -> bool:
        """Whether the model is falling asleep, or has been asked to."""
        ending = (one for one in self._versions if one.state is State.RETIRING and one.loaded is not None)
        return self.sleep.is_asked or any(one.found is not NOWHERE for one in ending)

    def decide(self, file: ModelFile, route: Route[E] | None, *, is_tried: bool) -> None:
        """Decide anew whether the model is to be loaded; tell those who wait for one that cannot be now."""
        sleep = self.sleep
        sleep.keep_seconds = self._keep_seconds(file)
        if not (sleep.may_sleep or sleep.is_asleep):
            return
        sleep.decide(self._holding(route), is_awaited=self.is_awaited, is_tried=is_tried)
        if sleep.is_asleep and sleep.retry_seconds and self.is_awaited:
            self._refuse_waiting()

    def pause(self, route: Route[E] | None) -> float | None:
        """Return after how long to decide anew if nothing happens; None for never."""
        if not (self.sleep.may_sleep or self.is_asleep) or (self.is_awaited and not self.is_asleep):
            return None
        return self.sleep.pause(self._holding(route))

    def stay(self, route: Route[E] | None, *, is_busy: bool) -> Stay | None:
        """See `Tenant`."""
        if not self.sleep.may_sleep or self.is_asleep:
            return None
        is_waking = route is None or route.default.is_asleep
        if is_waking and not any(one.is_up and one.found is not NOWHERE for one in self._versions):
            return None
        is_busy = is_busy or is_waking or self.is_awaited or self.sleep.is_asked
        holding = self._holding(route)
        return Stay(holding.num_held, holding.warm_until, self.sleep.awake_since, is_busy)

    def memory_bytes(self) -> int:
        """See `Tenant`."""
        engines = [
            (one.reserved_bytes, one.loaded) for one in self._versions if one.loaded is not None and one.found is not NOWHERE
        ]
        return sum(max(reserved, self._workshop.resident_bytes(loaded)) for reserved, loaded in engines)

    def is_to_be_opened_only(self, version: Version[E], route: Route[E] | None) -> bool:
        """Return whether a version that was found is not to be loaded yet: nothing of the model is."""
        return version.state is State.OPENING and self.sleep.may_sleep and (route is None or route.default.is_asleep)

    def lay_down(self, version: Version[E], file: ModelFile) -> LoadedModel[E]:
        """Have a version that is open be described and sleep; return what front ends have to know of it."""
        return self._lay_down(version, self._stand_in(version, file))

    def _stand_in(self, version: Version[E], file: ModelFile) -> LoadedModel[E]:
        """Return what stands for a version while it is asleep.

        Raises:
            ConfigError: If it could not be woken by what the model's file says now.
        """
        assert version.opened is not None
        device = "" if version.loaded is None else version.loaded.device
        return self._workshop.sleeping(version.opened, file, version.label, device)

    def _lay_down(self, version: Version[E], sleeping: LoadedModel[E]) -> LoadedModel[E]:
        assert version.opened is not None
        version.sleeping = sleeping
        self._versions.stand_in(version.opened, sleeping)
        version.enter(State.ASLEEP)
        return sleeping

    async def open(self, version: Version[E], file: ModelFile) -> None:
        """Have a version that was found sleep, once it has been opened and front ends know it; or be refused."""
        if (sleeping := await self._loader.open(version, file)) is not None:
            self._lay_down(version, sleeping)

    async def lie_down(self, file: ModelFile) -> None:
        """Have everything that is loaded be about to end, and what is wanted of it sleep in its place."""
        up = [version for version in self._versions if version.is_up and version.found is not NOWHERE]
        try:
            sleeping = [self._stand_in(version, file) for version in up]
        except ConfigError as error:  # the file is another one than they were loaded with
            log.warning("a model does not sleep, for it could not be woken", model=self._name, reason=str(error))
            self.sleep.stay()
            return
        for version, model in zip(up, sleeping, strict=True):
            self._workshop.measure(version.loaded)
            version.enter(State.RETIRING)
            assert version.opened is not None
            successor = self._versions.begin(version.found)
            successor.open(version.opened)
            successor.was_proved = True
            await self._front_of().adopt(self._lay_down(successor, model))

    async def wake(self, version: Version[E], file: ModelFile) -> None:
        """Load a version and prove it, if there is memory and somebody still waits; what cannot be is told to who waits."""
        try:
            await self._loader.wake(version, file, lambda: self.is_awaited or not self.sleep.may_sleep)
        except NotWanted:
            version.enter(State.ASLEEP)
            self.sleep.lie_down()
        except Refused as refused:
            if refused.cause is Cause.MEMORY or (refused.cause in PASSING and version.was_proved):
                version.enter(State.ASLEEP)
                self.sleep.fail(refused.reason)
                self._told = PASSING[refused.cause]
                log.warning("a model cannot be woken", model=self._name, cause=refused.cause.value, reason=refused.reason)
                self._workshop.woken(self._name, "failed")
                self._refuse_waiting()
            else:
                self._loader.refuse(version, refused)
                self._workshop.woken(self._name, "refused")

    def _refuse_waiting(self) -> None:
        self._front_of().refuse_waiting(self._name, self._told, self.sleep.retry_seconds)

    def _holding(self, route: Route[E] | None) -> Holding:
        """Return how requests use the model, all of its versions together."""
        models: list[LoadedModel[E]] = [] if route is None else list(route.versions.values())
        uses = [self._front_of().holding(model) for model in models if not model.is_asleep]
        if not uses:
            return Holding(0, self.sleep.awake_since, self.sleep.awake_since)
        last_used, warm_until = max(use.last_used for use in uses), together(use.warm_until for use in uses)
        return Holding(sum(use.num_held for use in uses), last_used, warm_until)

    def _keep_seconds(self, file: ModelFile) -> float:
        own = file.settings.keep_loaded
        return self._placement.keep_seconds if own is None else own
