"""Canary checks: deaths, error rates and latencies during probation, by a clock of the test."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.model_file import Swap
from dragoman.server.models.rollout import JUDGED_SECONDS, MIN_REQUESTS, SETTLING_SECONDS, Trial
from dragoman.server.models.use import Outcomes
from dragoman.server.models.version import Cause, State, Version

USUAL = Outcomes(1000, 0, 100.0)


class Probation:
    """A trial of versions by a clock, and the outcomes of their requests."""

    def __init__(self, *names: str, usual: Outcomes = USUAL, **swap: Any) -> None:
        self.now = 100.0
        self.versions: list[Version[Any]] = []
        for name in names:
            loaded: Any = SimpleNamespace(label=name, version=name, engine=SimpleNamespace(is_ready=True))
            self.versions.append(Version("en-de", FoundVersion(name, Path(name), (1, 1, 1)), State.TRIAL, loaded=loaded))
        fallback: Any = SimpleNamespace(default=SimpleNamespace(version="1"))
        self.trial = Trial(self.versions, fallback, Swap(**swap), usual, lambda: self.now)

    def failed(self, **outcomes: Outcomes) -> tuple[str, Cause, str] | None:
        failed = self.trial.failed(lambda model: outcomes.get("v" + model.label, Outcomes()))
        return failed and (failed[0].label, failed[1].cause, failed[1].reason)

    def cause(self, outcomes: Outcomes) -> Cause | None:
        failed = self.failed(v2=outcomes)
        return failed and failed[1]


def test_probation_lasts_as_long_as_it_is_set_to() -> None:
    probation = Probation("2", probation_seconds=10)
    for seconds, is_over in ((9.5, False), (0.5, True)):
        probation.now += seconds
        assert probation.trial.is_over is is_over


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
def test_bounds(outcomes: Outcomes, usual: Outcomes, expected: Cause | None) -> None:
    """5 % errors, three times the 100 ms of the version before, and enough requests of both."""
    probation = Probation("2", usual=usual)
    probation.now += SETTLING_SECONDS + JUDGED_SECONDS
    assert probation.cause(outcomes) is expected
    probation.trial.fallback.default.version = "2"  # type: ignore[misc]
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


def test_failed_version_is_told_with_the_reason() -> None:
    probation = Probation("1", "2")
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
