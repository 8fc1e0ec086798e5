"""Sends calls when they are due, or keeps callers busy, and counts their outcomes."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from dragoman.load.items import Item, Items
from dragoman.load.plan import Plan
from dragoman.load.schedule import Entry, due_times, read_trace
from dragoman.load.tally import UNSENT, Outcome, Tally

HEARTBEAT_SECONDS = 0.05
# After their own time calls end by themselves; what has not by then is given up.
GRACE_SECONDS = 5.0
# Largest delay of a sender when the time is over; calls that are due later are not sent.
OVERTIME_SECONDS = 5.0

Call = Callable[[Item, float], Coroutine[Any, Any, None]]


class Sender:
    """Sender of the calls of a plan, which is one run or one process's part of it.

    Attributes:
        end: Time of the run when sending ended, or is to end, in seconds.
        num_sent: Calls sent.
        is_cut: Whether sending ended for being too far behind.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float], items: Items) -> None:
        """Make a sender; `clock` returns seconds since the start of the run, negative before."""
        self._plan = plan
        self._clock = clock
        self._items = items
        self._tally = Tally()
        self._calls: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self.end = plan.seconds
        self.num_sent = 0
        self.is_cut = False

    @property
    def num_in_flight(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def record(self, outcome: Outcome) -> None:
        """Count how a request ended."""
        self._tally.record(outcome, self._plan.slos, self._plan.warmup_seconds, self.end)

    def take(self) -> Tally:
        """Return what was counted since the last time."""
        taken, self._tally = self._tally, Tally()
        return taken

    def stop(self) -> None:
        """Send no more; what is under way may end."""
        if not self._stopped.is_set():
            self.end = min(self.end, max(0.0, self._clock()))
            self._stopped.set()

    def give_up(self) -> None:
        """Send no more, and cancel what is under way."""
        self.stop()
        for task in self._calls:
            # Not at once: a task that is cancelled before its first step would have no outcome.
            asyncio.get_running_loop().call_soon(task.cancel)

    async def run(self, call: Call) -> None:
        """Send all, and wait until every call has ended; `call` makes one that was due at a time, and records its outcome."""
        heart = asyncio.create_task(self._beat())
        try:
            await (self._send_in_turns(call) if self._plan.concurrency else self._send_openly(call))
            if self._calls:
                await asyncio.wait(self._calls, timeout=self._plan.timeout_seconds + GRACE_SECONDS)
            self.give_up()
            await asyncio.gather(*self._calls, return_exceptions=True)
        finally:
            heart.cancel()

    async def _send_openly(self, call: Call) -> None:
        """Send when it is due, whatever has been answered."""
        mine = itertools.islice(self._schedule(), self._plan.process, self._plan.max_calls, self._plan.num_processes)
        due = 0.0
        for number, (due, entry) in zip(itertools.count(self._plan.process, self._plan.num_processes), mine, strict=False):
            item = self._items.make(number, entry)  # before the wait, not after
            if not await self._wait_until(due):
                return
            late = self._clock() - due
            if due + late > self._plan.seconds + OVERTIME_SECONDS:  # at this pace it may go on for days
                self.is_cut = True
                break
            if due >= self._plan.warmup_seconds:
                self._tally.lag.add(late)
            if len(self._calls) >= self._plan.max_in_flight:
                for _ in item.requests:
                    self.record(Outcome(item.group, bool(item.injection), due, due, UNSENT))
                continue
            self.num_sent += 1
            self._begin(call(item, due))
        if self._plan.max_calls is None:
            await self._wait_until(self._plan.seconds)
        self.stop()

    async def _send_in_turns(self, call: Call) -> None:
        """Keep the callers busy."""
        numbers = itertools.count(self._plan.process, self._plan.num_processes)
        limit = self._plan.max_calls

        async def work() -> None:
            while not self._stopped.is_set() and self._clock() < self._plan.seconds:
                number = next(numbers)
                if limit is not None and number >= limit:
                    return
                self.num_sent += 1
                await call(self._items.make(number), self._clock())

        if not await self._wait_until(0.0):
            return
        callers = [self._begin(work()) for _ in range(self._plan.concurrency)]
        ending = asyncio.create_task(self._wait_until(self._plan.seconds))
        await asyncio.wait([ending, asyncio.create_task(asyncio.wait(callers))], return_when=asyncio.FIRST_COMPLETED)
        self.stop()
        await ending

    def _schedule(self) -> Iterator[tuple[float, Entry | None]]:
        """Yield when every call of the run is due, those of other processes too."""
        plan = self._plan
        if plan.trace is not None:
            entries = itertools.takewhile(lambda entry: entry.at < plan.seconds, read_trace(Path(plan.trace)))
            yield from ((entry.at, entry) for entry in entries)
        else:
            assert plan.arrivals is not None
            yield from ((due, None) for due in due_times(plan.arrivals, plan.seconds, plan.seed))

    def _begin(self, calls: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(calls)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _wait_until(self, seconds: float) -> bool:
        """Wait for a time of the run; return False as soon as sending is to stop."""
        wait = seconds - self._clock()
        if wait > HEARTBEAT_SECONDS:  # long enough for somebody to want it stopped meanwhile
            try:
                await asyncio.wait_for(self._stopped.wait(), wait)
            except TimeoutError:
                return True
        else:
            await asyncio.sleep(max(0.0, wait))
        return not self._stopped.is_set()

    async def _beat(self) -> None:
        """Note how late the event loop is, and how much is under way."""
        while True:
            due = self._clock() + HEARTBEAT_SECONDS
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = self._clock()
            if self._plan.warmup_seconds <= due:
                self._tally.loop_lag.add(now - due)
            if now >= 0:
                now_slice = self._tally.slice_at(now)
                now_slice.in_flight = max(now_slice.in_flight, len(self._calls))
