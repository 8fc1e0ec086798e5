"""What is refused because it cannot be in time, and what is not."""

from typing import Any

import pytest

from dragoman.server.engine.forecast import MIN_STEPS, NUM_AVERAGED, Average, Forecast
from dragoman.server.engine.messages import Request, SearchOptions, Share
from dragoman.server.engine.scheduler import Limits, Scheduler
from dragoman.server.engine.sequence import Sequence


def sequence(num_tokens: int = 10, priority: int = 0, **search: Any) -> Sequence:
    return Sequence(b"", Request(1000, [7] * num_tokens, 10, 0.0, priority=priority, search=SearchOptions(**search)))


@pytest.fixture
def forecast() -> Forecast:
    """Steps of 0.1 s, 0.01 s a source token, and requests that hold their slots for 4 s."""
    forecast = Forecast()
    for _ in range(MIN_STEPS):
        forecast.observe_step(0.1)
    forecast.observe_prefill(50, 0.5)
    done = sequence()
    done.admitted = 6.0
    forecast.observe_completion(done, 10.0)
    return forecast


def scheduler(num_running: int, num_waiting: int, max_slots: int = 4) -> Scheduler:
    policy = Scheduler(Limits(max_slots, 1000, 10**6, 10**6))
    everything = [Sequence(b"", Request(i, [7], 10, 0.0)) for i in range(num_running + num_waiting)]
    for one in everything[:num_running]:
        policy.submit(one)
    policy.admit()
    for one in everything[num_running:]:
        policy.submit(one)
    return policy


def test_an_average_forgets_slowly_and_begins_with_what_there_is() -> None:
    average = Average()
    for value in (1.0, 2.0, 6.0):
        average.add(value)
    assert average.value == pytest.approx(3.0)
    for _ in range(20 * NUM_AVERAGED):
        average.add(5.0)
    assert average.value == pytest.approx(5.0)


def test_a_request_needs_its_prefill_and_its_fewest_steps(forecast: Forecast) -> None:
    free = scheduler(1, 0)
    assert forecast.needed_seconds(sequence(), free) == pytest.approx(0.1 + 0.1)
    longer = sequence(20, forced_prefix=[3, 4, 5], min_new_tokens=6)
    assert forecast.needed_seconds(longer, free) == pytest.approx(0.2 + 10 * 0.1)


def test_the_queue_is_as_long_as_its_last_must_wait_for_a_slot(forecast: Forecast) -> None:
    assert forecast.queue_seconds(scheduler(3, 0)) == 0
    assert forecast.queue_seconds(scheduler(4, 0)) == pytest.approx(0.5 * 4 / 4)
    assert forecast.queue_seconds(scheduler(4, 8)) == pytest.approx(8.5 * 4 / 4)
    assert Forecast().queue_seconds(scheduler(4, 8)) == 0, "nothing has completed"


def test_where_slots_are_taken_it_waits_for_those_in_front(forecast: Forecast) -> None:
    assert forecast.needed_seconds(sequence(), scheduler(4, 0)) == pytest.approx(0.2 + 0.5 * 4 / 4)
    assert forecast.needed_seconds(sequence(), scheduler(4, 8)) == pytest.approx(0.2 + 8.5 * 4 / 4)
    wide = sequence(num_beams=3)
    assert forecast.needed_seconds(wide, scheduler(1, 0)) == pytest.approx(0.2), "three are free"
    assert forecast.needed_seconds(wide, scheduler(2, 0)) == pytest.approx(0.2 + 0.5 * 4 / 4)


def test_priority_does_not_wait_for_what_waits(forecast: Forecast) -> None:
    busy = scheduler(4, 100)
    assert forecast.needed_seconds(sequence(priority=1), busy) == pytest.approx(0.2 + 0.5 * 4 / 4)
    assert forecast.needed_seconds(sequence(priority=-1), busy) == forecast.needed_seconds(sequence(), busy)


def test_it_waits_for_its_callers_own_queue_and_for_the_share_of_others(forecast: Forecast) -> None:
    busy = scheduler(4, 900)
    single = Sequence(b"", Request(9000, [7] * 10, 10, 0.0, share=Share("single")))
    assert forecast.needed_seconds(single, busy) == pytest.approx(0.2 + 0.5 * 4 / 4)
    assert forecast.needed_seconds(sequence(), busy) == pytest.approx(0.2 + 900.5 * 4 / 4)
    for i in range(4):
        busy.submit(Sequence(b"", Request(9001 + i, [7], 10, 0.0, share=Share("single"))))
    assert forecast.needed_seconds(single, busy) == pytest.approx(0.2 + 8.5 * 4 / 4), "four of its own, and as many of the other's"


def test_it_waits_for_its_callers_own_limit_of_slots(forecast: Forecast) -> None:
    busy, share = scheduler(0, 0), Share("few", max_slots=2)
    for i in range(5):
        busy.submit(Sequence(b"", Request(i, [7], 10, 0.0, share=share)))
    busy.admit()
    new = Sequence(b"", Request(9, [7] * 10, 10, 0.0, share=share))
    assert forecast.needed_seconds(new, busy) == pytest.approx(0.2 + 3.5 * 4 / 2)
    assert forecast.needed_seconds(sequence(), busy) == pytest.approx(0.2), "two slots are free for anybody else"
    assert forecast.queue_seconds(busy) == 0, "nobody could be served sooner"


def test_before_enough_is_known_nothing_is_said() -> None:
    forecast = Forecast()
    for _ in range(MIN_STEPS - 1):
        forecast.observe_step(1000.0)
    assert forecast.needed_seconds(sequence(), scheduler(4, 100)) == 0.0
    forecast.observe_step(1000.0)
    assert forecast.needed_seconds(sequence(), scheduler(4, 100)) >= 1000.0


def test_a_place_is_likely_when_a_tenth_of_the_queue_is_done() -> None:
    forecast = Forecast()
    assert forecast.seconds_until_a_place(50) == 1.0, "nothing was ever completed"
    forecast.start(100.0)
    for i in range(1, 11):
        forecast.observe_completion(sequence(), 100.0 + 0.5 * i)
    assert forecast.seconds_until_a_place(3) == pytest.approx(0.5)
    assert forecast.seconds_until_a_place(50) == pytest.approx(2.5)
    assert forecast.seconds_until_a_place(10**6) == 30.0
    for _ in range(10 * NUM_AVERAGED):
        forecast.observe_completion(sequence(), 105.0)
    assert 0.01 <= forecast.seconds_until_a_place(0) < 0.02, "never at once"


@pytest.fixture
def busy(make_bench: Any) -> Any:
    """One slot, half a second a step, four tokens an answer; one runs and one waits."""
    bench = make_bench(max_slots=1)
    bench.runner.on_step = lambda: setattr(bench.clock, "now", bench.clock.now + 0.5)
    for i in range(MIN_STEPS // 4):
        bench.submit(i, [4, i])
        bench.run()
    bench.submit(100, [4, 100])
    bench.submit(101, [4, 101])
    bench.step()
    return bench


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_time_it_takes(busy: Any) -> None:
    num_steps = len(busy.runner.step_rows)
    busy.submit(1000, [4, 1], deadline=busy.clock.now + 3.4)  # 101 and half of 100, 2 s each, and one step
    busy.collect()
    end = busy.finished[1000]
    assert (end.reason, end.admitted, end.num_generated) == ("deadline_unmet", None, 0)
    assert end.needed_seconds == pytest.approx(3.5) and end.ended == busy.clock.now
    assert len(busy.runner.step_rows) == num_steps and busy.engine.scheduler.num_waiting == 1


def test_one_that_can_is_not(busy: Any) -> None:
    busy.submit(1000, [1, 1], deadline=busy.clock.now + 6)
    busy.run()
    assert busy.finished[1000].reason == "eos"


def test_with_priority_it_can_be_met(busy: Any) -> None:
    busy.submit(1000, [1, 1], deadline=busy.clock.now + 3.4, priority=5)
    busy.run()
    assert busy.finished[1000].reason == "eos" and busy.order[-2:] == [1000, 101]


def test_an_idle_engine_refuses_nothing(busy: Any) -> None:
    busy.run()
    busy.submit(1000, [1, 1], deadline=busy.clock.now + 0.1)
    busy.run()
    assert busy.finished[1000].reason == "eos"


def test_without_a_deadline_nothing_is_refused(busy: Any) -> None:
    busy.submit(1000, [1, 1])
    busy.run()
    assert busy.finished[1000].reason == "eos"
