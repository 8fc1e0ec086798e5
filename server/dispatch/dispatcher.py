"""Who is next, and which replica gets it: policy over plain objects. No I/O, no clock of its own."""

from dataclasses import dataclass, replace

from dragoman.server.engine.scheduler import Limits, Scheduler
from dragoman.server.engine.sequence import Key, Sequence

MIN_AHEAD = 2
"""Requests of one slot that a replica is given beyond its slots, at the least."""
SLOTS_PER_AHEAD = 4
"""One more for so many slots: what ends while a report travels, and what is encoded ahead meanwhile."""
SUSPICIOUS_SECONDS = 2.5
"""Silence after which a replica is given nothing while another speaks; it gives a sign of life every second."""


def num_ahead(max_slots: int) -> int:
    """Return how many slots' worth of requests a replica is given beyond its slots, so that none idles while a report travels."""
    return max(MIN_AHEAD, max_slots // SLOTS_PER_AHEAD)


@dataclass(slots=True, eq=False)
class Load:
    """What one replica has been given and has not ended.

    Attributes:
        index: Which replica.
        max_slots: Its rows.
        num_slots: Slots that what it has been given needs.
        num_tokens: Source tokens of that; answers are about as long.
        last_heard: When it last spoke.
    """

    index: int
    max_slots: int
    last_heard: float
    num_slots: int = 0
    num_tokens: int = 0

    def takes(self, num_slots: int) -> bool:
        """Return whether it is to be given a request that needs so many slots: they are free, or not much waits there."""
        if num_slots > self.max_slots:
            return False
        return self.num_slots + num_slots <= self.max_slots or self.num_slots < self.max_slots + num_ahead(self.max_slots)

    def is_suspicious(self, now: float) -> bool:
        """Return whether it has been silent for so long that it may hang."""
        return now - self.last_heard > SUSPICIOUS_SECONDS

    def wait(self, num_slots: int) -> tuple[int, int, int, int]:
        """Return what says how soon a request would be done here; less is sooner.

        Where slots have to become free for it, it begins the sooner the fewer they are. Where none have, it goes on the faster the
        fewer rows a step has beside it.
        """
        num_missing = max(self.num_slots + num_slots - self.max_slots, 0)
        return num_missing, self.num_slots, self.num_tokens, self.index


class Dispatcher(Scheduler):
    """One queue before several engines: a `Scheduler` whose slots are those of all of them.

    What is admitted is handed over to one replica, which gives it slots or keeps it for a moment until there are some. So what is
    `running` here holds slots or is about to; its caller is charged for it, and its caller's limit of slots counts it. A request
    is in one replica as a whole, however many slots it needs.

    Replicas step by themselves. A caller is charged a token for each slot that it holds each time that as many steps have been done
    as there are replicas.
    """

    def __init__(self, limits: Limits) -> None:
        """Start without replicas.

        Args:
            limits: `max_slots` is a replica's; the others are those of the model as a whole. The prefill budget is each engine's.
        """
        super().__init__(replace(limits, max_slots=0))
        self._loads: dict[int, Load] = {}
        self._places: dict[Sequence, Load] = {}
        self._num_steps = 0

    @property
    def num_replicas(self) -> int:
        """Replicas that are given requests."""
        return len(self._loads)

    @property
    def num_free_slots(self) -> int:
        """See `Scheduler`; what was given to replicas beyond their slots takes none."""
        return max(self.limits.max_slots - self.num_used_slots, 0)

    @property
    def num_places(self) -> int:
        """See `Scheduler`; what was given to replicas beyond their slots waits there, and is counted."""
        return self.limits.max_waiting_requests + self.limits.max_slots - self.num_used_slots - self.num_waiting

    @property
    def next_deadline(self) -> float:
        """When `expire` may find something; infinity for never."""
        return self._expiry.next

    def open(self, index: int, max_slots: int, now: float) -> None:
        """Give requests to a replica from now on."""
        assert index not in self._loads
        self._loads[index] = Load(index, max_slots, now)
        self._count_slots()

    def close(self, index: int) -> list[Sequence]:
        """Give a replica nothing more; return what it had, which is gone from here too."""
        load = self._loads.pop(index)
        lost = [sequence for sequence, place in self._places.items() if place is load]
        for sequence in lost:
            self.remove(sequence.key)
        self._count_slots()
        return lost

    def heard(self, index: int, now: float, num_steps: int) -> None:
        """Note that a replica has spoken, and how many steps it has done since it last did."""
        self._loads[index].last_heard = now
        self._num_steps += num_steps
        while self._num_steps >= len(self._loads):
            self._num_steps -= len(self._loads)
            self._queue.tick()

    def hand_over(self, now: float) -> list[tuple[int, Sequence]]:
        """Give the next in line to replicas, as long as one takes what is next; return them in that order."""
        handed: list[tuple[int, Sequence]] = []
        while (sequence := self._queue.first()) is not None and (load := self._choose(sequence.num_slots, now)) is not None:
            self._start(sequence)
            self._places[sequence] = load
            load.num_slots += sequence.num_slots
            load.num_tokens += sequence.num_source_tokens
            handed.append((load.index, sequence))
        return handed

    def find(self, key: Key) -> Sequence | None:
        """Return what waits or runs; None if there is no such, or not any more."""
        return self._waiting.get(key) or self._running.get(key)

    def keys(self, origin: bytes) -> list[Key]:
        """Return the keys of what a front end has asked for and has not ended."""
        return [key for key in (*self._running, *self._waiting) if key[0] == origin]

    def replica_of(self, sequence: Sequence) -> int | None:
        """Return which replica has a sequence; None if it waits here."""
        load = self._places.get(sequence)
        return None if load is None else load.index

    def shrink(self, sequence: Sequence, num_slots: int) -> None:
        """See `Scheduler`."""
        num_before = sequence.num_slots
        super().shrink(sequence, num_slots)
        self._places[sequence].num_slots -= num_before - num_slots

    def remove(self, key: Key) -> Sequence | None:
        """See `Scheduler`."""
        sequence = super().remove(key)
        if sequence is not None and (load := self._places.pop(sequence, None)) is not None:
            load.num_slots -= sequence.num_slots
            load.num_tokens -= sequence.num_source_tokens
        return sequence

    def _choose(self, num_slots: int, now: float) -> Load | None:
        """Return the replica in which a request will be done first; None if none takes it yet.

        One that may hang gets nothing, for it would be lost with it, unless all of them may: then it was us who heard nothing.
        """
        loads = self._loads.values()
        speaking = [load for load in loads if not load.is_suspicious(now)]
        able = (load for load in speaking or loads if load.takes(num_slots))
        return min(able, key=lambda load: load.wait(num_slots), default=None)

    def _count_slots(self) -> None:
        self.limits = replace(self.limits, max_slots=sum(load.max_slots for load in self._loads.values()))

    def _has(self, sequence: Sequence) -> bool:
        """Only what waits here expires here: replicas see to what they have."""
        return self._waiting.get(sequence.key) is sequence
