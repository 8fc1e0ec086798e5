"""The controller against what Kubernetes documents of it."""

import pytest
import yaml

from benchmarks.autoscaling import CHART
from benchmarks.simulation.controller import Behaviour, Controller, Direction, Metric, Policy, read_behaviour

ANY = Direction(0.0, (Policy(True, 1000, 15),))


def controller(up: Direction = ANY, down: Direction = ANY, num_pods: int = 4, most: int = 100) -> Controller:
    return Controller(Behaviour(1, most, up, down), num_pods)


@pytest.mark.parametrize(
    ("values", "num_missing", "num_pods", "wanted"),
    [
        ([2.0, 2.0], 0, 2, 4),
        ([1.09, 1.09], 0, 2, 2),
        ([1.2, 1.2], 0, 2, 3),
        ([0.95, 0.95], 0, 2, 2),
        ([0.2, 0.2, 0.2, 0.2], 0, 4, 1),
        ([0.0, 0.0], 0, 2, 0),
        # Missing pods count as idle where more are wanted: 3.0 over three pods is on target.
        ([1.5, 1.5], 1, 3, 3),
        ([4.0, 4.0], 1, 3, 8),
        # They count as being on target where fewer are.
        ([0.2, 0.2], 2, 4, 3),
        ([], 3, 3, None),
    ],
)
def test_a_metric_wants_as_many_pods_as_bring_its_average_to_the_target(
    values: list[float], num_missing: int, num_pods: int, wanted: int | None
) -> None:
    assert Metric(1.0, values, num_missing).wanted(num_pods) == wanted


def test_missing_pods_never_turn_growth_into_shrinking() -> None:
    assert Metric(1.0, [1.2], 3).wanted(4) == 4


def test_the_metric_that_wants_most_wins() -> None:
    assert controller().sync(0, [Metric(1.0, [1.5] * 4, 0), Metric(1.0, [3.0] * 4, 0)]) == 12


def test_without_any_value_nothing_changes() -> None:
    assert controller().sync(0, [Metric(1.0, [], 4)]) == 4


def test_the_policy_that_allows_most_limits_growth() -> None:
    up = Direction(0.0, (Policy(True, 100, 15), Policy(False, 5, 15)))
    small, large = controller(up), controller(up, num_pods=20)
    assert small.sync(0, [Metric(1.0, [9.0] * 4, 0)]) == 9
    assert large.sync(0, [Metric(1.0, [9.0] * 20, 0)]) == 40


def test_growth_is_counted_from_the_beginning_of_the_period() -> None:
    subject = controller(Direction(0.0, (Policy(False, 4, 60),)))
    numbers = [subject.sync(at, [Metric(1.0, [9.0] * 4, 0)]) for at in (0, 15, 59, 61)]
    assert numbers == [8, 8, 8, 12]


def test_shrinking_waits_for_the_window_and_keeps_to_its_policy() -> None:
    subject = controller(down=Direction(60.0, (Policy(True, 25, 60),)), num_pods=8)
    assert subject.sync(0, [Metric(1.0, [1.0] * 8, 0)]) == 8
    idle = [Metric(1.0, [0.0] * 8, 0)]
    assert [subject.sync(at, idle) for at in (15, 45, 60, 75, 120, 135)] == [8, 8, 6, 6, 4, 4]


def test_the_number_of_pods_stays_within_its_limits() -> None:
    subject = controller(most=6)
    assert subject.sync(0, [Metric(1.0, [9.0] * 4, 0)]) == 6
    assert subject.sync(15, [Metric(1.0, [0.0] * 6, 0)]) == 1


def test_the_charts_behaviour_can_be_read() -> None:
    behaviour = read_behaviour(yaml.safe_load(CHART.read_text(encoding="utf-8"))["autoscaling"])
    assert (behaviour.least, behaviour.most) == (2, 10)
    assert behaviour.up.policies == (Policy(True, 100, 15), Policy(False, 4, 15))
    assert behaviour.down.window_seconds == 300
