"""Forecasts: the time that a request needs, the length of the queue, and when the queue has room again."""

import pytest
from dragoman.server.engine.forecast import MIN_STEPS, NUM_AVERAGED, Average, Forecast
from dragoman.server.engine.scheduler import Scheduler

from dragoman.server.engine.messages import Request, SearchOptions, Share
from dragoman.server.engine.sequence import Sequence
from tests.server.engine.sequences import scheduler, sequence


@pytest.fixture
def forecast() -> Forecast:
    """Steps of 0.1 s, 0.01 s a source token, and requests that hold their slots for 4 s."""
    forecast = Forecast()
    for _ in range(MIN_STEPS):
        forecast.observe_step(0.1)
    forecast.observe_prefill(50, 0.5)
    done = sequence(0)
    done.admitted = 6.0
    forecast.observe_completion(done, 10.0)
    return forecast


def busy(num_running: int, num_waiting: int) -> Scheduler:
    policy = scheduler(4)
    for i in range(num_running):
        policy.submit(sequence(i))
    policy.admit()
    for i in range(num_waiting):
        policy.submit(sequence(100 + i))
    return policy


def test_an_average_forgets_slowly_and_begins_with_what_there_is() -> None:
    average = Average()
    for value in (1.0, 2.0, 6.0):
        average.add(value)
    assert average.value == pytest.approx(3.0)
    for _ in range(20 * NUM_AVERAGED):
        average.add(5.0)
    assert average.value == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "new", "slot_seconds"),
    [
        (1, 0, {}, 0),
        (4, 0, {}, 0.5),  # the next slot is half way there
        (4, 8, {}, 8.5),
        (4, 100, {"priority": 1}, 0.5),
        (4, 100, {"priority": -1}, 100.5),
        (1, 0, {"width": 3}, 0),
        (2, 0, {"width": 3}, 0.5),
        (4, 900, {"share": Share("single")}, 0.5),  # not the other caller's whole queue
        (4, 900, {}, 900.5),
    ],
)
def test_a_request_needs_its_prefill_its_steps_and_the_slots_before_it(
    forecast: Forecast, num_running: int, num_waiting: int, new: dict[str, int], slot_seconds: float
) -> None:
    needed = forecast.needed_seconds(sequence(9000, num_tokens=10, **new), busy(num_running, num_waiting))  # type: ignore[arg-type]
    assert needed == pytest.approx(0.1 + 0.1 + slot_seconds * 4 / 4)


def test_a_longer_request_needs_its_fewest_steps(forecast: Forecast) -> None:
    search = SearchOptions(forced_prefix=[3, 4, 5], min_new_tokens=6)
    longer = Sequence(b"", Request(1, [7] * 20, 10, 0.0, search=search))
    assert forecast.needed_seconds(longer, busy(1, 0)) == pytest.approx(0.2 + 10 * 0.1)


def test_a_request_waits_for_its_callers_queue_and_for_its_callers_limit_of_slots(forecast: Forecast) -> None:
    policy = busy(4, 900)
    for i in range(4):
        policy.submit(sequence(9001 + i, Share("single")))
    needed = forecast.needed_seconds(sequence(9000, Share("single"), 10), policy)
    assert needed == pytest.approx(0.2 + 8.5 * 4 / 4), "four of its own, and as many of the other's"
    policy, few = scheduler(4), Share("few", max_slots=2)
    for i in range(5):
        policy.submit(sequence(i, few))
    policy.admit()
    assert forecast.needed_seconds(sequence(9, few, 10), policy) == pytest.approx(0.2 + 3.5 * 4 / 2)
    assert forecast.needed_seconds(sequence(9, num_tokens=10), policy) == pytest.approx(0.2), "two slots are free for others"
    assert forecast.queue_seconds(policy) == 0, "nothing could be served sooner"


def test_the_queue_is_as_long_as_its_last_must_wait_for_a_slot(forecast: Forecast) -> None:
    assert [forecast.queue_seconds(busy(*load)) for load in ((3, 0), (4, 0), (4, 8))] == pytest.approx([0, 0.5, 8.5])
    assert Forecast().queue_seconds(busy(4, 8)) == 0, "nothing has completed"


def test_before_enough_is_known_nothing_is_foreseen() -> None:
    forecast = Forecast()
    for _ in range(MIN_STEPS - 1):
        forecast.observe_step(1000.0)
    assert forecast.needed_seconds(sequence(9), busy(4, 100)) == 0.0
    forecast.observe_step(1000.0)
    assert forecast.needed_seconds(sequence(9), busy(4, 100)) >= 1000.0


def test_a_place_is_likely_when_a_tenth_of_the_queue_is_done() -> None:
    forecast = Forecast()
    assert forecast.seconds_until_a_place(50) == 1.0, "nothing was ever completed"
    forecast.start(100.0)
    for i in range(1, 11):
        forecast.observe_completion(sequence(i), 100.0 + 0.5 * i)
    places = [forecast.seconds_until_a_place(*load) for load in ((3,), (50,), (50, 0.5), (10**6,))]
    assert places == pytest.approx([0.5, 2.5, 5.0, 30.0])
    for _ in range(10 * NUM_AVERAGED):
        forecast.observe_completion(sequence(1), 105.0)
    assert 0.01 <= forecast.seconds_until_a_place(0) < 0.02, "never at once"
