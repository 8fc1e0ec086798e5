"""Reconciliation of one model: a pure function from what is found, wanted and loaded to the next actions.

The executor (`ModelReconciler`) carries the actions out in order and asks again until there are none. Nothing here reads a clock,
a file or a socket.
"""

import math
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from dragoman.server.models.discovery import FoundModel, FoundVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.model_file import Swap
from dragoman.server.models.policy import Overrides, Wanted, wanted
from dragoman.server.models.registry import Route
from dragoman.server.models.use import Holding, Outcomes
from dragoman.server.models.version import Cause, Refused, State, Version

# Canary check: fewer requests say little of a rate or of a mean.
MIN_REQUESTS = 20
# Least time over which answers are measured before a version counts as too slow, unless its probation ends before.
JUDGED_SECONDS = 5.0
# Part of a probation, and its bound, in which no version is too slow: loading took the cores, and queues have grown.
SETTLING, SETTLING_SECONDS = 0.25, 10.0
# Pause after a model could not be loaded again; it doubles with each further failure up to the bound.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class UnloadCause(StrEnum):
    """Reason why a model was unloaded."""

    IDLE = "idle"
    MEMORY = "memory"


@dataclass(slots=True)
class Idle:
    """Idle unloading of one model.

    Attributes:
        keep_seconds: Seconds without a request after which the model is unloaded; infinite for never.
        awake_since: Time of the last load, by the monotonic clock.
        is_asleep: Whether nothing of the model is to be loaded.
        why: Reason of the last unloading.
        is_evicted: Whether the model is to be unloaded to free memory.
        problem: Reason why it could not be loaded the last time; empty if it could.
        retry_at: Earliest time of the next attempt.
        num_failures: Failed attempts in a row.
    """

    keep_seconds: float
    awake_since: float
    is_asleep: bool = field(init=False)
    why: UnloadCause = UnloadCause.IDLE
    is_evicted: bool = False
    problem: str = ""
    retry_at: float = -math.inf
    num_failures: int = 0

    def __post_init__(self) -> None:
        self.is_asleep = self.may_sleep

    @property
    def may_sleep(self) -> bool:
        """Whether the model is ever unloaded."""
        return self.keep_seconds < math.inf

    def retry_seconds(self, now: float) -> float:
        """Return the time until the next attempt to load; 0 for at once."""
        return max(0.0, self.retry_at - now)

    def is_wake_due(self, seen: "Observed") -> bool:
        """Return whether a model that is asleep is to be loaded now."""
        return self.is_asleep and seen.now >= self.retry_at and (seen.is_awaited or not self.may_sleep)

    def unload_cause(self, seen: "Observed", *, has_canary: bool) -> UnloadCause | None:
        """Return why a loaded model is to be unloaded now; None if it is not."""
        if self.is_asleep or not self.may_sleep or seen.is_awaited or has_canary:
            return None
        if self.is_evicted:
            return UnloadCause.MEMORY
        is_idle = not seen.holding.num_held and self._idle_seconds(seen) >= self.keep_seconds
        return UnloadCause.IDLE if is_idle else None

    def pause(self, seen: "Observed") -> float | None:
        """Return the time until the next decision if nothing happens; None for never."""
        if self.is_asleep:
            return self.retry_seconds(seen.now) or None
        if not self.may_sleep or seen.is_awaited:
            return None
        return self.keep_seconds if seen.holding.num_held else max(0.001, self.keep_seconds - self._idle_seconds(seen))

    def note_awake(self, now: float) -> None:
        """Take note that the model has been loaded."""
        self.awake_since, self.problem, self.num_failures = now, "", 0

    def note_failure(self, problem: str, now: float) -> None:
        """Stay asleep: the model could not be loaded, and may be at the next attempt."""
        self.is_asleep, self.problem = True, problem
        self.retry_at = now + min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(self.num_failures, 10))
        self.num_failures += 1

    def _idle_seconds(self, seen: "Observed") -> float:
        return seen.now - max(seen.holding.last_used, self.awake_since)


@dataclass(slots=True, eq=False)
class Canary:
    """Canary check of versions that have replaced others, which are kept for a rollback.

    Attributes:
        versions: On probation.
        fallback: Route before them, which a failure restores.
        swap: Limits and length of the probation.
        usual: Outcomes of the version that answered before.
        began: Start of the probation, by the monotonic clock.
        outcomes: Outcomes of the versions, as last observed.
        settling: The same as last observed while the versions settled.
    """

    versions: Sequence[Version]
    fallback: Route
    swap: Swap
    usual: Outcomes
    began: float
    outcomes: dict[Version, Outcomes] = field(default_factory=dict)
    settling: dict[Version, Outcomes] = field(default_factory=dict)

    @property
    def settling_seconds(self) -> float:
        """Length of the time in which latencies are not judged."""
        return min(self.swap.probation_seconds * SETTLING, SETTLING_SECONDS)

    def observe(self, outcomes_of: Callable[[LoadedModel], Outcomes], now: float) -> None:
        """Record the outcomes of the versions' requests."""
        self.outcomes = {one: outcomes_of(one.loaded) for one in self.versions if one.loaded is not None}
        if now - self.began < self.settling_seconds:
            self.settling = self.outcomes

    def is_over(self, now: float) -> bool:
        """Return whether the probation has lasted long enough."""
        return now - self.began >= self.swap.probation_seconds

    def failed(self, now: float) -> tuple[Version, Refused] | None:
        """Return the first version that has failed, and why; None if none has."""
        for version in self.versions:
            if (refused := self._check(version, now)) is not None:
                return version, refused
        return None

    def _check(self, version: Version, now: float) -> Refused | None:
        loaded, seconds = version.loaded, now - self.began
        if version.has_died or (loaded is not None and not loaded.engine.is_ready):
            return Refused(Cause.DEATH, f"its engine ended within {seconds:.1f} s of beginning to serve")
        found = self.outcomes.get(version)
        if loaded is None or found is None:
            return None
        total = found.num_answered + found.num_failed
        if total >= MIN_REQUESTS and (rate := found.num_failed / total) > self.swap.max_error_rate:
            limit = f"max_error_rate is {self.swap.max_error_rate:g}"
            return Refused(Cause.ERRORS, f"{found.num_failed} of {total} requests failed, {rate:.1%}; {limit}")
        if loaded.version == self.fallback.default.version:  # the same files are as fast; the machine is busier
            return None
        if seconds < self.settling_seconds + JUDGED_SECONDS and not self.is_over(now):
            return None
        found, usual = found.since(self.settling.get(version, Outcomes())), self.usual
        if min(found.num_answered, usual.num_answered) < MIN_REQUESTS:
            return None
        mean, usual_mean = found.seconds / found.num_answered, usual.seconds / usual.num_answered
        if mean <= usual_mean * self.swap.max_latency_factor:
            return None
        told = f"its answers take {1000 * mean:.0f} ms in the mean, those of the version before {1000 * usual_mean:.0f} ms"
        return Refused(Cause.LATENCY, f"{told}; max_latency_factor is {self.swap.max_latency_factor:g}")


@dataclass(slots=True)
class Loaded:
    """The versions of one model, and the route of its requests.

    Attributes:
        model: Name of the model.
        idle: Its idle unloading.
        versions: All that are known, refused ones and stand-ins among them, in the order in which they came.
        route: Answers requests now; None while nothing does.
        canary: Canary check that lasts; None for none.
    """

    model: str
    idle: Idle
    versions: list[Version] = field(default_factory=list)
    route: Route | None = None
    canary: Canary | None = None

    def add(self, found: FoundVersion) -> Version:
        """Return a new version."""
        self.versions.append(version := Version(self.model, found))
        return version

    def remove(self, version: Version) -> None:
        """Forget a version; without effect where it is forgotten."""
        if version in self.versions:
            self.versions.remove(version)

    def known(self, found: FoundVersion) -> Version | None:
        """Return the version of a folder, unless it is ending; None if there is none."""
        return next((one for one in self.versions if one.found == found and one.state is not State.RETIRING), None)

    def with_files(self) -> list[Version]:
        """Return the versions that have files; callable on any thread."""
        return [one for one in list(self.versions) if not one.is_stand_in]

    def is_held(self, version: Version) -> bool:
        """Return whether a version answers requests, or may have to again."""
        return is_in(version, self.route) or (self.canary is not None and is_in(version, self.canary.fallback))

    def retry_refused(self, names: Collection[str] | None, causes: frozenset[Cause] = frozenset(Cause)) -> None:
        """Forget refusals, of these names or all, for these causes; a version that requests still hold ends first."""
        for version in list(self.versions):
            if version.state is State.REFUSED and version.cause in causes and (names is None or version.found.name in names):
                if version.loaded is None:
                    self.remove(version)
                else:
                    version.enter(State.RETIRING)

    def free_replicas(self, num_replicas: int) -> range:
        """Return the lowest consecutive numbers that no engine of the model has."""
        taken = {number for version in self.versions if version.loaded is not None for number in version.replicas}
        first = 0
        while taken & set(range(first, first + num_replicas)):
            first += 1
        return range(first, first + num_replicas)


class Observed(NamedTuple):
    """Facts at the moment of a decision.

    Attributes:
        now: Time, by the monotonic clock.
        holding: Use of the model by requests, of all versions together.
        is_awaited: Whether requests wait for the model to be loaded.
        is_loading: Whether a version is being loaded.
        is_published: False while frontends may still answer by an earlier route.
    """

    now: float
    holding: Holding
    is_awaited: bool = False
    is_loading: bool = False
    is_published: bool = True


LoadMode = Literal["beside", "instead", "describe", "wake", "first"]
"""Beside the versions that serve, instead of them, only as far as a description, from its sleep, or when the server starts."""


class Load(NamedTuple):
    """Load a version."""

    found: FoundVersion
    mode: LoadMode


class Publish(NamedTuple):
    """Answer requests by this route."""

    route: Route | None


class GiveUp(NamedTuple):
    """Refuse requests for now: the model is asleep, and no version of it can be loaded."""


class Refuse(NamedTuple):
    """Refuse a version that was loaded and does not serve."""

    version: Version
    refused: Refused


class RollBack(NamedTuple):
    """Refuse a version on probation, and restore the route before it."""

    version: Version
    refused: Refused


class Promote(NamedTuple):
    """End the probation: its versions have passed."""


class Sleep(NamedTuple):
    """Unload everything, and describe it."""

    why: UnloadCause


class Wake(NamedTuple):
    """Let the model be loaded again."""


class Drain(NamedTuple):
    """End a version as soon as no request holds it."""

    version: Version


class Forget(NamedTuple):
    """Remove a version that has no engine."""

    version: Version


Action = Load | Publish | GiveUp | Refuse | RollBack | Promote | Sleep | Wake | Drain | Forget


def reconcile(found: FoundModel, overrides: Overrides, loaded: Loaded, seen: Observed) -> Sequence[Action]:
    """Return the next actions; none when the model is as it is wanted, or while it has to wait.

    Args:
        found: Folder and `model.toml` of the model.
        overrides: Wishes of operators.
        loaded: Versions and route.
        seen: Facts of this moment.
    """
    canary, idle, versions = loaded.canary, loaded.idle, loaded.versions
    if canary is not None:
        if (failed := canary.failed(seen.now)) is not None:
            return [RollBack(*failed)]
        if canary.is_over(seen.now):
            return [Promote()]
    gone = [one for one in versions if one.state is State.REFUSED and one.loaded is None and one.found not in found.versions]
    dead = [one for one in versions if one.is_up and one.has_died and not loaded.is_held(one)]
    if gone or dead:
        return [
            *map(Forget, gone),
            *(Refuse(one, Refused(Cause.DEATH, "its engine ended before it began to serve")) for one in dead),
        ]
    if seen.is_loading:
        return []
    if idle.is_wake_due(seen):
        return [Wake()]
    if (why := idle.unload_cause(seen, has_canary=canary is not None)) is not None:
        return [Sleep(why)]
    if idle.is_asleep and any(one.is_up and not one.is_stand_in for one in versions):
        return [Sleep(idle.why)]
    if (load := _next_load(found, overrides, loaded)) is not None:
        return [load]
    # Nothing is missing, and half of what is wanted was never served.
    target = target_of(found, overrides, loaded)
    route = route_to(target, found, loaded)
    if route is None and found.versions and not overrides.is_unloaded:  # what serves goes on where nothing else can
        if loaded.route is not None and loaded.route.default.is_asleep:
            return [GiveUp()]
        route = loaded.route
    if route != loaded.route or not seen.is_published:
        return [Publish(route)]
    unwanted = [one for one in versions if one.state is State.ASLEEP and one.found not in target.versions]
    ending = [one for one in versions if (one.is_up or one.state is State.RETIRING) and not one.is_draining]
    replaced = [one for one in ending if not loaded.is_held(one)]
    return [*map(Forget, unwanted), *map(Drain, replaced)]


def target_of(found: FoundModel, overrides: Overrides, loaded: Loaded, retried: Container[str] = ()) -> Wanted:
    """Return what is to be served, by the policy and by the refusals so far, but for those of some names."""
    refused = {}
    for one in found.versions:
        version = loaded.known(one)
        if version is not None and version.state is State.REFUSED and one.name not in retried:
            refused[one.name] = version.reason
    return wanted(found.versions, found.file, refused, overrides)


def missing(found: FoundModel, overrides: Overrides, loaded: Loaded) -> FoundVersion | None:
    """Return the first version that is wanted and that nothing has been done about, or that is to be woken."""
    for one in target_of(found, overrides, loaded).versions:
        version = loaded.known(one)
        if version is None or (version.state is State.ASLEEP and not loaded.idle.is_asleep):
            return one
    return None


def _next_load(found: FoundModel, overrides: Overrides, loaded: Loaded) -> Load | None:
    if (one := missing(found, overrides, loaded)) is None:
        return None
    route = loaded.route
    if loaded.known(one) is not None:
        return Load(one, "wake")
    if loaded.idle.may_sleep and (route is None or route.default.is_asleep):
        return Load(one, "describe")
    return Load(one, "instead" if found.file.swap.mode == "restart" and route is not None else "beside")


def route_to(target: Wanted, found: FoundModel, loaded: Loaded) -> Route | None:
    """Return the route that a policy wants; None if its default cannot answer."""
    models: dict[str, LoadedModel] = {}
    for one in target.versions:
        version = loaded.known(one)
        if version is not None and (version.is_up or version.state is State.ASLEEP) and version.answering is not None:
            models[one.name] = version.answering
    if target.default is None or target.default not in models:
        return None
    named = {name: model.label for name, model in models.items()}
    shares = {named[name]: share for name, share in target.shares.items() if name in named}
    labels = {label: named[name] for label, name in target.labels.items() if name in named}
    sticky = found.file.versions.sticky
    return Route(models[target.default], {model.label: model for model in models.values()}, shares, labels, sticky)


def next_canary(
    loaded: Loaded, route: Route | None, swap: Swap, outcomes_of: Callable[[LoadedModel], Outcomes], now: float
) -> Canary | None:
    """Return the canary check of a route that takes the place of the present one; None for none.

    Versions that have answered before need none, and there is none where nothing could come back.
    """
    before, canary = loaded.route, loaded.canary
    fallback = before if canary is None else canary.fallback
    if fallback is None or route is None or not swap.probation_seconds:
        return None
    if fallback.default.is_asleep or route.default.is_asleep or not fallback.default.engine.is_ready:
        return None
    added = [one for one in loaded.versions if is_in(one, route) and not is_in(one, fallback)]
    is_new = any(not is_in(one, before) for one in added)
    tried = [one for one in added if not is_in(one, before) or (canary is not None and one in canary.versions)]
    if not tried:
        return None
    if canary is not None and not is_new:
        return replace(canary, versions=tried)
    return Canary(tried, fallback, swap, outcomes_of(fallback.default), now)


def is_in(version: Version, route: Route | None) -> bool:
    """Return whether a route leads to a version."""
    return route is not None and any(model is version.loaded for model in route.versions.values())
