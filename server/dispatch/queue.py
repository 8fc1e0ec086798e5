"""The queue of one kind of request: those that wait, those that engines have been given, and the engine that gets the next one.

Policy over plain objects: no I/O, no clock of its own. Generation and score requests have a queue each, under the same rules.

Callers are served by weighted fair queuing (`fair_queue.py`), charged the tokens of a request when it is given to an engine, and
then a token for each slot and step. A caller's own requests are in order of arrival, but one step of priority counts as
`SECONDS_PER_PRIORITY` of waiting. The next request is never passed over because it needs more slots than a later one, so wide
requests do not starve; only callers that have reached their own `max_slots` are passed over. The limits are shared: once they are
reached, a request of a caller with less in the queue than another, by weight, evicts the last request of the caller with most
(`eviction.py`).
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dragoman.server.dispatch import eviction
from dragoman.server.dispatch.fair_queue import FairQueue
from dragoman.server.dispatch.forecast import Forecast
from dragoman.server.engine.messages import Request, ScoreRequest, Share
from dragoman.server.engine.settings import QueueLimits

SECONDS_PER_PRIORITY = 1.0
SUSPICIOUS_SECONDS = 2.5
"""Silence after which an engine is given nothing while another reports; it sends a sign of life every second."""
WAITING_PER_LOOKAHEAD = 4
"""All engines together are given one slot's worth beyond their slots for so many places of the queue."""
MIN_STALE = 64
"""Deadlines of requests that no longer wait are dropped once they are the larger part, and more than this."""


class QueueIsFull(Exception):
    """One more request in the queue would exceed a limit.

    Attributes:
        limit: Its name in the caller's `Share`; empty for the queue's own.
    """

    def __init__(self, limit: str = "") -> None:
        super().__init__(limit)
        self.limit = limit


@dataclass(slots=True, eq=False)
class Load:
    """Work that one engine has been given and has not ended, in slots or, of score requests, in tokens.

    Attributes:
        index: Number of the engine.
        capacity: Units that it works on at once.
        lookahead: Units that it is given beyond these, so that it does not idle while a report travels, and can prefill ahead.
        last_heard: Time of its last report.
        num_units: Units of what it has been given.
        num_tokens: Tokens of that; answers are about as long.
    """

    index: int
    capacity: int
    lookahead: int
    last_heard: float
    num_units: int = 0
    num_tokens: int = 0

    def takes(self, num_units: int, *, has_lookahead: bool) -> bool:
        """Return whether the engine is to be given a request of this size now, with or without its lookahead."""
        max_units = self.capacity + self.lookahead if has_lookahead else self.capacity
        return self.num_units + num_units <= self.capacity or self.num_units < max_units

    def order(self, num_units: int) -> tuple[int, int, int, int]:
        """Return a key by which the engine that ends a request of this size soonest is the least.

        Where units have to become free for it, it begins the sooner the fewer they are. Where none have, it is the faster the fewer
        rows a step has beside it.
        """
        return max(self.num_units + num_units - self.capacity, 0), self.num_units, self.num_tokens, self.index


@dataclass(slots=True, eq=False)
class Entry:
    """A request from when it is submitted to when it ends.

    Attributes:
        request: As its caller sent it.
        deliver: Called with its tokens, if it is streamed, and with its end.
        num_tokens: Tokens that count against limits and that its caller is charged.
        num_slots: Slots that it holds while it runs; 0 for a score request.
        load: Of the engine that has it; None while it waits.
        is_waiting: Whether it waits.
    """

    request: Request | ScoreRequest
    deliver: Callable[[Any], None]
    num_tokens: int
    num_slots: int
    load: Load | None = None
    is_waiting: bool = False

    @property
    def num_units(self) -> int:
        """Size of the request in an engine's load."""
        return self.num_slots or self.num_tokens


class RequestQueue:
    """The one queue of a model for one kind of request, before all of its engines.

    Attributes:
        forecast: Durations, over all engines.
        num_used: Units that engines have been given.
        capacity: Units that all engines work on at once.
    """

    def __init__(self, limits: QueueLimits, *, has_slots: bool) -> None:
        """Start without engines.

        Args:
            limits: Of the model as a whole.
            has_slots: Whether requests hold slots; the capacity then counts as places of the queue.
        """
        self.limits, self.forecast = limits, Forecast()
        self.num_used = self.capacity = 0
        self._has_slots = has_slots
        self._fair: FairQueue[Entry] = FairQueue()
        self._loads: dict[int, Load] = {}
        self._given: dict[Entry, None] = {}
        self._handed: list[Entry] = []
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._num_deadlines = self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has been given."""
        return len(self._fair)

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens."""
        return self._fair.num_tokens

    @property
    def num_places(self) -> int:
        """Requests that the queue still takes. Requests given to engines beyond their slots count as waiting."""
        return self.limits.max_waiting_requests - len(self._fair) + (self.capacity - self.num_used if self._has_slots else 0)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._given) or len(self._fair) > 0

    @property
    def next_deadline(self) -> float:
        """Earliest time at which `expire` may find a request; infinity for never."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def open(self, load: Load) -> None:
        """Give requests to an engine from now on."""
        assert load.index not in self._loads
        self._loads[load.index] = load
        self.capacity += load.capacity

    def close(self, index: int) -> list[Entry]:
        """Give an engine nothing more; remove and return the requests it had."""
        load = self._loads.pop(index)
        self.capacity -= load.capacity
        lost = [entry for entry in self._given if entry.load is load]
        for entry in lost:
            self.remove(entry)
        return lost

    def heard(self, index: int, now: float, num_steps: int) -> None:
        """Note a report of an engine, and the steps that it has done since the last one.

        Engines step by themselves: callers are charged a token for each slot whenever as many steps have been done as there are
        engines.
        """
        self._loads[index].last_heard = now
        num_ticks, self._num_steps = divmod(self._num_steps + num_steps, len(self._loads))
        self._fair.tick(num_ticks)

    def submit(self, entry: Entry, now: float) -> list[Entry]:
        """Queue a request, or note it for `hand_over` at once if none waits and an engine takes it.

        Returns:
            The requests that it has evicted from a full queue.

        Raises:
            QueueIsFull: If it would exceed a limit.
        """
        request = entry.request
        share = request.share
        if share.max_slots and entry.num_slots > share.max_slots:
            raise QueueIsFull("max_slots")
        load = None if len(self._fair) or self.num_places <= 0 else self._choose(entry.num_units, now)
        if load is not None and self._fair.charge(share, entry.num_tokens, entry.num_slots):
            self._give(entry, load)
            return []
        evicted = self._make_place(share, entry.num_tokens)
        for other in evicted:
            self.remove(other)
        entry.is_waiting = True
        at, slots = queue_position(request), entry.num_slots
        self._fair.push(entry, share, at, priority=request.priority, size=entry.num_tokens, num_slots=slots)
        if request.deadline is not None:
            self._add_deadline(request.deadline, entry)
        return evicted

    def hand_over(self, now: float) -> list[Entry]:
        """Give the next requests to engines, as long as one takes the next; return those given since the last call, in order."""
        while (entry := self._fair.first()) is not None and (load := self._choose(entry.num_units, now)) is not None:
            self._fair.take(entry, entry.request.share.caller)
            self._give(entry, load)
        handed, self._handed = self._handed, []
        return handed

    def shrink(self, entry: Entry, num_slots: int) -> None:
        """Note that a running request will not need all of its slots again."""
        assert entry.load is not None and num_slots <= entry.num_slots
        self._give_back(entry, entry.load, entry.num_slots - num_slots)
        entry.num_slots = num_slots

    def remove(self, entry: Entry) -> None:
        """Forget a request, whether it waits or an engine has it."""
        if entry.is_waiting:
            entry.is_waiting = False
            self._fair.remove(entry, entry.request.share.caller)
        elif (load := entry.load) is not None:
            entry.load = None
            del self._given[entry]
            load.num_tokens -= entry.num_tokens
            self._give_back(entry, load, entry.num_units)

    def expire(self, now: float) -> list[Entry]:
        """Remove and return the waiting requests whose deadline has passed; engines see to what they have."""
        expired: list[Entry] = []
        while self.next_deadline <= now:
            entry = heapq.heappop(self._deadlines)[-1]
            if entry.is_waiting:
                self.remove(entry)
                expired.append(entry)
        return expired

    def remove_all(self) -> list[Entry]:
        """Remove and return everything."""
        entries = [*self._given, *self._fair]
        for entry in entries:
            self.remove(entry)
        return entries

    def given(self) -> Iterator[Entry]:
        """Yield the requests that engines have."""
        yield from self._given

    def waiting_by_caller(self) -> Iterator[tuple[str, int]]:
        """Yield the callers with waiting requests, and the number of these."""
        for own in self._fair.waiting:
            yield own.share.caller, len(own)

    def check_place(self, share: Share) -> None:
        """Raise `QueueIsFull` if the queue has no place for a request of the least size."""
        if self.num_places <= 0 or share.max_waiting:
            self._make_place(share, 0)

    def needed_seconds(self, entry: Entry) -> float:
        """Return how long a new request will take at the least, if things go on as they have; 0 while too little is known.

        It has to wait until as many slots become free as it and those before it need: what its caller waits for already, and the
        part of the others in the meantime. Of S slots one becomes free every S-th part of the mean time that requests hold
        theirs. The same goes for the caller's own limit of slots, if it has one. Then it takes its own prefill and the fewest
        steps that it can.
        """
        request, forecast = entry.request, self.forecast
        if isinstance(request, ScoreRequest) or not forecast.is_settled:
            return 0.0
        share, at = request.share, queue_position(request)
        num_ahead = eviction.num_slots_ahead(self._fair, share, at, request.priority)
        seconds = forecast.seconds_until_free(self.num_used + num_ahead + entry.num_slots, self.capacity)
        if share.max_slots and (own := self._fair.of(share.caller)) is not None:
            num_needed = own.num_slots + eviction.num_own_ahead(own, at, request.priority)[0] + entry.num_slots
            seconds = max(seconds, forecast.seconds_until_free(num_needed, share.max_slots))
        return seconds + forecast.seconds_of(request)

    def queue_seconds(self) -> float:
        """Return how long the queue is: when its last could go, had a request of one slot come last; 0 while that is unknown.

        Waiting requests that need nothing but a slot that their caller's own limit does not let them have are not counted.
        """
        num_needed = self.num_used + self._fair.num_slots - self._fair.num_held_back + 1
        return self.forecast.seconds_until_free(num_needed, self.capacity) if self.capacity else 0.0

    def seconds_until_place(self, share: Share | None = None) -> float:
        """Guess when the queue has a place again for a caller; None for one that is alone in it."""
        if share is None:
            return self.forecast.seconds_until_place(self.num_waiting)
        own = self._fair.of(share.caller)
        return self.forecast.seconds_until_place(0 if own is None else len(own), eviction.part_of(self._fair, share))

    def without_claim(self) -> dict[str, float] | None:
        """Return the waiting callers that could evict nothing from a full queue, and when each may have a place.

        None where that takes too long to find out, or while the queue is not half full.
        """
        if len(self._fair.waiting) > 1 and self.num_places > self.limits.max_waiting_requests // 2:
            return None
        shares = eviction.without_claim(self._fair)
        return None if shares is None else {share.caller: self.seconds_until_place(share) for share in shares}

    def at_their_limit(self) -> dict[str, float]:
        """Return the callers with as many waiting requests as their own limit allows, as far as that is easily found out."""
        return {share.caller: self.seconds_until_place(share) for share in eviction.at_their_limit(self._fair, self._num_free)}

    @property
    def _num_free(self) -> int:
        return max(self.capacity - self.num_used, 0) if self._has_slots else 0

    def _choose(self, num_units: int, now: float) -> Load | None:
        """Return the engine that will end a request first; None if none takes it yet.

        An engine that may hang gets nothing, for it would be lost with it, unless all may: then this process has been held up.
        """
        loads = self._loads.values()
        # Requests given ahead take places of the queue and cannot be evicted: some are left to other callers.
        num_ahead = self.num_used - self.capacity
        has_lookahead = not self._has_slots or num_ahead < self.limits.max_waiting_requests // WAITING_PER_LOOKAHEAD
        if len(loads) > 1:
            loads_heard = [load for load in loads if now - load.last_heard <= SUSPICIOUS_SECONDS]
            able = [load for load in loads_heard or loads if load.takes(num_units, has_lookahead=has_lookahead)]
            return min(able, key=lambda load: load.order(num_units), default=None)
        return next((load for load in loads if load.takes(num_units, has_lookahead=has_lookahead)), None)

    def _give(self, entry: Entry, load: Load) -> None:
        entry.is_waiting, entry.load = False, load
        self._given[entry] = None
        self._handed.append(entry)
        load.num_tokens += entry.num_tokens
        load.num_units += entry.num_units
        self.num_used += entry.num_units

    def _give_back(self, entry: Entry, load: Load, num_units: int) -> None:
        load.num_units -= num_units
        self.num_used -= num_units
        if entry.num_slots:
            self._fair.give_back(entry.request.share.caller, num_units)

    def _make_place(self, share: Share, num_tokens: int) -> list[Entry]:
        """Return the entries to evict for a new one to have a place."""
        if share.max_waiting and eviction.is_at_limit(self._fair, share, self._num_free):
            raise QueueIsFull("max_waiting")
        tokens_over = self.num_waiting_tokens + num_tokens - self.limits.max_waiting_tokens if num_tokens and len(self._fair) else 0
        num_over = int(self.num_places <= 0)  # one for one, also where a wide request has taken more slots than its place was for
        if not num_over and tokens_over <= 0:
            return []
        evicted = eviction.evicted(self._fair, share, num_tokens, num_over, tokens_over)
        if not evicted:
            raise QueueIsFull
        return evicted

    def _add_deadline(self, deadline: float, entry: Entry) -> None:
        if len(self._deadlines) > 2 * len(self._fair) + MIN_STALE:
            self._deadlines = [one for one in self._deadlines if one[-1].is_waiting]
            heapq.heapify(self._deadlines)
        self._num_deadlines += 1  # of equal deadlines the one added first comes first
        heapq.heappush(self._deadlines, (deadline, self._num_deadlines, entry))


def queue_position(request: Request | ScoreRequest) -> float:
    """Return the time by which a caller's requests are ordered: of arrival, earlier as the priority is higher."""
    return request.arrival - request.priority * SECONDS_PER_PRIORITY
