"""Reconciliation of one model: a pure function from the found, wanted and loaded state to the next actions.

`ModelReconciler` executes the actions in order and reconciles again until there are none.
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

# Canary check: fewer requests are too few for a rate or a mean.
MIN_REQUESTS = 20
# Minimum time over which latencies are measured before a version counts as too slow, unless the probation ends before.
JUDGED_SECONDS = 5.0
# Fraction of a probation, and its bound, without latency checks: loading took the cores, and queues have grown.
SETTLING, SETTLING_SECONDS = 0.25, 10.0
# Pause after a failed load; doubles with each further failure up to the bound.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class UnloadCause(StrEnum):
    """Reason why a model was unloaded."""

    IDLE = "idle"
    MEMORY = "memory"


@dataclass(slots=True)
class Idle:
    """Idle unloading of one model."""

    keep_seconds: float  # idle time after which the model is unloaded; infinite for never
    awake_since: float  # time of the last load, by the monotonic clock
    is_asleep: bool = field(init=False)  # whether no version of the model is to be loaded
    why: UnloadCause = UnloadCause.IDLE  # reason of the last unloading
    is_evicted: bool = False  # whether the model is to be unloaded to free memory
    problem: str = ""  # reason why the last load failed; empty if it did not
    retry_at: float = -math.inf  # earliest time of the next attempt
    num_failures: int = 0  # consecutive failed attempts

    def __post_init__(self) -> None:
        self.is_asleep = self.may_sleep

    @property
    def may_sleep(self) -> bool:
        """Whether the model is ever unloaded."""
        return self.keep_seconds < math.inf

    def retry_seconds(self, now: float) -> float:
        """Return the time until the next attempt to load; 0 for now."""
        return max(0.0, self.retry_at - now)

    def is_wake_due(self, seen: "Observed") -> bool:
        """Return whether an unloaded model is to be loaded now."""
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
        """Record that the model has been loaded."""
        self.awake_since, self.problem, self.num_failures = now, "", 0

    def note_failure(self, problem: str, now: float) -> None:
        """Record a failed load and schedule the next attempt."""
        self.is_asleep, self.problem = True, problem
        self.retry_at = now + min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(self.num_failures, 10))
        self.num_failures += 1

    def _idle_seconds(self, seen: "Observed") -> float:
        return seen.now - max(seen.holding.last_used, self.awake_since)


@dataclass(slots=True, eq=False)
class Canary:
    """Canary check of new versions; the versions before are kept for a rollback."""

    versions: Sequence[Version]
    fallback: Route  # route before them, which a failure restores
    swap: Swap
    usual: Outcomes  # of the previous default version
    began: float  # start of the probation, by the monotonic clock
    outcomes: dict[Version, Outcomes] = field(default_factory=dict)  # last observed outcomes of the versions
    settling: dict[Version, Outcomes] = field(default_factory=dict)  # last outcomes observed while the versions settled

    @property
    def settling_seconds(self) -> float:
        """Time in which latencies are not checked."""
        return min(self.swap.probation_seconds * SETTLING, SETTLING_SECONDS)

    def observe(self, outcomes_of: Callable[[LoadedModel], Outcomes], now: float) -> None:
        """Record the outcomes of the versions' requests."""
        self.outcomes = {one: outcomes_of(one.loaded) for one in self.versions if one.loaded is not None}
        if now - self.began < self.settling_seconds:
            self.settling = self.outcomes

    def is_over(self, now: float) -> bool:
        """Return whether the probation has ended."""
        return now - self.began >= self.swap.probation_seconds

    def failed(self, now: float) -> tuple[Version, Refused] | None:
        """Return the first failed version with the reason; None if none has failed."""
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
        if loaded.version == self.fallback.default.version:  # the same files are equally fast; the machine is busier
            return None
        if seconds < self.settling_seconds + JUDGED_SECONDS and not self.is_over(now):
            return None
        found, usual = found.since(self.settling.get(version, Outcomes())), self.usual
        if min(found.num_answered, usual.num_answered) < MIN_REQUESTS:
            return None
        mean, usual_mean = found.seconds / found.num_answered, usual.seconds / usual.num_answered
        if mean <= usual_mean * self.swap.max_latency_factor:
            return None
        means = f"its answers take {1000 * mean:.0f} ms in the mean, those of the version before {1000 * usual_mean:.0f} ms"
        return Refused(Cause.LATENCY, f"{means}; max_latency_factor is {self.swap.max_latency_factor:g}")


@dataclass(slots=True)
class Loaded:
    """The versions of one model, and the route of its requests."""

    model: str
    idle: Idle
    # All known versions, refused ones and stand-ins included, in order of arrival.
    versions: list[Version] = field(default_factory=list)
    route: Route | None = None  # present route; None while no version answers
    canary: Canary | None = None  # running canary check; None for none

    def add(self, found: FoundVersion) -> Version:
        """Add and return a new version."""
        self.versions.append(version := Version(self.model, found))
        return version

    def remove(self, version: Version) -> None:
        """Remove a version if it is known."""
        if version in self.versions:
            self.versions.remove(version)

    def known(self, found: FoundVersion) -> Version | None:
        """Return the version of a folder, unless it is ending; None if there is none."""
        return next((one for one in self.versions if one.found == found and one.state is not State.RETIRING), None)

    def with_files(self) -> list[Version]:
        """Return the versions that are not stand-ins; callable on any thread."""
        return [one for one in list(self.versions) if not one.is_stand_in]

    def is_held(self, version: Version) -> bool:
        """Return whether a version is in the route or in the canary check's fallback."""
        return is_in(version, self.route) or (self.canary is not None and is_in(version, self.canary.fallback))

    def retry_refused(self, names: Collection[str] | None, causes: frozenset[Cause] = frozenset(Cause)) -> None:
        """Forget refusals of these names (None for all) for these causes; a version that requests still hold ends first."""
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
    """Facts at the moment of a decision."""

    now: float  # time, by the monotonic clock
    holding: Holding  # combined use of all versions by requests
    is_awaited: bool = False  # whether requests wait for the model to be loaded
    is_loading: bool = False  # whether a version is being loaded
    is_published: bool = True  # False while frontends may still answer by an earlier route


# Beside the serving versions, instead of them, only as a sleeping stand-in, from sleep, or at server start.
LoadMode = Literal["beside", "instead", "describe", "wake", "first"]


class Load(NamedTuple):
    """Load a version."""

    found: FoundVersion
    mode: LoadMode


class Publish(NamedTuple):
    """Route later requests by this route."""

    route: Route | None


class GiveUp(NamedTuple):
    """Reject requests for now: the model is asleep, and no version of it can be loaded."""


class Refuse(NamedTuple):
    """Refuse a loaded version that does not serve."""

    version: Version
    refused: Refused


class RollBack(NamedTuple):
    """Refuse a version on probation, and restore the route before it."""

    version: Version
    refused: Refused


class Promote(NamedTuple):
    """End the probation: its versions have passed."""


class Sleep(NamedTuple):
    """Unload all versions; sleeping stand-ins replace them."""

    why: UnloadCause


class Wake(NamedTuple):
    """Allow the model to be loaded again."""


class Drain(NamedTuple):
    """End a version as soon as no request holds it."""

    version: Version


class Forget(NamedTuple):
    """Remove a version that has no engine."""

    version: Version


Action = Load | Publish | GiveUp | Refuse | RollBack | Promote | Sleep | Wake | Drain | Forget


def reconcile(found: FoundModel, overrides: Overrides, loaded: Loaded, seen: Observed) -> Sequence[Action]:
    """Return the next actions; none when the model is as wanted, or has to wait."""
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
    # All wanted versions are loaded; partial states are never published.
    target = target_of(found, overrides, loaded)
    route = route_to(target, found, loaded)
    if route is None and found.versions and not overrides.is_unloaded:  # serving versions stay where nothing can replace them
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
    """Return the versions to serve by the policy and the refusals, ignoring refusals of `retried` names."""
    refused = {}
    for one in found.versions:
        version = loaded.known(one)
        if version is not None and version.state is State.REFUSED and one.name not in retried:
            refused[one.name] = version.reason
    return wanted(found.versions, found.file, refused, overrides)


def missing(found: FoundModel, overrides: Overrides, loaded: Loaded) -> FoundVersion | None:
    """Return the first wanted version that is unknown or to be woken; None if there is none."""
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
    """Return the wanted route; None if its default cannot answer."""
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
    loaded: Loaded,
    before: Route | None,
    route: Route | None,
    swap: Swap,
    outcomes_of: Callable[[LoadedModel], Outcomes],
    now: float,
) -> Canary | None:
    """Return the canary check for a route's new versions; None for none, such as without new versions or a fallback."""
    canary = loaded.canary
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
    """Return whether a route contains a version."""
    return route is not None and any(model is version.loaded for model in route.versions.values())
