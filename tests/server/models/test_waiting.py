"""Requests that wait for a model to be loaded, by a clock that stands still until it is moved."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dragoman.server.errors import NotReady
from dragoman.server.models import registry as waiting_module
from dragoman.server.models.registry import MAX_MARGIN_SECONDS, RETRY_SECONDS, Waiting
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
