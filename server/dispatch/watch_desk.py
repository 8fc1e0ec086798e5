"""The part of a desk that is looked at: asks replicas what they do, and tells everybody who wants to know the same.

However many front ends ask, and however often, a replica is asked at most once in `SHORTEST_SECONDS`, and not again before it has
answered. Who asks is answered when all have that were asked, or after `PATIENCE_SECONDS`: one that hangs holds up nobody's view.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dragoman.server.dispatch.front_ends import FrontEnds
from dragoman.server.engine.messages import Command
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, Snapshot, Watch, of_replica, summed_up

SHORTEST_SECONDS = 0.2
PATIENCE_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine: how it is asked, whether it has yet to answer, and what it said last."""

    send: Callable[[Command], None]
    is_asked: bool = False
    engines: tuple[EngineSnapshot, ...] = ()
    callers: tuple[CallerUse, ...] = ()


class WatchDesk:
    """See above; like the rest of a desk it does everything on one event loop."""

    def __init__(self, front_ends: FrontEnds, waiting: Callable[[], Iterable[CallerUse]], clock: Callable[[], float]) -> None:
        """Start without replicas and without anybody who looks.

        Args:
            front_ends: Whom answers are told.
            waiting: Tells who has how much in the desk's own queue.
            clock: In seconds.
        """
        self._front_ends, self._waiting, self._clock = front_ends, waiting, clock
        self._replicas: dict[int, _Replica] = {}
        self._watchers: set[bytes] = set()
        self._awaited: set[int] = set()
        self._asked_at = -math.inf

    @property
    def next_answer(self) -> float:
        """When those who ask are answered at the latest; infinity if nobody does."""
        return self._asked_at + PATIENCE_SECONDS if self._watchers else math.inf

    def open(self, index: int, send: Callable[[Command], None]) -> None:
        """Ask a replica too, from the next time on."""
        self._replicas[index] = _Replica(send)

    def close(self, index: int) -> None:
        """Tell of a replica no more."""
        self._replicas.pop(index, None)
        self._heard(index)

    def ask(self, origin: bytes) -> None:
        """Answer a front end: from what replicas say now or, if they have just been asked, from what they have said."""
        self._watchers.add(origin)
        now = self._clock()
        if now >= self._asked_at + SHORTEST_SECONDS:
            self._asked_at = now
            self._awaited = {index for index, replica in self._replicas.items() if not replica.is_asked}
            for index in tuple(self._awaited):
                replica = self._replicas[index]
                replica.is_asked = True
                replica.send(Watch())
        if not self._awaited:
            self._answer()

    def hear(self, index: int, snapshot: Snapshot) -> None:
        """Take in what a replica does; nothing of one that is not open."""
        if (replica := self._replicas.get(index)) is None:
            return
        replica.is_asked = False
        replica.engines = tuple(of_replica(engine, index) for engine in snapshot.engines)
        replica.callers = tuple(snapshot.callers)
        self._heard(index)

    def answer_late(self, now: float) -> None:
        """Answer those who have waited long enough, with what there is."""
        if now >= self.next_answer:
            self._awaited.clear()
            self._answer()

    def _heard(self, index: int) -> None:
        if index in self._awaited:
            self._awaited.discard(index)
            if not self._awaited:
                self._answer()

    def _answer(self) -> None:
        watchers, self._watchers = self._watchers, set()
        if not watchers:
            return
        replicas = [replica for _, replica in sorted(self._replicas.items())]
        callers = [use for replica in replicas for use in replica.callers]
        snapshot = Snapshot([engine for replica in replicas for engine in replica.engines], summed_up((*callers, *self._waiting())))
        for origin in watchers:
            self._front_ends.tell_one(origin, snapshot)
