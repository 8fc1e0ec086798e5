"""Lines of batches give way to other requests, but not for ever."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.engine.messages import Statistics
from dragoman.server.service import batch_gate
from dragoman.server.service.batch_gate import MAX_PREEMPTED, Gate, Preempted
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.service import Service
from dragoman.server.telemetry.metrics import Metrics

MAX_SLOTS = 8


class Others:
    """A service with one model, and as many requests of others as are set."""

    def __init__(self) -> None:
        self.num_urgent = 0
        self.calls = RunningCalls(Metrics(CollectorRegistry()))
        engine = SimpleNamespace(is_ready=True, statistics=lambda: Statistics(num_urgent=self.num_urgent))
        self.model = SimpleNamespace(engine=engine, is_asleep=False, max_slots=MAX_SLOTS)
        self.models = SimpleNamespace(versions=lambda: [self.model], all=lambda: [self.model])

    def gate(self) -> Gate:
        return Gate(cast(Service, self))

    def call(self, *, is_counted: bool = True) -> None:
        with self.calls.serving(Call.begin("/a/B", is_counted=is_counted)):
            pass


async def line(gate: Gate, num_preempted: int = 0) -> str:
    """Hold a slot until the line gives way."""
    try:
        async with gate.slots(1, num_preempted):
            await asyncio.sleep(60)
    except Preempted:
        return "gave way"
    return "ended"


async def started(*works: Any) -> list["asyncio.Task[str]"]:
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.sleep(0)
    return tasks


async def ended(tasks: list["asyncio.Task[str]"], seconds: float = 0.2) -> list[str]:
    """Return the outcomes within a time, then end the others."""
    done, pending = await asyncio.wait(tasks, timeout=seconds)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return sorted(task.result() for task in done)


@pytest.mark.parametrize(("is_counted", "outcomes"), [(True, ["gave way"]), (False, [])])
async def test_a_line_gives_way_when_a_call_begins_that_needs_an_engine(is_counted: bool, outcomes: list[str]) -> None:
    others = Others()
    gate = others.gate()
    gate._update(10.0)  # without a tick later: the call itself tells
    tasks = await started(line(gate))
    others.call(is_counted=is_counted)
    assert await ended(tasks) == outcomes


async def test_a_line_that_has_given_way_often_is_kept() -> None:
    others = Others()
    gate = others.gate()
    gate._update(10.0)
    first = await started(line(gate, MAX_PREEMPTED))
    others.call()
    assert await ended(first) == [], "it goes on until its end"


async def test_lines_begin_once_others_are_calm_and_more_the_longer_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others()
    gate, now = others.gate(), 100.0
    monkeypatch.setattr(batch_gate, "time", SimpleNamespace(monotonic=lambda: now))
    others.num_urgent = 1
    gate._begun_at = now
    tasks = await started(*(line(gate) for _ in range(100)))
    gate._update(now)
    assert gate._num_held == 0
    others.num_urgent = 0
    found = []
    for seconds in (0.01, 0.03, 2.1, 4.1, 20.0, 60.0):
        gate._update(now + seconds)
        found.append(gate._num_held)
    assert found == [0, 1, 2, 4, MAX_SLOTS * 5 // 4, MAX_SLOTS * 5 // 4]
    await asyncio.sleep(0)  # they hold their slots
    others.num_urgent = 2
    gate._update(now + 61)
    assert await ended(tasks) == ["gave way"] * (MAX_SLOTS * 5 // 4)


async def test_a_line_that_others_never_let_in_begins_anyway_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others()
    gate, now = others.gate(), 100.0
    monkeypatch.setattr(batch_gate, "time", SimpleNamespace(monotonic=lambda: now))
    others.num_urgent, gate._begun_at = 3, now
    tasks = await started(line(gate), line(gate))
    gate._update(now + 0.9)
    assert gate._num_held == 0
    gate._update(now + 1.1)
    await asyncio.sleep(0)
    others.call()
    gate._update(now + 1.2)
    assert gate._num_held == 1, "one, and no other meanwhile"
    assert await ended(tasks, 0.05) == []


async def test_a_cancelled_line_leaves_its_slots_to_the_next() -> None:
    gate = Others().gate()
    gate._update(10.0)
    first, second = await started(line(gate), line(gate))
    gate._num_allowed = 1
    assert gate._num_held >= 1
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    await asyncio.sleep(0)
    assert gate._num_held == 1
    assert await ended([second], 0.05) == []
