"""Reconciliation of one model: the next actions by the states of its versions, canary checks, and idle unloading."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.models.discovery import FoundModel, FoundVersion
from dragoman.server.models.model_file import ModelFile, Swap, Versions
from dragoman.server.models.policy import Overrides
from dragoman.server.models.reconcile import (
    JUDGED_SECONDS,
    MAX_RETRY_SECONDS,
    MIN_REQUESTS,
    MIN_RETRY_SECONDS,
    SETTLING_SECONDS,
    Canary,
    Idle,
    Load,
    Loaded,
    Observed,
    Publish,
    Refuse,
    RollBack,
    Sleep,
    UnloadCause,
    is_in,
    next_canary,
    reconcile,
)
from dragoman.server.models.registry import Route
from dragoman.server.models.use import Holding, Outcomes
from dragoman.server.models.version import NOWHERE, Cause, Opened, Refused, State, Version

NOW = 1000.0
FILES = {
    "": ModelFile(),
    "two": ModelFile(versions=Versions(latest=2)),
    "restart": ModelFile(swap=Swap(mode="restart")),
    "old": ModelFile(labels={"old": "1"}),
}


def folder(name: str) -> FoundVersion:
    return FoundVersion(name, Path(name), (1, 1, 1))


def model(label: str, *, is_asleep: bool = False, is_ready: bool = True) -> Any:
    return SimpleNamespace(label=label, name="en-de", version=label, is_asleep=is_asleep, engine=SimpleNamespace(is_ready=is_ready))


class Situation:
    """Versions as a text has them: name, state, and marks for `*` in the route, `^` the fallback, `!` died, `~` draining."""

    def __init__(self, versions: str, flags: str = "") -> None:
        self.flags = set(flags.split())
        self.loaded = Loaded("en-de", Idle(60.0 if "sleepy" in self.flags else math.inf, NOW))
        self.loaded.idle.is_asleep = "asleep" in self.flags
        marks: dict[str, list[Version]] = {"*": [], "^": []}
        for word in versions.split():
            text = word.rstrip("*^!~")
            name, _, state = text.partition(":")
            version = Version("en-de", NOWHERE if name == "-" else folder(name), State(state or "standby"))
            if version.state is State.REFUSED:
                version.refuse(Refused(Cause.PROOF, "another answer"))
            elif version.state is State.ASLEEP:
                version.sleeping = model(name, is_asleep=True)
            elif version.state is not State.OPENING:
                version.loaded = model(name, is_ready=name != "-")
            version.has_died, version.is_draining = "!" in word, "~" in word
            for mark, marked in marks.items():
                marked += [version] if mark in word else []
            self.loaded.versions.append(version)
        if marks["*"]:
            answering = {one.label: one.answering for one in marks["*"]}
            default, stand_in = marks["*"][0].answering, marks["*"][0].is_stand_in
            labels = {"old": "1"} if "old" in self.flags and "1" in answering else {}
            shares = {} if stand_in else {default.label: 1.0}  # type: ignore[union-attr]
            self.loaded.route = Route(default, answering, shares, labels, is_stand_in=stand_in)  # type: ignore[arg-type]
        if marks["^"]:
            [fallback] = marks["^"]
            tried = [one for one in marks["*"] if one.state is State.TRIAL]
            self.loaded.canary = Canary(tried, Route.to(fallback.loaded), Swap(), Outcomes(), NOW)  # type: ignore[arg-type]

    def actions(self, found: str, overrides: Overrides = Overrides()) -> str:  # noqa: B008
        file = next((FILES[name] for name in FILES if name in self.flags), FILES[""])
        there = FoundModel("en-de", Path(), tuple(map(folder, found.split())), file)
        seen = Observed(
            NOW + (61 if "later" in self.flags else 0),
            Holding(int("held" in self.flags), NOW, NOW),
            is_awaited="awaited" in self.flags,
            is_loading="loading" in self.flags,
            is_published="unpublished" not in self.flags,
        )
        return ", ".join(map(shown, reconcile(there, overrides, self.loaded, seen)))


def shown(action: Any) -> str:
    words = [type(action).__name__.lower()]
    match action:
        case Load(found, mode):
            words += [found.name, mode]
        case Publish(route):
            words += ["nothing"] if route is None else sorted(route.versions)
        case RollBack(version, refused) | Refuse(version, refused):
            words += [version.label, refused.cause.value]
        case Sleep(why):
            words += [why.value]
        case _:
            words += [action.version.label or "-"] if hasattr(action, "version") else []
    return " ".join(words)


# Folders; versions; flags; the next actions.
TRANSITIONS = [
    # Load, publish, drain.
    ("1", "", "", "load 1 beside"),
    ("1 2", "", "", "load 2 beside"),
    ("1 2", "1:serving*", "", "load 2 beside"),
    ("1 2", "1:serving*", "restart", "load 2 instead"),
    ("1", "", "restart", "load 1 beside"),
    ("1 2", "1:serving* 2:starting", "loading", ""),
    ("1 2", "1:serving* 2:standby", "", "publish 2"),
    ("1 2", "1:standby 2:serving*", "", "drain 1"),
    ("1 2", "1:retiring~ 2:serving*", "", ""),
    ("1 2", "2:serving*", "", ""),
    ("1 2 3", "2:serving* 3:standby", "two", "publish 2 3"),
    ("1 2", "2:serving*", "old", "load 1 beside"),
    ("1", "2:serving*", "", "load 1 beside"),
    ("1", "1:serving* 2:standby", "", "drain 2"),
    ("", "1:serving*", "", "publish nothing"),
    ("", "1:standby", "", "drain 1"),
    ("1", "1:serving*", "unpublished", "publish 1"),
    # Refusals: the next version is tried; what serves goes on where nothing else can.
    ("1 2", "2:refused", "", "load 1 beside"),
    ("1 2", "1:serving* 2:refused", "", ""),
    ("1", "1:refused", "", ""),
    ("2", "1:serving* 2:refused", "", ""),
    ("1", "1:serving* 2:refused", "", "forget 2"),
    ("1 2", "1:serving* 2:standby!", "", "refuse 2 death"),
    ("1 2", "1:serving* 2:standby!", "loading", "refuse 2 death"),
    # Canary checks: both are kept; a death rolls back, also while another version is loaded; the end promotes.
    ("1 2", "1:standby^ 2:trial*", "", ""),
    ("1 2", "1:standby^ 2:trial*!", "", "rollback 2 death"),
    ("1 2 3", "1:standby^ 2:trial*! 3:starting", "loading", "rollback 2 death"),
    ("1 2", "1:standby^ 2:trial*", "later", "promote"),
    ("1 2 3", "1:standby^ 2:trial*", "", "load 3 beside"),
    ("1 2 3", "1:standby^ 2:trial* 3:standby", "", "publish 3"),
    ("1 2 3", "1:standby^ 2:standby 3:trial*", "", "drain 2"),
    ("1 2", "1:standby!^ 2:trial*", "", ""),
    ("1", "1:standby^ 2:trial*", "", "publish 1"),
    # Stand-ins end as versions do.
    ("1", "1:standby -:standby*", "", "publish 1"),
    ("1", "1:serving* -:standby", "", "drain -"),
    ("1", "1:refused -:standby*", "", ""),
    # Idle unloading.
    ("1", "", "sleepy asleep", "load 1 describe"),
    ("1 2", "", "sleepy asleep awaited", "wake"),
    ("1", "1:asleep", "sleepy asleep", "publish 1"),
    ("1", "1:asleep*", "sleepy asleep", ""),
    ("1", "1:asleep*", "sleepy asleep awaited", "wake"),
    ("1", "1:asleep*", "sleepy", "load 1 wake"),
    ("1", "1:asleep*", "asleep", "wake"),
    ("1 2", "1:asleep*", "sleepy asleep", "load 2 describe"),
    ("1 2", "1:asleep* 2:asleep", "sleepy asleep", "publish 2"),
    ("1 2", "1:asleep 2:asleep*", "sleepy asleep", "forget 1"),
    ("1 2", "1:asleep* 2:standby", "sleepy asleep", "sleep idle"),
    ("1", "1:serving*", "sleepy", ""),
    ("1", "1:serving*", "sleepy later", "sleep idle"),
    ("1", "1:serving*", "sleepy later held", ""),
    ("1", "1:serving*", "sleepy later loading", ""),
    ("1", "1:retiring* 1:asleep", "sleepy asleep", "publish 1"),
    ("1", "1:retiring 1:asleep*", "sleepy asleep", "drain 1"),
    ("1 2", "1:serving*", "sleepy", "load 2 beside"),
    ("1", "1:refused -:standby*", "sleepy asleep", ""),
]


@pytest.mark.parametrize(("found", "versions", "flags", "actions"), TRANSITIONS)
def test_next_actions(found: str, versions: str, flags: str, actions: str) -> None:
    assert Situation(versions, flags).actions(found) == actions


def test_next_actions_by_the_wishes_of_operators() -> None:
    both = "1:standby 2:serving*"
    assert Situation(both).actions("1 2", Overrides(pinned="1")) == "publish 1"
    assert Situation(both).actions("1 2", Overrides(loaded=frozenset("1"))) == "publish 1 2"
    assert Situation("2:serving*").actions("1 2", Overrides(unloaded=frozenset("2"))) == "load 1 beside"
    assert Situation(both).actions("1 2", Overrides(is_unloaded=True)) == "publish nothing"
    refused_asleep = Situation("1:refused", "sleepy")
    refused_asleep.loaded.route = Route.to(model("1", is_asleep=True))
    assert refused_asleep.actions("1") == "giveup"


@pytest.mark.parametrize(
    ("versions", "to", "is_ready", "probation_seconds", "tried"),
    [
        ("1:serving* 2:standby", "2", True, 60, "2"),
        ("1:serving* 2:standby", "2", False, 60, ""),
        ("1:serving* 2:standby", "2", True, 0, ""),
        ("1:serving* 2:standby 3:standby", "2 3", True, 60, "2 3"),
        ("2:standby", "2", True, 60, ""),
        ("1:standby^ 2:trial* 3:standby", "3", True, 60, "3"),
        ("1:standby^ 2:trial* 3:standby", "2 3", True, 60, "2 3"),
        ("1:standby^ 2:trial*", "1", True, 60, ""),
        ("1:standby^ 2:trial* 3:trial*", "3", True, 60, "3"),
        ("1:serving*", "", True, 60, ""),
        ("1:asleep* 1:standby", "1", True, 60, ""),
    ],
)
def test_versions_of_the_next_canary_check(versions: str, to: str, is_ready: bool, probation_seconds: float, tried: str) -> None:
    situation, names = Situation(versions), to.split()
    up = {one.label: one.loaded for one in situation.loaded.versions if one.label in names and one.loaded is not None}
    route: Any = Route(up[names[0]], up) if names else None
    for one in situation.loaded.versions[:1]:
        if one.answering is not None:
            one.answering.engine.is_ready = is_ready
    loaded = situation.loaded
    check = next_canary(loaded, loaded.route, route, Swap(probation_seconds=probation_seconds), lambda _: Outcomes(7), NOW + 1)
    assert ([] if check is None else [one.label for one in check.versions]) == tried.split()
    if check is not None:
        has_new = any(one.state is State.STANDBY and one.label in names for one in situation.loaded.versions)
        assert check.began == NOW + has_new, "a check goes on where no version is new"


# Versions.


def test_version_is_called_as_its_folder_or_as_its_content() -> None:
    named, flat = Version("en-de", folder("7")), Version("en-de", folder(""))
    assert (named.label, named.content, flat.label) == ("7", "", "")
    bundle, nothing = SimpleNamespace(manifest=SimpleNamespace(version="abc")), None
    for version in (named, flat):
        version.open(Opened(bundle, nothing, nothing))  # type: ignore[arg-type]
    assert (named.label, named.content, flat.label) == ("7", "abc", "abc")
    flat.let_go()
    assert (flat.label, flat.content, flat.opened) == ("abc", "abc", None)


@pytest.mark.parametrize("state", State)
def test_only_a_version_that_is_being_tried_is_blamed_for_a_death(state: State) -> None:
    version = Version("en-de", folder("1"), state)
    version.note_death()
    assert version.has_died is (state in (State.PROVING, State.STANDBY, State.TRIAL))


def test_replicas_get_the_lowest_free_consecutive_numbers() -> None:
    versions = Loaded("en-de", Idle(60.0, 0.0))
    one, two, three = (versions.add(folder(name)) for name in "123")
    for version, num_replicas, expected in ((one, 2, range(0, 2)), (two, 1, range(2, 3)), (three, 2, range(3, 5))):
        version.replicas = versions.free_replicas(num_replicas)
        version.loaded = model(version.label)
        assert version.replicas == expected
    one.loaded = None
    assert [versions.free_replicas(number) for number in (0, 2, 3)] == [range(0), range(0, 2), range(5, 8)]
    route = Route(two.loaded, {"2": two.loaded})  # type: ignore[arg-type, dict-item]
    assert is_in(two, route) and not is_in(three, route) and not is_in(two, None)


# Canary checks.

USUAL = Outcomes(1000, 0, 100.0)


class Probation:
    """A canary check by a clock of the test."""

    def __init__(self, *names: str, usual: Outcomes = USUAL, **swap: Any) -> None:
        self.now = NOW
        self.versions = [Version("en-de", folder(name), State.TRIAL, loaded=model(name)) for name in names]
        self.canary = Canary(self.versions, Route.to(model("0")), Swap(**swap), usual, NOW)

    def failed(self, **outcomes: Outcomes) -> tuple[str, Cause, str] | None:
        self.canary.observe(lambda loaded: outcomes.get("v" + loaded.label, Outcomes()), self.now)
        failed = self.canary.failed(self.now)
        return failed and (failed[0].label, failed[1].cause, failed[1].reason)

    def cause(self, outcomes: Outcomes) -> Cause | None:
        failed = self.failed(v2=outcomes)
        return failed and failed[1]


@pytest.mark.parametrize(
    ("outcomes", "usual", "expected"),
    [
        (Outcomes(), USUAL, None),
        (Outcomes(0, MIN_REQUESTS - 1), USUAL, None),
        (Outcomes(0, MIN_REQUESTS), USUAL, Cause.ERRORS),
        (Outcomes(95, 5, 9.5), USUAL, None),
        (Outcomes(94, 6, 9.5), USUAL, Cause.ERRORS),
        (Outcomes(100, 0, 30.0), USUAL, None),
        (Outcomes(100, 0, 30.1), USUAL, Cause.LATENCY),
        (Outcomes(MIN_REQUESTS - 1, 1, 1000.0), USUAL, None),
        (Outcomes(100, 0, 1000.0), Outcomes(MIN_REQUESTS - 1, 0, 0.01), None),
        (Outcomes(MIN_REQUESTS, 0, 1000.0), Outcomes(MIN_REQUESTS, 0, 0.01), Cause.LATENCY),
    ],
)
def test_canary_limits(outcomes: Outcomes, usual: Outcomes, expected: Cause | None) -> None:
    """5 % errors, three times the 100 ms of the version before, and enough requests of both."""
    probation = Probation("2", usual=usual)
    probation.now += SETTLING_SECONDS + JUDGED_SECONDS
    assert probation.cause(outcomes) is expected
    probation.canary.fallback.default.version = "2"  # type: ignore[misc]
    assert probation.cause(outcomes) is (expected if expected is Cause.ERRORS else None), "the same files are as fast"


@pytest.mark.parametrize(("probation_seconds", "settling_seconds", "judged_seconds"), [(2.0, 0.5, 1.5), (60.0, 10.0, 5.0)])
def test_latency_is_a_mean_over_seconds_after_the_version_has_settled(
    probation_seconds: float, settling_seconds: float, judged_seconds: float
) -> None:
    probation, early = Probation("2", probation_seconds=probation_seconds), Outcomes(100, 0, 1000.0)
    probation.now += settling_seconds - 0.0625
    assert probation.cause(early) is None
    probation.now += judged_seconds - 0.0625
    assert probation.cause(early.plus(Outcomes(100, 0, 1000.0))) is None
    probation.now += 0.125
    assert probation.cause(early.plus(Outcomes(200, 0, 60.0))) is None
    assert probation.cause(early.plus(Outcomes(200, 0, 60.25))) is Cause.LATENCY
    assert Probation("2").cause(Outcomes(0, MIN_REQUESTS)) is Cause.ERRORS, "errors count from the beginning"


def test_canary_failure_has_a_reason_and_the_probation_its_length() -> None:
    probation = Probation("1", "2", probation_seconds=10)
    assert probation.failed(v1=Outcomes(100, 0, 1.0), v2=Outcomes(50, 50, 1.0)) == (
        *("2", Cause.ERRORS),
        "50 of 100 requests failed, 50.0%; max_error_rate is 0.05",
    )
    probation.now += 1.25
    probation.versions[1].note_death()
    died = ("2", Cause.DEATH, "its engine ended within 1.2 s of beginning to serve")
    assert probation.failed(v2=Outcomes(0, 100)) == died
    probation.versions[1].has_died, probation.versions[1].loaded.engine.is_ready = False, False  # type: ignore[union-attr]
    assert probation.failed(v2=Outcomes(0, 100)) == died
    assert [probation.canary.is_over(NOW + seconds) for seconds in (9.5, 10.0)] == [False, True]


# Idle unloading.


def seen(now: float, num_held: int = 0, last_used: float = 0.0, *, is_awaited: bool = False) -> Observed:
    return Observed(now, Holding(num_held, last_used, last_used), is_awaited)


# Seconds since it was loaded; requests, and seconds since the last; whether it is awaited, on probation, to be evicted.
@pytest.mark.parametrize(
    ("seconds", "num_held", "used_ago", "is_awaited", "has_canary", "is_evicted", "why"),
    [
        (59.0, 0, 1e3, False, False, False, None),
        (60.0, 0, 1e3, False, False, False, UnloadCause.IDLE),
        (90.0, 0, 59.5, False, False, False, None),
        (90.0, 0, 60.0, False, False, False, UnloadCause.IDLE),
        (90.0, 1, 1e3, False, False, False, None),
        (90.0, 0, 1e3, True, False, False, None),
        (90.0, 0, 1e3, False, True, False, None),
        (0.0, 3, 1e3, False, False, True, UnloadCause.MEMORY),
        (0.0, 3, 1e3, True, False, True, None),
        (0.0, 0, 1e3, False, True, True, None),
    ],
)
def test_model_is_unloaded_when_it_is_idle_or_evicted(
    seconds: float, num_held: int, used_ago: float, is_awaited: bool, has_canary: bool, is_evicted: bool, why: UnloadCause | None
) -> None:
    idle = Idle(60.0, NOW)
    assert idle.is_asleep and idle.pause(seen(NOW)) is None, "it is not loaded at the start"
    assert idle.is_wake_due(seen(NOW, is_awaited=True))
    idle.is_asleep = False
    idle.note_awake(NOW + 5)
    now = NOW + 5 + seconds
    idle.is_evicted, observed = is_evicted, seen(now, num_held, now - used_ago, is_awaited=is_awaited)
    assert idle.unload_cause(observed, has_canary=has_canary) is why
    if why is None and not is_awaited:
        assert idle.pause(observed) == pytest.approx(60.0 if num_held else max(0.001, 60.0 - min(seconds, used_ago)))


def test_failed_load_is_retried_with_a_growing_pause() -> None:
    idle, now, pauses = Idle(60.0, NOW), NOW, []
    for _ in range(8):
        assert idle.is_wake_due(seen(now, is_awaited=True))
        idle.note_failure("no memory", now)
        pauses.append(idle.retry_seconds(now))
        assert not idle.is_wake_due(seen(now, is_awaited=True)) and idle.pause(seen(now)) == pauses[-1]
        now += pauses[-1]
    assert pauses == [min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2**number) for number in range(8)]
    idle.note_awake(now)
    idle.note_failure("again", now)
    assert idle.retry_seconds(now) == MIN_RETRY_SECONDS, "it was loaded in between"


def test_model_that_is_always_to_be_loaded_is_retried_by_itself_and_never_unloaded() -> None:
    idle = Idle(math.inf, NOW)
    idle.is_evicted = True
    later = seen(NOW + 1e9)
    assert not idle.is_asleep and idle.unload_cause(later, has_canary=False) is None and idle.pause(later) is None
    idle = Idle(60.0, NOW)
    idle.keep_seconds = math.inf
    assert idle.is_wake_due(seen(NOW))
    idle.note_failure("no memory", NOW)
    assert not idle.is_wake_due(seen(NOW)) and idle.pause(seen(NOW)) == MIN_RETRY_SECONDS
    assert idle.is_wake_due(seen(NOW + MIN_RETRY_SECONDS))
