"""Admission of lines of batches to the slots that other requests leave."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dragoman.server.dispatch.queue import STEP_UNITS
from dragoman.server.service.service import Service

# Interval at which other requests are looked at; time without any until a line is admitted, and in which twice as many are.
TICK_SECONDS, CALM_SECONDS, DOUBLING_SECONDS = 0.005, 0.02, 2.0
# Lines admitted beyond the slots, as a part of them; part of a step's time that lines may add beside others; and time without
# a line after which one is admitted in any case.
LOOKAHEAD, STEP_PART, STARVED_SECONDS = 1 / 4, 1 / 20, 1.0
# Times that a line gives way.
MAX_PREEMPTED = 5


class Preempted(Exception):
    """A line had to give way to other requests."""


class Gate:
    """Admission of lines to the slots that other requests of this server leave.

    Beside others it admits so few that a step takes little longer, and without others twice as many again and again; these give way
    as soon as others come, but for lines that have done so often: one that takes long has to end.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[asyncio.Timeout, int] = {}  # slots of the lines, the oldest first
        self._kept: set[asyncio.Timeout] = set()  # those of them that do not give way
        # For how many slots, and whether the line is to be kept.
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._needed = asyncio.Event()
        self._num_allowed = self._num_held = 0
        self._keeps_next = False
        self._busy_at, self._begun_at = 0.0, 0.0
        service.calls.on_begin = self._notice

    @asynccontextmanager
    async def slots(self, num_slots: int, num_preempted: int) -> AsyncIterator[None]:
        """Hold slots within the `with`, once they are free; raise `Preempted` if others need them, which has happened before."""
        admitted = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if num_preempted else self._waiting.append)((num_slots, admitted))
        self._needed.set()
        self._admit()
        try:
            is_kept = await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self._release(num_slots)
            raise
        scope = asyncio.timeout(None)
        self._running[scope] = num_slots
        if is_kept or num_preempted >= MAX_PREEMPTED:
            self._kept.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if scope.expired():
                raise Preempted from None
            raise
        finally:
            del self._running[scope]
            self._kept.discard(scope)
            self._release(num_slots)

    async def watch(self) -> None:
        """Look at the other requests, on and on while there are lines."""
        while True:
            if not (self._num_held or self._waiting):
                self._needed.clear()
                await self._needed.wait()
                self._busy_at = time.monotonic()  # nobody has looked
            self._update(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)

    def _notice(self) -> None:
        """Give way to a call that has just begun."""
        self._busy_at = time.monotonic()
        if self._running:
            self._give_way(self._num_others() + 1)

    def _num_others(self) -> int:
        models = self._service.models.versions()
        return sum(model.engine.statistics().num_urgent for model in models if model.engine.is_ready and not model.is_asleep)

    def _give_way(self, num_others: int) -> int:
        """Preempt the latest lines beyond those that may run beside other requests; return the number of slots of these."""
        allowed = int((STEP_UNITS + num_others) * STEP_PART)
        num_held = self._num_held
        for scope, num_slots in reversed(self._running.items()):
            if num_held > allowed and scope not in self._kept:
                num_held -= num_slots
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
        return allowed

    def _update(self, now: float) -> None:
        if num_others := self._num_others():
            self._busy_at = now
            allowed = self._give_way(num_others)
        else:
            most = max((model.max_slots for model in self._service.models.all()), default=1)
            doublings = (now - self._busy_at - CALM_SECONDS) / DOUBLING_SECONDS
            allowed = 0 if doublings < 0 else int(min(2.0 ** min(doublings, 32), most * (1 + LOOKAHEAD)))
        is_starved = not (allowed or self._num_held) and now > self._begun_at + STARVED_SECONDS
        self._num_allowed, self._keeps_next = max(allowed, is_starved), is_starved or num_others > 0
        self._admit()

    def _admit(self) -> None:
        """Admit the lines for which there is room, in order."""
        while self._waiting:
            num_slots, admitted = self._waiting[0]
            if not admitted.cancelled():
                if not self._num_allowed or (self._num_held and self._num_held + num_slots > self._num_allowed):
                    return
                self._num_held += num_slots
                self._begun_at = time.monotonic()
                admitted.set_result(self._keeps_next)
            self._waiting.popleft()

    def _release(self, num_slots: int) -> None:
        self._num_held -= num_slots
        self._admit()
