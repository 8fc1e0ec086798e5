"""Requests that wait for models: let on, told off, told to come back, forgotten."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dragoman.server.errors import NotReady
from dragoman.server.repository import waiting as waiting_file
from dragoman.server.repository.waiting import MAX_MARGIN_SECONDS, RETRY_SECONDS, Waiting


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def play(scene: Callable[[Waiting, Clock, list[frozenset[str]]], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = Clock()
        waiting, told = Waiting(30.0, clock), list[frozenset[str]]()
        waiting.on_change = lambda: told.append(waiting.names)
        await scene(waiting, clock, told)

    asyncio.run(run())


def test_all_who_wait_for_a_model_go_on_when_it_changes_and_who_loads_hears_of_the_first_and_the_last() -> None:
    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        tasks = [asyncio.create_task(waiting.wait(name, clock.now + 9)) for name in ("a", "a", "b")]
        await asyncio.sleep(0)
        assert (waiting.num_waiting("a"), waiting.names) == (2, frozenset({"a", "b"}))
        waiting.change("a")
        await asyncio.gather(*tasks[:2])
        assert not tasks[2].done()
        waiting.change("b")
        await tasks[2]
        assert told == [frozenset("a"), frozenset("ab"), frozenset("b"), frozenset()]

    play(scene)


def test_a_caller_that_leaves_is_forgotten() -> None:
    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        tasks = [asyncio.create_task(waiting.wait("a", clock.now + 9)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert waiting.names == frozenset() == told[-1]
        waiting.change("a")

    play(scene)


def test_who_cannot_wait_longer_is_told_when_to_come_back_and_loading_goes_on_for_it() -> None:
    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        with pytest.raises(NotReady, match="'a' is being loaded") as refusal:
            await waiting.wait("a", clock.now)
        assert refusal.value.retry_after_seconds == RETRY_SECONDS
        assert waiting.names == {"a"} == told[-1], "it comes back"
        waiting.change("a")
        assert waiting.names == frozenset()

    play(scene)


@pytest.mark.parametrize("tell", [Waiting.change, lambda waiting, name: waiting.refuse(name, "no memory", 1.0)])
def test_who_loads_hears_that_nobody_is_waited_for_any_more_who_was_told_to_come_back(tell: Callable[[Waiting, str], None]) -> None:
    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        with pytest.raises(NotReady):
            await waiting.wait("a", clock.now)
        assert waiting.names == frozenset("a") == told[-1]
        tell(waiting, "a")
        assert waiting.names == frozenset() == told[-1]

    play(scene)


def test_what_is_left_of_loading_is_told_if_it_takes_as_long_as_the_last_time() -> None:
    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        first = asyncio.create_task(waiting.wait("a", clock.now + 60))
        await asyncio.sleep(0)
        clock.now += 20
        waiting.change("a")
        await first
        patient = asyncio.create_task(waiting.wait("a", clock.now + 60))
        await asyncio.sleep(0)
        clock.now += 5
        with pytest.raises(NotReady) as refusal:
            await waiting.wait("a", clock.now)
        assert refusal.value.retry_after_seconds == pytest.approx(15)
        waiting.change("a")
        await patient

    play(scene)


def test_who_does_not_come_back_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_file, "PROMISE_SECONDS", 0.01)

    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        with pytest.raises(NotReady):
            await waiting.wait("a", clock.now)
        clock.now += 1
        while told[-1]:
            await asyncio.sleep(0.001)
        assert waiting.names == frozenset()

    play(scene)


def test_the_reason_why_a_model_cannot_be_loaded_is_told_to_all_who_wait() -> None:
    async def scene(waiting: Waiting, clock: Clock, told: list[frozenset[str]]) -> None:
        tasks = [asyncio.create_task(waiting.wait("a", clock.now + 9)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting.refuse("a", "no memory", 4.0)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        for error in errors:
            assert isinstance(error, NotReady) and error.retry_after_seconds == 4.0
            assert error.message == "model 'a' cannot be loaded: no memory"
        assert errors[0] is not errors[1]
        assert waiting.names == frozenset()

    play(scene)


@pytest.mark.parametrize(
    ("seconds", "waits"), [(None, 30.0), (100.0, 30.0), (10.0, 10.0 - MAX_MARGIN_SECONDS), (1.0, 0.9), (0.0, 0.0), (-1.0, -0.9)]
)
def test_the_wait_ends_before_the_deadline_so_that_there_is_time_to_say_so(seconds: float | None, waits: float) -> None:
    clock = Clock()
    assert Waiting(30.0, clock).end_of(seconds) == pytest.approx(clock.now + waits)
