"""When a model falls asleep and when it wakes, by a clock that stands still until it is moved."""

import math

import pytest

from dragoman.server.repository.sleep import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Sleep, Why
from dragoman.server.repository.use import Holding


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def used(num_held: int = 0, last_used: float = 0.0) -> Holding:
    return Holding(num_held, last_used, last_used)


def awake(keep_seconds: float, clock: Clock) -> Sleep:
    sleep = Sleep(keep_seconds, clock)
    sleep.decide(used(), is_awaited=True, is_tried=False)
    sleep.wake()
    assert not sleep.is_asleep
    return sleep


def test_a_model_that_is_always_loaded_never_sleeps() -> None:
    clock = Clock()
    sleep = Sleep(math.inf, clock)
    clock.now += 1e9
    sleep.is_asked = True
    sleep.decide(used(), is_awaited=False, is_tried=False)
    assert (sleep.is_asleep, sleep.may_sleep, sleep.pause(used())) == (False, False, None)


def test_a_model_begins_asleep_and_only_wakes_when_it_is_awaited() -> None:
    sleep = Sleep(60.0, Clock())
    sleep.decide(used(), is_awaited=False, is_tried=False)
    assert sleep.is_asleep and sleep.pause(used()) is None
    sleep.decide(used(), is_awaited=True, is_tried=False)
    assert not sleep.is_asleep


def test_it_falls_asleep_when_it_was_idle_for_its_time_and_not_before() -> None:
    clock = Clock()
    sleep = awake(60.0, clock)
    clock.now += 59.0
    sleep.decide(used(), is_awaited=False, is_tried=False)
    assert not sleep.is_asleep and sleep.pause(used()) == pytest.approx(1.0)
    clock.now += 1.0
    sleep.decide(used(last_used=clock.now - 0.5), is_awaited=False, is_tried=False)
    assert not sleep.is_asleep, "it was used meanwhile"
    clock.now += 59.5
    sleep.decide(used(last_used=clock.now - 60), is_awaited=False, is_tried=False)
    assert (sleep.is_asleep, sleep.why) == (True, Why.IDLE)


@pytest.mark.parametrize(
    ("holding", "is_awaited", "is_tried"), [(used(1), False, False), (used(), True, False), (used(), False, True)]
)
def test_it_stays_while_it_is_held_or_awaited_or_on_probation(holding: Holding, is_awaited: bool, is_tried: bool) -> None:
    clock = Clock()
    sleep = awake(1.0, clock)
    clock.now += 100.0
    sleep.decide(holding, is_awaited=is_awaited, is_tried=is_tried)
    assert not sleep.is_asleep


def test_one_that_is_asked_gives_way_although_it_is_held_but_not_while_others_wait_for_it() -> None:
    sleep = awake(60.0, Clock())
    sleep.is_asked = True
    sleep.decide(used(3), is_awaited=True, is_tried=False)
    assert not sleep.is_asleep and not sleep.is_asked, "whoever asked has to ask again"
    sleep.is_asked = True
    sleep.decide(used(3), is_awaited=False, is_tried=False)
    assert (sleep.is_asleep, sleep.why) == (True, Why.MEMORY)


def test_one_that_could_not_be_woken_is_tried_again_later_and_later() -> None:
    clock = Clock()
    sleep = Sleep(60.0, clock)
    pauses = []
    for _ in range(8):
        sleep.decide(used(), is_awaited=True, is_tried=False)
        assert not sleep.is_asleep
        sleep.fail("no memory")
        pauses.append(sleep.retry_seconds)
        sleep.decide(used(), is_awaited=True, is_tried=False)
        assert sleep.is_asleep, "not at once"
        clock.now += sleep.retry_seconds
    assert pauses == [min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2**number) for number in range(8)]
    sleep.wake()
    sleep.fail("again")
    assert sleep.retry_seconds == MIN_RETRY_SECONDS, "it has been awake in between"


def test_one_that_is_to_be_always_loaded_from_now_on_is_loaded_and_tried_again_by_itself() -> None:
    clock = Clock()
    sleep = Sleep(60.0, clock)
    sleep.keep_seconds = math.inf
    sleep.decide(used(), is_awaited=False, is_tried=False)
    assert not sleep.is_asleep
    sleep.fail("no memory")
    sleep.decide(used(), is_awaited=False, is_tried=False)
    assert sleep.is_asleep and sleep.pause(used()) == MIN_RETRY_SECONDS
    clock.now += MIN_RETRY_SECONDS
    sleep.decide(used(), is_awaited=False, is_tried=False)
    assert not sleep.is_asleep
