"""Decisions of idle unloading, and requests that wait for a model, by a clock that stands still until it is moved."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dragoman.server.errors import NotReady
from dragoman.server.models import registry as waiting_module
from dragoman.server.models.idle import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Sleep, Why
from dragoman.server.models.registry import MAX_MARGIN_SECONDS, RETRY_SECONDS, Waiting
from dragoman.server.models.use import Holding


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def used(num_held: int = 0, last_used: float = 0.0) -> Holding:
    return Holding(num_held, last_used, last_used)


def decide(sleep: Sleep, holding: Holding | None = None, *, is_awaited: bool = False, is_tried: bool = False) -> bool:
    """Decide anew, and return whether the model is to be unloaded."""
    sleep.decide(holding or used(), is_awaited=is_awaited, is_tried=is_tried)
    return sleep.is_asleep


# Seconds after loading; requests that hold it, and seconds since the last; whether it is awaited, on probation, asked to leave.
@pytest.mark.parametrize(
    ("seconds", "num_held", "used_ago", "is_awaited", "is_tried", "is_asked", "why"),
    [
        (59.0, 0, 1e3, False, False, False, None),
        (60.0, 0, 1e3, False, False, False, Why.IDLE),
        (90.0, 0, 59.5, False, False, False, None),
        (90.0, 0, 60.0, False, False, False, Why.IDLE),
        (90.0, 1, 1e3, False, False, False, None),
        (90.0, 0, 1e3, True, False, False, None),
        (90.0, 0, 1e3, False, True, False, None),
        (0.0, 3, 1e3, False, False, True, Why.MEMORY),
        (0.0, 3, 1e3, True, False, True, None),
        (0.0, 0, 1e3, False, True, True, None),
    ],
)
def test_model_is_unloaded_when_it_is_idle_or_asked_to_make_room(
    clock: Clock, seconds: float, num_held: int, used_ago: float, is_awaited: bool, is_tried: bool, is_asked: bool, why: Why | None
) -> None:
    sleep = Sleep(60.0, clock)
    assert decide(sleep) and sleep.pause(used()) is None, "it is not loaded at the start"
    assert not decide(sleep, is_awaited=True)
    clock.now += 5.0
    sleep.wake()
    clock.now += seconds
    sleep.is_asked, holding = is_asked, used(num_held, clock.now - used_ago)
    assert decide(sleep, holding, is_awaited=is_awaited, is_tried=is_tried) is (why is not None) and not sleep.is_asked
    assert why is None or sleep.why == why
    if why is None:
        idle = min(seconds, used_ago)
        assert sleep.pause(holding) == pytest.approx(60.0 if num_held else max(0.001, 60.0 - idle))


def test_failed_load_is_retried_with_a_growing_pause(clock: Clock) -> None:
    sleep, pauses = Sleep(60.0, clock), []
    for _ in range(8):
        assert not decide(sleep, is_awaited=True)
        sleep.fail("no memory")
        pauses.append(sleep.retry_seconds)
        assert decide(sleep, is_awaited=True) and sleep.pause(used()) == pauses[-1]
        clock.now += sleep.retry_seconds
    assert pauses == [min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2**number) for number in range(8)]
    sleep.wake()
    sleep.fail("again")
    assert sleep.retry_seconds == MIN_RETRY_SECONDS, "it was loaded in between"


def test_model_that_is_always_to_be_loaded_is_loaded_and_retried_by_itself_and_never_unloaded(clock: Clock) -> None:
    always = Sleep(math.inf, clock)
    clock.now += 1e9
    always.is_asked = True
    assert not decide(always) and not always.may_sleep and always.pause(used()) is None
    sleep = Sleep(60.0, clock)
    sleep.keep_seconds = math.inf
    assert not decide(sleep)
    sleep.fail("no memory")
    assert decide(sleep) and sleep.pause(used()) == MIN_RETRY_SECONDS
    clock.now += MIN_RETRY_SECONDS
    assert not decide(sleep)


# Requests that wait.


class Waits:
    """Requests that wait, and the sets of awaited models that were told."""

    def __init__(self, clock: Clock) -> None:
        self.waiting, self.clock = Waiting(30.0, clock), clock
        self.told: list[frozenset[str]] = []
        self.waiting.on_change = lambda: self.told.append(self.waiting.names)

    @asynccontextmanager
    async def waiting_for(self, *names: str) -> AsyncIterator[list[asyncio.Task[None]]]:
        tasks = [asyncio.create_task(self.waiting.wait(name, self.clock.now + 60)) for name in names]
        await asyncio.sleep(0)
        yield tasks

    async def too_late(self) -> float:
        """Have a request for `a` give up, and return after how many seconds it is to come back."""
        with pytest.raises(NotReady, match="'a' is being loaded") as refusal:
            await self.waiting.wait("a", self.clock.now)
        return refusal.value.retry_after_seconds


@pytest.fixture
def waits(clock: Clock) -> Waits:
    return Waits(clock)


async def test_requests_go_on_when_their_model_changes_and_only_the_first_and_the_last_are_told(waits: Waits) -> None:
    async with waits.waiting_for("a", "a", "b") as tasks:
        assert (waits.waiting.num_waiting("a"), waits.waiting.names) == (2, frozenset("ab"))
        waits.waiting.change("a")
        await asyncio.gather(*tasks[:2])
        assert not tasks[2].done()
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert waits.told == [frozenset("a"), frozenset("ab"), frozenset("b"), frozenset()]
        waits.waiting.change("b")


@pytest.mark.parametrize("change", ["change", "refuse", "time"])
async def test_model_is_awaited_for_a_request_that_was_told_to_come_back(
    waits: Waits, clock: Clock, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(waiting_module, "PROMISE_SECONDS", 0.01)
    assert await waits.too_late() == RETRY_SECONDS
    assert waits.waiting.names == frozenset("a") == waits.told[-1]
    if change == "change":
        waits.waiting.change("a")
    elif change == "refuse":
        waits.waiting.refuse("a", "no memory", 1.0)
    else:
        clock.now += 1
        while waits.told[-1]:
            await asyncio.sleep(0.001)
    assert waits.waiting.names == frozenset() == waits.told[-1]


async def test_retry_time_is_what_is_left_of_loading_if_it_takes_as_long_as_the_last_time(waits: Waits, clock: Clock) -> None:
    for seconds_before, seconds_after, retry_seconds in ((5, 15, 1), (5, 0, 15), (5, 0, 1)):
        async with waits.waiting_for("a") as tasks:
            clock.now += seconds_before
            assert await waits.too_late() == pytest.approx(retry_seconds)
            clock.now += seconds_after
            waits.waiting.change("a")
            await asyncio.gather(*tasks)


async def test_reason_why_a_model_cannot_be_loaded_is_told_to_all_that_wait(waits: Waits) -> None:
    async with waits.waiting_for("a", "a") as tasks:
        waits.waiting.refuse("a", "no memory", 4.0)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        for error in errors:
            assert isinstance(error, NotReady) and error.retry_after_seconds == 4.0
            assert error.message == "model 'a' cannot be loaded: no memory"
        assert errors[0] is not errors[1] and waits.waiting.names == frozenset()


@pytest.mark.parametrize(
    ("seconds", "waits"), [(None, 30.0), (100.0, 30.0), (10.0, 10.0 - MAX_MARGIN_SECONDS), (1.0, 0.9), (0.0, 0.0), (-1.0, -0.9)]
)
def test_wait_ends_before_the_deadline(clock: Clock, seconds: float | None, waits: float) -> None:
    assert Waiting(30.0, clock).end_of(seconds) == pytest.approx(clock.now + waits)
