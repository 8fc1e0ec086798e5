"""What a version on probation is watched for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.repository.found import FoundVersion
from dragoman.server.repository.model_file import Swap
from dragoman.server.repository.trial import JUDGED_SECONDS, MIN_REQUESTS, SETTLING_SECONDS, Trial
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, State, Version

USUAL = Outcomes(1000, 0, 100.0)


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def version(name: str) -> Version[Any]:
    loaded: Any = SimpleNamespace(label=name, engine=SimpleNamespace(is_ready=True))
    return Version("en-de", FoundVersion(name, Path(name), (1, 1, 1)), State.TRIAL, loaded=loaded)


def trial_of(clock: Clock, *versions: Version[Any], usual: Outcomes = USUAL, **swap: Any) -> Trial[Any]:
    fallback: Any = None
    return Trial(versions, fallback, Swap(**swap), usual, clock)


def cause(trial: Trial[Any], **outcomes: Outcomes) -> Cause | None:
    failed = trial.failed(lambda model: outcomes.get(model.label, Outcomes()))
    return None if failed is None else failed[1].cause


def test_it_lasts_as_long_as_it_is_set_to(clock: Clock) -> None:
    trial = trial_of(clock, version("2"), probation_seconds=10)
    clock.seconds += 9.9
    assert not trial.is_over
    clock.seconds += 0.1
    assert trial.is_over


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (Outcomes(), None),
        (Outcomes(0, MIN_REQUESTS - 1), None),
        (Outcomes(0, MIN_REQUESTS), Cause.ERRORS),
        (Outcomes(95, 5, 9.5), None),
        (Outcomes(94, 6, 9.5), Cause.ERRORS),
        (Outcomes(100, 0, 30.0), None),
        (Outcomes(100, 0, 30.1), Cause.LATENCY),
        (Outcomes(MIN_REQUESTS - 1, 1, 1000.0), None),
    ],
)
def test_bounds(clock: Clock, outcomes: Outcomes, expected: Cause | None) -> None:
    """Of 5 % errors, and three times 100 ms; of few requests nothing is said."""
    trial = trial_of(clock, version("2"))
    clock.seconds += SETTLING_SECONDS + JUDGED_SECONDS
    assert cause(trial, **{"2": outcomes}) is expected


@pytest.mark.parametrize(("probation_seconds", "settling_seconds", "judged_seconds"), [(2.0, 0.5, 1.5), (60.0, 10.0, 5.0)])
def test_nobody_is_too_slow_while_the_load_has_just_taken_the_cores(
    clock: Clock, probation_seconds: float, settling_seconds: float, judged_seconds: float
) -> None:
    """And a moment says nothing: what counts is a mean over seconds, or over what a short probation has of them."""
    trial = trial_of(clock, version("2"), probation_seconds=probation_seconds)
    clock.seconds += settling_seconds - 0.0625
    early = Outcomes(100, 0, 1000.0)
    assert cause(trial, **{"2": early}) is None
    clock.seconds += judged_seconds - 0.0625
    assert cause(trial, **{"2": early.plus(Outcomes(100, 0, 1000.0))}) is None
    clock.seconds += 0.125
    assert cause(trial, **{"2": early.plus(Outcomes(200, 0, 60.0))}) is None
    assert cause(trial, **{"2": early.plus(Outcomes(200, 0, 60.25))}) is Cause.LATENCY
    assert cause(trial_of(clock, version("2")), **{"2": Outcomes(0, MIN_REQUESTS)}) is Cause.ERRORS, "errors are errors"


def test_without_much_to_compare_with_nothing_is_too_slow(clock: Clock) -> None:
    trial = trial_of(clock, version("2"), usual=Outcomes(MIN_REQUESTS - 1, 0, 0.01))
    clock.seconds += SETTLING_SECONDS + JUDGED_SECONDS
    assert cause(trial, **{"2": Outcomes(100, 0, 1000.0)}) is None


def test_a_dead_engine_is_told_with_its_time(clock: Clock) -> None:
    one = version("2")
    trial = trial_of(clock, version("1"), one)
    clock.seconds += 1.25
    one.note_death()
    failed = trial.failed(lambda _: Outcomes())
    assert failed is not None and failed[0] is one
    assert (failed[1].cause, failed[1].reason) == (Cause.DEATH, "its engine ended within 1.2 s of beginning to serve")


def test_it_is_told_which_of_several_has_failed(clock: Clock) -> None:
    versions = [version("2"), version("3")]
    outcomes = {"2": Outcomes(100, 0, 1.0), "3": Outcomes(50, 50, 1.0)}
    failed = trial_of(clock, *versions).failed(lambda model: outcomes[model.label])
    assert failed is not None and failed[0] is versions[1]


def test_an_engine_that_is_down_is_dead_whatever_became_of_its_requests(clock: Clock) -> None:
    one = version("2")
    one.loaded.engine.is_ready = False  # type: ignore[union-attr]
    assert cause(trial_of(clock, one), **{"2": Outcomes(0, 100)}) is Cause.DEATH
