"""Memory for models: what all engines together may take, and who gives way to whom when it is short.

Models are loaded one after the other, in the order in which they were asked for (`Workshop.turn`). What is loaded counts with what
it was reckoned to take, or with what it has if that is more. Whoever makes way ends when no request holds it: nothing is killed.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dragoman.server.repository.memory import Room, room
from dragoman.server.repository.versions import Cause, Refused

# Once it is loaded a model is not asked to give way for so long: those who waited for it are to be answered, wherever they are.
MIN_STAY_SECONDS = 1.0
# The same of a model that requests hold; where all are in use they take turns.
MIN_BUSY_STAY_SECONDS = 5.0
# So long somebody who leaves is waited for before another is asked, too: a request may hold it for longer.
LEAVE_SECONDS = 2.0
# Between two looks at whether somebody has become free.
LOOK_SECONDS = 0.1
MIB = 2**20


class NotWanted(Exception):
    """Nobody waits any more for what was to be loaded."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A loaded model that may be asked to give way.

    Attributes:
        num_held: Requests that hold it.
        warm_until: How recently, and how often lately, one did; see `server.repository.use`.
        awake_since: When it was loaded.
        is_busy: Whether it cannot be asked now: it is being changed, or waited for.
    """

    num_held: int
    warm_until: float
    awake_since: float
    is_busy: bool = False

    @property
    def may_leave_at(self) -> float:
        """When it can be asked, unless it is busy."""
        return self.awake_since + (MIN_BUSY_STAY_SECONDS if self.num_held else MIN_STAY_SECONDS)


class Tenant(Protocol):
    """A model, as far as memory goes."""

    name: str

    @property
    def is_leaving(self) -> bool:
        """Whether memory of it is about to become free."""
        ...

    def memory_bytes(self) -> int:
        """Return what its engines take, or may come to take."""
        ...

    def stay(self) -> Stay | None:
        """Return how it is used; None if it is not loaded, or is never unloaded."""
        ...

    def give_way(self) -> None:
        """Have it fall asleep as soon as it can."""
        ...


class Placement:
    """See above.

    Attributes:
        keep_seconds: How long models stay loaded without a request that say nothing of it themselves; infinite for always.
        bound_bytes: What all engines together may take; 0 for what the container or the machine has.
        wait_seconds: How long others' leaving is waited for.
    """

    def __init__(
        self,
        tenants: Callable[[], Iterable[Tenant]] = tuple,
        *,
        keep_seconds: float = math.inf,
        bound_bytes: int = 0,
        wait_seconds: float = 30.0,
        measure_room: Callable[[], Room] = room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the memory.

        Args:
            tenants: Returns all models.
            keep_seconds: See the attributes, as the next two.
            bound_bytes: See the attributes.
            wait_seconds: See the attributes.
            measure_room: Returns what the container or the machine has.
            clock: In seconds.
        """
        self.keep_seconds, self.bound_bytes, self.wait_seconds = keep_seconds, bound_bytes, wait_seconds
        self._tenants, self._measure_room, self._clock = tenants, measure_room, clock
        self._news = asyncio.Event()
        self._asked_at = -math.inf

    @property
    def taken_bytes(self) -> int:
        """What all engines together take, or may come to take."""
        return sum(tenant.memory_bytes() for tenant in self._tenants())

    def note(self) -> None:
        """Take note that something may have become free, or be wanted no more."""
        self._news.set()

    def check(self, needed_bytes: int, *, is_start: bool = False) -> None:
        """Do nothing if there is memory for engines.

        Args:
            needed_bytes: That they may take.
            is_start: Whether many are loaded at once: then only the bound tells, for what is free does not yet.

        Raises:
            Refused: If there is not.
        """
        rooms = [] if is_start else [self._measure_room()]
        if self.bound_bytes:
            free = max(0, self.bound_bytes - self.taken_bytes)
            rooms.append(Room(free, f"of {self.bound_bytes / MIB:.0f} MiB (models_memory_gib) is left"))
        for there in rooms:
            if needed_bytes > there.num_bytes:
                raise Refused(Cause.MEMORY, f"it may take {_mib(needed_bytes)}, and {_mib(there.num_bytes)} {there.limit}")

    async def make_room(self, name: str, needed_bytes: int, is_wanted: Callable[[], bool]) -> None:
        """Have models give way, the least used of late first, until there is memory; the caller has the turn to load.

        Args:
            name: Of the model that is to be loaded, which does not give way to itself.
            needed_bytes: That it may take.
            is_wanted: Returns whether it is still to be.

        Raises:
            Refused: If there is not, and nobody gives way in time.
            NotWanted: If it is not to be loaded any more.
        """
        self._asked_at = began = self._clock()
        until = began + self.wait_seconds
        while True:
            if not is_wanted():
                raise NotWanted
            try:
                self.check(needed_bytes)
            except Refused as refused:
                if self.bound_bytes and needed_bytes > self.bound_bytes:  # however many give way
                    raise
                await self._one_gives_way(name, refused, until)
            else:
                return

    async def _one_gives_way(self, name: str, refused: Refused, until: float) -> None:
        """Ask the next one, unless one is leaving already, and wait for news. Those in use come last."""
        now = self._clock()
        others = [tenant for tenant in self._tenants() if tenant.name != name]
        is_leaving = any(tenant.is_leaving for tenant in others)
        stays = [(stay, tenant) for tenant in others if (stay := tenant.stay()) is not None]
        if not (is_leaving or stays):
            raise refused
        if now >= until:
            names = ", ".join(sorted(tenant.name for _, tenant in stays))
            raise Refused(Cause.MEMORY, f"{refused.reason}; in use: {names}" if names else refused.reason)
        if not is_leaving or now >= self._asked_at + LEAVE_SECONDS:
            able = [(bool(stay.num_held), stay.warm_until, stay, tenant) for stay, tenant in stays if not stay.is_busy]
            for _, _, stay, tenant in sorted(able, key=lambda one: one[:2])[:1]:
                if stay.may_leave_at <= now:  # who has just come is waited for, not passed over
                    self._asked_at = now
                    tenant.give_way()
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._news.wait()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"
