"""Memory for models: the bound on all engines together, and eviction of idle models when memory is short.

Models are loaded one after the other, in the order in which they were asked for (`VersionLoader.turn`). A loaded model counts with
its estimate, or with its resident memory if that is more. An evicted model ends when no request holds it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from dragoman.server.repository.memory import Room, room
from dragoman.server.repository.versions import Cause, Refused

# A loaded model is not evicted for so long: requests that waited for it are to be answered, in all frontends.
MIN_STAY_SECONDS = 1.0
# The same of a model that requests hold; where all are in use they take turns.
MIN_BUSY_STAY_SECONDS = 5.0
# So long an evicted model may take to end before another is evicted, too: a request may hold it for longer.
LEAVE_SECONDS = 2.0
# Between two looks at whether memory has become free.
LOOK_SECONDS = 0.1
MIB = 2**20


class NotWanted(Exception):
    """No request waits any more for the model that was to be loaded."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model, as far as eviction goes.

    Attributes:
        name: Of the model.
        memory_bytes: Memory that its engines have, or may come to have.
        is_leaving: Whether memory of it is about to become free.
        may_leave: Whether it is loaded, and may be unloaded at all.
        is_busy: Whether it cannot be evicted now: it is being changed, or waited for.
        num_held: Requests that hold it.
        warm_until: How recently, and how often lately, requests have; see `together`.
        awake_since: Time of its load.
    """

    name: str
    memory_bytes: int = 0
    is_leaving: bool = False
    may_leave: bool = False
    is_busy: bool = False
    num_held: int = 0
    warm_until: float = 0.0
    awake_since: float = 0.0

    @property
    def may_leave_at(self) -> float:
        """Earliest time of its eviction."""
        return self.awake_since + (MIN_BUSY_STAY_SECONDS if self.num_held else MIN_STAY_SECONDS)


class Placement:
    """Memory that models share.

    Attributes:
        keep_seconds: Idle time after which models are unloaded whose files say nothing of it; infinite for never.
        bound_bytes: Bound on all engines together; 0 for the memory of the container or the machine.
        wait_seconds: Bound on the time that evictions may take.
    """

    def __init__(
        self,
        candidates: Callable[[], Iterable[Candidate]] = tuple,
        evict: Callable[[str], None] = lambda name: None,
        *,
        keep_seconds: float = math.inf,
        bound_bytes: int = 0,
        wait_seconds: float = 30.0,
        measure_room: Callable[[], Room] = room,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the memory; see the attributes.

        Args:
            candidates: Returns all models.
            evict: Has a model of a name be unloaded as soon as it can be.
            keep_seconds: See the attributes.
            bound_bytes: See the attributes.
            wait_seconds: See the attributes.
            measure_room: Returns the memory of the container or the machine.
            clock: In seconds.
        """
        self.keep_seconds, self.bound_bytes, self.wait_seconds = keep_seconds, bound_bytes, wait_seconds
        self._candidates, self._evict, self._measure_room, self._clock = candidates, evict, measure_room, clock
        self._news = asyncio.Event()
        self._evicted_at = -math.inf

    def note(self) -> None:
        """Note that memory may have become free, or may not be wanted any more."""
        self._news.set()

    def check(self, needed_bytes: int, *, is_start: bool = False) -> None:
        """Raise `Refused` unless there is memory for engines.

        Args:
            needed_bytes: That they may take.
            is_start: Whether many are loaded at once: then only the bound counts, since free memory says nothing yet.
        """
        rooms = [] if is_start else [self._measure_room()]
        if self.bound_bytes:
            free = max(0, self.bound_bytes - sum(one.memory_bytes for one in self._candidates()))
            rooms.append(Room(free, f"of {self.bound_bytes / MIB:.0f} MiB (models_memory_gib) is left"))
        for there in rooms:
            if needed_bytes > there.num_bytes:
                raise Refused(Cause.MEMORY, f"it may take {_mib(needed_bytes)}, and {_mib(there.num_bytes)} {there.limit}")

    async def make_room(self, name: str, needed_bytes: int, is_wanted: Callable[[], bool]) -> None:
        """Evict models, the least used of late first, until there is memory; the caller holds the turn to load.

        Args:
            name: Of the model that is to be loaded.
            needed_bytes: That it may take.
            is_wanted: Returns whether it is still to be loaded.

        Raises:
            Refused: If there is not enough in time.
            NotWanted: If it is not to be loaded any more.
        """
        self._evicted_at = began = self._clock()
        while True:
            if not is_wanted():
                raise NotWanted
            try:
                self.check(needed_bytes)
                return
            except Refused as refused:
                if self.bound_bytes and needed_bytes > self.bound_bytes:  # no eviction is enough
                    raise
                self._evict_next(name, refused, began + self.wait_seconds)
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()

    def _evict_next(self, name: str, refused: Refused, until: float) -> None:
        """Evict the next model unless one is leaving already; those in use come last."""
        now = self._clock()
        others = [one for one in self._candidates() if one.name != name]
        is_leaving, able = any(one.is_leaving for one in others), [one for one in others if one.may_leave]
        if not (is_leaving or able):
            raise refused
        if now >= until:
            names = ", ".join(sorted(one.name for one in able))
            raise Refused(Cause.MEMORY, f"{refused.reason}; in use: {names}" if names else refused.reason)
        if is_leaving and now < self._evicted_at + LEAVE_SECONDS:
            return
        free = [one for one in able if not one.is_busy]
        first = min(free, key=lambda one: (bool(one.num_held), one.warm_until), default=None)
        if first is not None and first.may_leave_at <= now:  # one that was just loaded is waited for, not passed over
            self._evicted_at = now
            self._evict(first.name)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"
