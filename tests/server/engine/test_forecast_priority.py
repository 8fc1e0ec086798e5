"""Whom a request has to wait for when its deadline is judged: those that would be admitted before it, and nobody else."""

import pytest

from dragoman.server.engine.forecast import MIN_STEPS, Forecast
from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.scheduler import SECONDS_PER_PRIORITY, Limits, Scheduler
from dragoman.server.engine.sequence import Sequence

NOW = 1000.0


def sequence(request_id: int, arrival: float, priority: int = 0, width: int = 1) -> Sequence:
    search = SearchOptions(num_beams=width)
    return Sequence(b"", Request(request_id, [7], 10, arrival, priority=priority, search=search))


@pytest.fixture
def forecast() -> Forecast:
    """Steps of no length, and requests that hold their slots for a second."""
    forecast = Forecast()
    for _ in range(MIN_STEPS):
        forecast.observe_step(0.0)
    done = sequence(0, NOW)
    done.admitted = NOW
    forecast.observe_completion(done, NOW + 1)
    return forecast


@pytest.fixture
def policy() -> Scheduler:
    """Three slots, taken; 20 requests of three beams each wait since two seconds ago with the lowest priority."""
    policy = Scheduler(Limits(3, 1000, 10**6, 10**6))
    policy.submit(sequence(0, NOW - 3, width=3))
    policy.admit()
    for i in range(1, 21):
        policy.submit(sequence(i, NOW - 2, priority=-10, width=3))
    return policy


def test_waiting_requests_of_lower_priority_are_not_in_front(forecast: Forecast, policy: Scheduler) -> None:
    assert policy.num_slots_ahead(sequence(1000, NOW).request) == 0
    background = sequence(1000, NOW, priority=-10)
    assert policy.num_slots_ahead(background.request) == 60
    assert forecast.needed_seconds(background, policy) - forecast.needed_seconds(sequence(1000, NOW), policy) == pytest.approx(20.0)


def test_those_that_have_waited_longer_than_priority_makes_up_for_are(policy: Scheduler) -> None:
    later = NOW - 2 + 10 * SECONDS_PER_PRIORITY
    assert policy.num_slots_ahead(sequence(1000, later - 0.1).request) == 0
    assert policy.num_slots_ahead(sequence(1000, later).request) == 60, "of equals the first that came"


def test_priority_passes_only_those_that_it_is_admitted_before(forecast: Forecast, policy: Scheduler) -> None:
    policy.submit(sequence(50, NOW - 5))
    for priority, num_ahead in ((4, 1), (6, 0)):
        new = sequence(1000, NOW, priority)
        assert policy.num_slots_ahead(new.request) == num_ahead
        assert forecast.needed_seconds(new, policy) == pytest.approx((num_ahead + 0.5) / 3)
