"""How fast engines step, from one snapshot to the next."""

from dragoman.server.core.pace_of_steps import LONGEST_SECONDS, Pace, PaceOfSteps
from dragoman.server.engine.snapshot import EngineSnapshot, StepTotals


def engine(at: float, num_steps: int, replica: int = 0) -> EngineSnapshot:
    return EngineSnapshot(at, [], StepTotals(num_steps, 4 * num_steps, num_steps / 100), replica)


def test_engines_are_added_up_each_by_its_own_time() -> None:
    paces = PaceOfSteps()
    assert paces.update([engine(1.0, 100), engine(1.1, 0, 1)]) == Pace()
    pace = paces.update([engine(1.5, 150), engine(2.1, 20, 1)])
    assert (pace.num_steps, pace.num_rows, pace.rows_per_step) == (70, 280, 4.0)
    assert (pace.steps_per_second, pace.rows_per_second) == (120.0, 480.0)
    assert pace.step_seconds is not None and abs(pace.step_seconds - 0.01) < 1e-9


def test_an_engine_that_was_started_again_counts_anew() -> None:
    paces = PaceOfSteps()
    paces.update([engine(1.0, 100)])
    assert paces.update([engine(1.25, 3)]) == Pace()
    assert paces.update([engine(1.5, 5)]).num_steps == 2


def test_without_an_answer_the_pace_is_what_it_was_and_without_steps_there_are_no_means() -> None:
    paces = PaceOfSteps()
    paces.update([engine(1.0, 100)])
    before = paces.update([engine(1.5, 150)])
    assert paces.update([engine(1.5, 150)]) == before
    idle = paces.update([engine(1.75, 150)])
    assert (idle.rows_per_step, idle.step_seconds, idle.steps_per_second) == (None, None, 0.0)


def test_what_may_have_been_counted_in_part_is_not_told() -> None:
    paces = PaceOfSteps()
    paces.update([engine(1.0, 100)])
    assert paces.update([engine(1.1 + LONGEST_SECONDS, 150)]) == Pace()
    assert paces.update([]) == Pace() == paces.update([engine(9.0, 200)])
