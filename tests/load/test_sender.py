"""Sending: when calls leave, what their latency counts from, and that each is recorded once."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from dragoman.load.arrivals import Arrivals
from dragoman.load.items import Item
from dragoman.load.plan import Plan
from dragoman.load.sender import Sender
from dragoman.load.tally import UNSENT, Outcome

PATIENCE_SECONDS = 60


class Calls:
    """Makes calls that do what the test says, and record that they were answered."""

    def __init__(self, act: Callable[[Item], Awaitable[None]] | None = None) -> None:
        self.sender: Sender | None = None
        self.made: list[tuple[Item, float]] = []
        self.max_running = self._num_running = 0
        self._act = act

    async def call(self, item: Item, due: float) -> None:
        assert self.sender is not None
        self.made.append((item, due))
        self._num_running += 1
        self.max_running = max(self.max_running, self._num_running)
        if self._act is not None:
            await self._act(item)
        self._num_running -= 1
        self.sender.record(Outcome(item.group, False, due, self.sender._clock()))


def run(plan: Plan, calls: Calls, beside: Callable[[Sender], Awaitable[None]] | None = None) -> Sender:
    async def main() -> Sender:
        start = time.monotonic() + 0.02
        calls.sender = Sender(plan, lambda: time.monotonic() - start)
        running = asyncio.create_task(calls.sender.run(calls))
        if beside is not None:
            await beside(calls.sender)
        await asyncio.wait_for(running, PATIENCE_SECONDS)
        return calls.sender

    return asyncio.run(main())


def test_an_open_loop_sends_what_is_due_at_the_times_that_are_due(make_plan) -> None:
    calls = Calls()
    sender = run(make_plan(arrivals=Arrivals(100.0, "constant"), seconds=0.3), calls)
    assert [due for _, due in calls.made] == pytest.approx([i / 100 for i in range(30)])
    assert sender.num_sent == 30
    tally = sender.take()
    assert tally.groups["unary"].num == 30 and tally.lag.num == 30


def test_latency_counts_from_the_schedule_when_the_sender_is_held_up(make_plan) -> None:
    """The sender's own loop is blocked for a while: what was due meanwhile has waited, whoever is to blame."""

    async def block(item: Item) -> None:
        if item.requests[0].request_id.endswith("-5-0"):
            time.sleep(0.3)

    sender = run(make_plan(arrivals=Arrivals(100.0, "constant"), seconds=0.3), Calls(block))
    tally = sender.take()
    e2e = tally.groups["unary"].times["e2e"]
    assert e2e.largest >= 0.3
    # Due every 10 ms while blocked for 300 ms: 24 calls are left after the one that blocked, and wait longer than 50 ms.
    assert sum(count for count in (e2e.num - round(e2e.num * (e2e.share_within(0.05) or 0)),)) >= 20
    assert tally.lag.largest >= 0.2 and tally.loop_lag.largest >= 0.2


def test_an_open_loop_waits_for_nobody_and_a_closed_one_does(make_plan) -> None:
    async def dawdle(item: Item) -> None:
        await asyncio.sleep(0.1)

    calls = Calls(dawdle)
    run(make_plan(arrivals=Arrivals(200.0, "constant"), seconds=0.2), calls)
    assert calls.max_running > 5
    calls = Calls(dawdle)
    run(make_plan(concurrency=3, seconds=0.35), calls)
    assert calls.max_running == 3 and 3 <= len(calls.made) <= 12


def test_too_many_under_way_are_not_sent_but_counted(make_plan) -> None:
    over = asyncio.Event()

    async def hang(item: Item) -> None:
        await over.wait()

    async def let_go(sender: Sender) -> None:
        while sum(group.failures.get(UNSENT, 0) for group in sender._tally.groups.values()) < 16:
            await asyncio.sleep(0.01)
        over.set()

    sender = run(make_plan(arrivals=Arrivals(100.0, "constant"), seconds=0.2, max_in_flight=4), Calls(hang), let_go)
    group = sender.take().groups["unary"]
    assert (group.num, group.num_ok, group.failures) == (20, 4, {UNSENT: 16})


@pytest.mark.parametrize("loop", [{"arrivals": Arrivals(100.0, "constant")}, {"concurrency": 7}])
def test_processes_together_send_what_one_would(make_plan, loop: dict) -> None:
    plan = make_plan(seconds=5.0, max_calls=23, num_processes=3, seed=2, **loop)
    ids = []
    for part in plan.parts():
        calls = Calls()
        run(part, calls)
        ids += [item.requests[0].request_id for item, _ in calls.made]
    assert sorted(ids) == sorted(f"load-{number}-0" for number in range(23))


def test_a_trace_is_sent_as_it_says(make_plan, tmp_path) -> None:
    (tmp_path / "trace").write_text('0.01\n{"at": 0.05, "text": "a dog"}\n0.05\n9.0\n')
    calls = Calls()
    run(make_plan(trace=str(tmp_path / "trace"), seconds=0.2), calls)
    assert [due for _, due in calls.made] == [0.01, 0.05, 0.05]
    assert calls.made[1][0].requests[0].text == "a dog"


@pytest.mark.parametrize("loop", [{"arrivals": Arrivals(50.0, "constant")}, {"concurrency": 2}])
def test_stopping_ends_the_sending_and_lets_calls_end(make_plan, loop: dict) -> None:
    async def dawdle(item: Item) -> None:
        await asyncio.sleep(0.15)

    async def stop(sender: Sender) -> None:
        await asyncio.sleep(0.1)
        sender.stop()

    calls = Calls(dawdle)
    sender = run(make_plan(seconds=1000.0, **loop), calls, stop)
    assert sender.end < 5 and sender.num_in_flight == 0
    assert sender.take().groups["unary"].num == len(calls.made) > 0


def test_giving_up_cancels_what_is_under_way(make_plan) -> None:
    cancelled = []

    async def hang(item: Item) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    async def give_up(sender: Sender) -> None:
        while sender.num_in_flight < 2:
            await asyncio.sleep(0.01)
        sender.give_up()

    run(make_plan(arrivals=Arrivals(50.0, "constant"), seconds=1000.0), Calls(hang), give_up)
    assert len(cancelled) >= 2
