"""The simulated replica against what can be worked out by hand."""

import math

import pytest

from benchmarks.simulation.costs import Costs, Job, fit_line
from benchmarks.simulation.replica import SimulatedReplica, capacity


def costs(**values: float | list[Job]) -> Costs:
    """Two requests at once, each with two rows; a step takes 1 s alone and 1.5 s with both, a prefill half a second."""
    given = Costs(
        num_rows=2,
        max_rows=4,
        num_requests=[1, 2],
        step_seconds=[1.0, 1.5],
        prefill_seconds=0.5,
        token_seconds=0.0,
        tokens_per_prefill=100,
        max_waiting=2,
        jobs=[Job(10, 4)],
    )
    return given.but(**values)  # type: ignore[arg-type]


def run(given: Costs, *offers: tuple[float, int], until: float = math.inf) -> tuple[dict[float, float], SimulatedReplica]:
    """Offer requests, each by its time and steps; return when those due at a time were answered."""
    ends: dict[float, float] = {}
    replica = SimulatedReplica(given, ends.__setitem__)
    for at, num_steps in offers:
        replica.offer(at, Job(10, num_steps))
    replica.advance(until)
    return ends, replica


def test_a_request_alone_takes_its_prefill_its_steps_and_the_front_end() -> None:
    ends, replica = run(costs(front_seconds=0.25), (3.0, 4))
    assert ends == {3.0: pytest.approx(3.0 + 0.5 + 4 * 1.0 + 0.25)}
    assert replica.busy_seconds == pytest.approx(4.5)


def test_who_comes_during_a_step_is_admitted_at_its_end_and_slows_the_others() -> None:
    ends, _ = run(costs(), (0.0, 4), (0.7, 2))
    # 0.5 prefill, a step to 1.5; then 0.5 for the second and two steps of 1.5 together; the first one's last step is alone.
    assert ends == {0.7: pytest.approx(5.0), 0.0: pytest.approx(6.0)}


def test_who_finds_no_slot_waits_for_the_first_to_end() -> None:
    ends, _ = run(costs(), (0.0, 1), (0.01, 3), (0.02, 1))
    assert ends[0.0] == pytest.approx(1.5)
    assert ends[0.02] == pytest.approx(1.5 + 0.5 + 1.5), "admitted together with the second, when the first had ended"


def test_a_full_queue_refuses() -> None:
    ends, replica = run(costs(), (0.0, 50), *((0.1 + i / 100, 50) for i in range(6)), until=3.0)
    # Four found a place: two in the queue, and one for each row that was free.
    assert (replica.num_running, replica.num_waiting) == (2, 3)
    assert sorted(due for due, end in ends.items() if end == math.inf) == [pytest.approx(0.14), pytest.approx(0.15)]
    replica.advance(math.inf)
    assert len(ends) == 7 and sum(map(math.isinf, ends.values())) == 2


@pytest.mark.parametrize(("limit", "num_running"), [(15, 1), (20, 2)])
def test_a_prefill_takes_no_more_tokens_than_it_may(limit: int, num_running: int) -> None:
    replica = SimulatedReplica(costs(tokens_per_prefill=limit), lambda due, end: None)
    for _ in range(2):
        replica.offer(0.0, Job(10, 3))
    replica.advance(0.6)
    assert (replica.num_running, replica.num_waiting) == (num_running, 2 - num_running)


def test_nothing_is_answered_before_time_has_come() -> None:
    ends, replica = run(costs(), (10.0, 1), until=5.0)
    assert not ends and replica.now == 5.0 and not replica.is_empty


def test_the_front_end_takes_its_share_of_the_only_core() -> None:
    ends, replica = run(costs(front_cpu_seconds=0.1), (0.0, 1))
    assert ends == {0.0: pytest.approx(0.5 + 0.1 + 1.0)}
    assert replica.busy_seconds == pytest.approx(1.6)
    assert replica.cpu_seconds == pytest.approx(1.6), "not counted twice"


def test_the_queue_is_estimated_as_the_server_does() -> None:
    _, replica = run(costs(max_waiting=50), *((0.0, 4) for _ in range(12)), until=20.0)
    assert replica.num_waiting > 0
    missing = (replica.num_running + replica.num_waiting) * 2 + 1 - 4
    mean = replica.queue_seconds * 4 / (missing - 0.5)
    assert 6.0 <= mean <= 7.0, "a request holds its slots for a prefill and four steps of 1.5 s"


def test_capacity_is_that_of_full_slots() -> None:
    assert capacity(costs(prefill_seconds=0.0)) == pytest.approx(2 / (4 * 1.5), rel=0.01)


def test_steps_between_those_measured_lie_on_a_line() -> None:
    given = costs().but(num_requests=[1, 5], step_seconds=[1.0, 3.0])  # type: ignore[arg-type]
    assert [given.step(n) for n in (1, 2, 5, 9)] == [1.0, 1.5, 3.0, 3.0]


def test_a_line_is_fitted_and_never_falls() -> None:
    assert fit_line([1.0, 2.0, 3.0], [3.0, 5.0, 7.0]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert fit_line([1.0, 2.0], [5.0, 3.0])[1] == 0.0
    assert fit_line([2.0, 2.0], [1.0, 3.0]) == (2.0, 0.0)
