"""Forecasts: the time that a request needs, the length of the queue, and when the queue has room again."""

import pytest

from dragoman.server.dispatch.fair_queue import Entry
from dragoman.server.dispatch.forecast import MIN_STEPS, NUM_AVERAGED, Average, Forecast
from dragoman.server.dispatch.queue import RequestQueue
from dragoman.server.engine.messages import Request, SearchOptions, Share
from tests.server.dispatch.queues import entry, queue


def measured(policy: RequestQueue) -> RequestQueue:
    """Steps of 0.1 s, 0.01 s a source token, and requests that hold their slots for 4 s."""
    forecast = policy.forecast
    for _ in range(MIN_STEPS):
        forecast.observe_steps(0.1)
    forecast.observe_prefill(50, 0.5)
    forecast.observe_completion(10.0, admitted=6.0)
    return policy


def submitted(policy: RequestQueue, *entries: Entry) -> RequestQueue:
    for one in entries:
        policy.submit(one, 0.0)
    policy.assign(0.0)
    return policy


def busy(num_running: int, num_waiting: int) -> RequestQueue:
    return submitted(measured(queue(4)), *(entry(i) for i in range(num_running + num_waiting)))


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
    num_running: int, num_waiting: int, new: dict[str, int], slot_seconds: float
) -> None:
    needed = busy(num_running, num_waiting).needed_seconds(entry(9000, num_tokens=10, **new))  # type: ignore[arg-type]
    assert needed == pytest.approx(0.1 + 0.1 + slot_seconds * 4 / 4)


def test_a_longer_request_needs_its_fewest_steps() -> None:
    search = SearchOptions(forced_prefix=[3, 4, 5], min_new_tokens=6)
    longer = Entry(Request(1, [7] * 20, 10, 0.0, search=search), lambda _: None, 20, 1)
    assert busy(1, 0).needed_seconds(longer) == pytest.approx(0.2 + 10 * 0.1)


def test_a_request_waits_for_its_callers_queue_and_for_its_callers_limit_of_slots() -> None:
    policy = submitted(busy(4, 900), *(entry(9001 + i, Share("single")) for i in range(4)))
    needed = policy.needed_seconds(entry(9000, Share("single"), 10))
    assert needed == pytest.approx(0.2 + 8.5 * 4 / 4), "four of its own, and as many of the other's"
    few = Share("few", max_slots=2)
    policy = submitted(measured(queue(4)), *(entry(i, few) for i in range(5)))
    assert policy.needed_seconds(entry(9, few, 10)) == pytest.approx(0.2 + 3.5 * 4 / 2)
    assert policy.needed_seconds(entry(9, num_tokens=10)) == pytest.approx(0.2), "two slots are free for others"
    assert policy.queue_seconds() == 0, "nothing could be served sooner"


def test_the_queue_is_as_long_as_its_last_must_wait_for_a_slot() -> None:
    assert [busy(*load).queue_seconds() for load in ((3, 0), (4, 0), (4, 8))] == pytest.approx([0, 0.5, 8.5])
    assert submitted(queue(4), *map(entry, range(12))).queue_seconds() == 0, "nothing has completed"


def test_before_enough_is_known_nothing_is_foreseen() -> None:
    policy = submitted(queue(4), *map(entry, range(104)))
    for _ in range(MIN_STEPS - 1):
        policy.forecast.observe_steps(1000.0)
    assert policy.needed_seconds(entry(9)) == 0.0
    policy.forecast.observe_steps(1000.0)
    assert policy.needed_seconds(entry(9)) >= 1000.0


def test_a_place_is_likely_when_a_tenth_of_the_queue_is_done() -> None:
    forecast = Forecast()
    assert forecast.seconds_until_place(50) == 1.0, "nothing was ever completed"
    forecast.start(100.0)
    for i in range(1, 11):
        forecast.observe_completion(100.0 + 0.5 * i)
    places = [forecast.seconds_until_place(*load) for load in ((3,), (50,), (50, 0.5), (10**6,))]
    assert places == pytest.approx([0.5, 2.5, 5.0, 30.0])
    for _ in range(10 * NUM_AVERAGED):
        forecast.observe_completion(105.0)
    assert 0.01 <= forecast.seconds_until_place(0) < 0.02, "never at once"
