"""Step rates of engines, from one snapshot to the next."""

from typing import Any

import pytest

from dragoman.server.engine.messages import EngineSnapshot, StepTotals
from dragoman.server.service.live_statistics import LONGEST_SECONDS, Pace, PaceOfSteps


def engine(at: float, num_steps: int, replica: int = 0) -> EngineSnapshot:
    return EngineSnapshot(at, [], StepTotals(num_steps, 4 * num_steps, num_steps / 100), replica)


def test_engines_are_added_up_each_by_its_own_time() -> None:
    paces = PaceOfSteps()
    assert paces.update([engine(1.0, 100), engine(1.1, 0, 1)]) == Pace()
    pace = paces.update([engine(1.5, 150), engine(2.1, 20, 1)])
    assert (pace.num_steps, pace.num_rows, pace.rows_per_step) == (70, 280, 4.0)
    assert (pace.steps_per_second, pace.rows_per_second) == (120.0, 480.0)
    assert pace.step_seconds is not None and abs(pace.step_seconds - 0.01) < 1e-9


@pytest.mark.parametrize(
    ("second", "third", "num_steps"),
    [
        (engine(1.25, 3), engine(1.5, 5), (0, 2)),  # it was started again
        (engine(1.5, 150), engine(1.5, 150), (50, 50)),  # without an answer the pace is what it was
        (engine(1.1 + LONGEST_SECONDS, 150), engine(9.0, 200), (0, 0)),  # steps may have been counted in part
    ],
)
def test_only_what_was_counted_whole_makes_the_pace(second: EngineSnapshot, third: EngineSnapshot, num_steps: Any) -> None:
    paces = PaceOfSteps()
    assert paces.update([engine(1.0, 100)]) == Pace()
    assert tuple(paces.update([each]).num_steps for each in (second, third)) == num_steps
    idle = paces.update([engine(third.at + 1, third.totals.num_steps)])
    assert (idle.rows_per_step, idle.step_seconds, idle.steps_per_second) == (None, None, 0.0)
    assert paces.update([]) == Pace()
