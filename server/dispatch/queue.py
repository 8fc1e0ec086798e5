"""Request queue of a model for one kind of request: waiting and assigned requests, and the choice of engine.

Pure policy: no I/O, no clock. Generation and score requests have a queue each, with the same rules.

Callers are served by weighted fair queuing (`fair_queue.py`): charged a request's tokens when it is assigned, then a token for each
slot and step. Within a caller requests are in order of arrival, one priority level counting as `SECONDS_PER_PRIORITY`. A wide
request is not passed over for a narrower one, so it does not starve; only callers at their `max_slots` are. At the queue's limits,
a request of a caller with less in the queue, by weight, evicts the last request of the caller with most.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from dragoman.server.dispatch.fair_queue import PARTS_PER_TOKEN, TOKENS_PER_PRIORITY, CallerQueue, Entry, FairQueue
from dragoman.server.dispatch.forecast import Forecast
from dragoman.server.engine.messages import LOWEST_PRIORITY, Request, ScoreRequest, Share, Step
from dragoman.server.engine.settings import QueueLimits

SECONDS_PER_PRIORITY = 1.0
# An engine silent for longer gets no requests while another reports; heartbeats come every second.
SUSPICIOUS_SECONDS = 2.5
# All engines together have a lookahead of one slot for so many places of the queue.
WAITING_PER_LOOKAHEAD = 4
# A step without units would take as long as this many units add to one.
STEP_UNITS = 8
# Weight of the latest step in an engine's share of a core, the time after which the share is unknown, and the parts it is told in.
LATEST_STEP, FORGET_SECONDS, SHARE_STEPS = 0.1, 2.0, 8
# Deadlines of requests that no longer wait are dropped once they are the majority, and more than this.
MIN_STALE = 64
# Only `_evicted` iterates over all waiting callers; other estimates look at so many at most.
MAX_CALLERS = 64


class QueueIsFull(Exception):
    """A limit would be exceeded: `limit`, a field of the caller's `Share`, or the queue's own if empty."""

    def __init__(self, limit: str = "") -> None:
        super().__init__(limit)
        self.limit = limit


@dataclass(slots=True, eq=False)
class Load:
    """Requests assigned to one engine, in units: slots, or tokens for score requests."""

    index: int
    capacity: int  # units that the engine runs at once
    lookahead: int  # units assigned beyond that, so that it does not idle while a report travels, and can prefetch
    last_heard: float  # time of its last report
    num_units: int = 0
    num_tokens: int = 0  # tokens assigned, an estimate of the answers' lengths
    core_share: float = 1.0  # part of its steps in which the engine had a core, of late
    last_stepped: float = 0.0

    def note_steps(self, steps: Iterable[Step], now: float) -> None:
        """Learn which part of a core other processes leave to the engine."""
        for step in steps:
            if step.seconds > 0 < step.cpu_seconds:
                self.core_share += LATEST_STEP * (min(step.cpu_seconds / step.seconds, 1.0) - self.core_share)
                self.last_stepped = now

    def takes(self, num_units: int, *, has_lookahead: bool) -> bool:
        """Return whether the engine may be assigned a request of this size now, with or without its lookahead."""
        max_units = self.capacity + self.lookahead if has_lookahead else self.capacity
        return self.num_units + num_units <= self.capacity or self.num_units < max_units

    def order(self, num_units: int, now: float) -> tuple[int, float, int, int]:
        """Return a sort key, lowest for the engine that is expected to end a request of this size first.

        First come the units still to be freed, then the time of a step, which grows with the units in use and where other processes
        take the engine's core: so few requests all go to the engines that are left alone.
        """
        core_share = self.core_share if now < self.last_stepped + FORGET_SECONDS else 1.0
        core_share = max(round(core_share * SHARE_STEPS), 1) / SHARE_STEPS
        step_time = (STEP_UNITS + self.num_units) / core_share
        return max(self.num_units + num_units - self.capacity, 0), step_time, self.num_tokens, self.index


class RequestQueue:
    """Queue of a model for one kind of request; `num_used` of `capacity` units are assigned to its engines.

    `num_urgent` counts the waiting and assigned requests above the lowest priority.
    """

    def __init__(self, limits: QueueLimits, *, has_slots: bool) -> None:
        """Start without engines; with `has_slots`, free capacity counts as places of the queue."""
        self.limits, self.forecast = limits, Forecast()
        self.num_used = self.capacity = self.num_urgent = 0
        self._has_slots = has_slots
        self._fair = FairQueue()
        self._loads: dict[int, Load] = {}
        self._running: dict[Entry, None] = {}
        self._assigned: list[Entry] = []
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._num_deadlines = self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests not assigned to an engine."""
        return len(self._fair)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting requests."""
        return self._fair.num_tokens

    @property
    def num_places(self) -> int:
        """Requests that the queue still accepts; requests assigned beyond the engines' slots count as waiting."""
        return self.limits.max_waiting_requests - len(self._fair) + (self.capacity - self.num_used if self._has_slots else 0)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._running) or len(self._fair) > 0

    @property
    def next_deadline(self) -> float:
        """Earliest time at which `expire` may find a request; infinity for never."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def open(self, load: Load) -> None:
        """Assign requests to an engine from now on."""
        assert load.index not in self._loads
        self._loads[load.index] = load
        self.capacity += load.capacity

    def close(self, index: int) -> list[Entry]:
        """Remove an engine; remove and return its requests."""
        lost = [entry for entry in self._running if entry.engine == index]
        for entry in lost:
            self.remove(entry)
        self.capacity -= self._loads.pop(index).capacity
        return lost

    def note_report(self, index: int, now: float, steps: Sequence[Step]) -> None:
        """Record a report; callers are charged a tick for every as many steps as there are engines, which step independently."""
        self._loads[index].last_heard = now
        self._loads[index].note_steps(steps, now)
        num_ticks, self._num_steps = divmod(self._num_steps + len(steps), len(self._loads))
        self._fair.tick(num_ticks)

    def submit(self, entry: Entry, now: float) -> list[Entry]:
        """Queue a request, or assign it at once if none waits and an engine has room; return requests evicted from a full queue.

        Raises:
            QueueIsFull: If a limit would be exceeded.
        """
        request, share = entry.request, entry.request.share
        if share.max_slots and entry.num_slots > share.max_slots:
            raise QueueIsFull("max_slots")
        load = None if len(self._fair) or self.num_places <= 0 else self._choose(entry.num_units, now)
        if load is not None and self._fair.charge(entry):
            self._assign_to(entry, load)
            self.num_urgent += request.priority > LOWEST_PRIORITY
            return []
        evicted = self._make_place(share, entry.num_tokens)
        for other in evicted:
            self.remove(other)
        entry.is_waiting = True
        self.num_urgent += request.priority > LOWEST_PRIORITY
        self._fair.push(entry, queue_position(request))
        if request.deadline is not None:
            self._add_deadline(request.deadline, entry)
        return evicted

    def assign(self, now: float) -> list[Entry]:
        """Assign the next requests to engines with room; return all assigned since the last call, in order."""
        while (entry := self._fair.first()) is not None and (load := self._choose(entry.num_units, now)) is not None:
            self._fair.take(entry)
            self._assign_to(entry, load)
        assigned, self._assigned = self._assigned, []
        return assigned

    def shrink(self, entry: Entry, num_slots: int) -> None:
        """Release slots that a running request no longer needs."""
        assert entry.engine is not None and num_slots <= entry.num_slots
        self._release(entry, self._loads[entry.engine], entry.num_slots - num_slots)
        entry.num_slots = num_slots

    def remove(self, entry: Entry) -> None:
        """Remove a waiting or assigned request."""
        if entry.is_waiting or entry.engine is not None:
            self.num_urgent -= entry.request.priority > LOWEST_PRIORITY
        if entry.is_waiting:
            entry.is_waiting = False
            self._fair.remove(entry)
        elif entry.engine is not None:
            load, entry.engine = self._loads[entry.engine], None
            del self._running[entry]
            load.num_tokens -= entry.num_tokens
            self._release(entry, load, entry.num_units)

    def expire(self, now: float) -> list[Entry]:
        """Remove and return the waiting requests past their deadline; engines expire those they run."""
        expired: list[Entry] = []
        while self.next_deadline <= now:
            entry = heapq.heappop(self._deadlines)[-1]
            if entry.is_waiting:
                self.remove(entry)
                expired.append(entry)
        return expired

    def remove_all(self) -> list[Entry]:
        """Remove and return all requests."""
        entries = [*self._running, *self._fair]
        for entry in entries:
            self.remove(entry)
        return entries

    def running(self) -> Iterator[Entry]:
        """Yield the requests assigned to engines."""
        yield from self._running

    def waiting_by_caller(self) -> Iterator[tuple[str, int]]:
        """Yield callers with waiting requests, and how many."""
        for own in self._fair.waiting:
            yield own.share.caller, len(own)

    def check_place(self, share: Share) -> None:
        """Raise `QueueIsFull` if there is no room for even the smallest request."""
        if self.num_places <= 0 or share.max_waiting:
            self._make_place(share, 0)

    def needed_seconds(self, entry: Entry) -> float:
        """Return a lower bound of a new request's duration at current rates; 0 while too little is measured.

        It waits until slots are free for it, its caller's earlier requests and the others' share meanwhile (one of S slots becomes
        free every S-th part of the mean running time), likewise within its caller's `max_slots`; prefill and fewest steps follow.
        """
        request, forecast = entry.request, self.forecast
        if isinstance(request, ScoreRequest) or not forecast.is_settled:
            return 0.0
        share, num_ahead = request.share, self.num_slots_ahead(request)
        seconds = forecast.seconds_until_free(self.num_used + num_ahead + entry.num_slots, self.capacity)
        if share.max_slots and (own := self._fair.of(share.caller)) is not None:
            num_needed = own.num_slots + own.num_ahead(queue_position(request), request.priority)[0] + entry.num_slots
            seconds = max(seconds, forecast.seconds_until_free(num_needed, share.max_slots))
        return seconds + forecast.seconds_of(request)

    def num_slots_ahead(self, request: Request) -> int:
        """Return a lower bound of the slots of the requests that will be assigned before a new one.

        Counts the caller's earlier requests, and those that other callers are due meanwhile, estimated from the sizes of waiting
        requests; callers with a limit of slots may get less than they are due, and are not counted.
        """
        fair, share, priority = self._fair, request.share, request.priority
        own = fair.of(share.caller)
        num_slots, num_tokens = (0, 0) if own is None else own.num_ahead(queue_position(request), priority)
        if len(fair.waiting) <= (own is not None and len(own) > 0):
            return num_slots  # no other caller waits
        own_parts = num_tokens * round(PARTS_PER_TOKEN / share.weight)
        end = fair.served(share.caller) + own_parts - priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN
        for other in islice(fair.waiting, MAX_CALLERS):
            if other is not own and not other.share.max_slots:
                due = max(end - fair.turn(other)[0], 0)
                num_due_slots = other.num_waiting_slots * due // max(other.num_tokens * other.parts_per_token, 1)
                num_slots += min(num_due_slots, other.num_waiting_slots)
        return num_slots

    def queue_seconds(self) -> float:
        """Return the estimated wait for one slot, without requests blocked by `max_slots`; 0 while that is unknown."""
        num_needed = self.num_used + self._fair.num_slots - self._fair.num_held_back + 1
        return self.forecast.seconds_until_free(num_needed, self.capacity) if self.capacity else 0.0

    def seconds_until_place(self, share: Share | None = None) -> float:
        """Estimate when the queue accepts a caller's request again; None for a caller that is alone in it."""
        if share is None:
            return self.forecast.seconds_until_place(self.num_waiting)
        own = self._fair.of(share.caller)
        return self.forecast.seconds_until_place(0 if own is None else len(own), self._fair.part_of(share))

    def without_claim(self) -> dict[str, float] | None:
        """Return waiting callers that could evict nothing from a full queue, with the time until each may have a place.

        None if too many callers wait, or if several do and the queue is not half full.
        """
        callers = self._fair.waiting
        if len(callers) > MAX_CALLERS or (len(callers) > 1 and self.num_places > self.limits.max_waiting_requests // 2):
            return None
        most = max((len(one) / one.share.weight for one in callers if len(one) > 1), default=0.0)
        shares = [one.share for one in callers if (len(one) + 1) / one.share.weight >= most]
        return {share.caller: self.seconds_until_place(share) for share in shares}

    def at_their_limit(self) -> dict[str, float]:
        """Return callers at their `max_waiting`, with the same times, among the first that wait."""
        shares = [one.share for one in islice(self._fair.waiting, MAX_CALLERS) if self._is_at_limit(one.share)]
        return {share.caller: self.seconds_until_place(share) for share in shares}

    def _is_at_limit(self, share: Share) -> bool:
        """Return whether a caller has reached its `max_waiting`, not counting requests that free slots will take."""
        if not share.max_waiting or (own := self._fair.of(share.caller)) is None:
            return False
        num_open = max(self.capacity - self.num_used, 0) if self._has_slots else 0
        if share.max_slots:
            num_open = max(min(num_open, share.max_slots - own.num_slots), 0)
        return len(own) >= share.max_waiting + num_open

    def _choose(self, num_units: int, now: float) -> Load | None:
        """Return the engine expected to end a request first, or None; engines that may hang are skipped unless all may."""
        loads = self._loads.values()
        # Requests given ahead take places of the queue and cannot be evicted: some are left to other callers.
        num_ahead = self.num_used - self.capacity
        has_lookahead = not self._has_slots or num_ahead < self.limits.max_waiting_requests // WAITING_PER_LOOKAHEAD
        if len(loads) > 1:
            loads_heard = [load for load in loads if now - load.last_heard <= SUSPICIOUS_SECONDS]
            able = [load for load in loads_heard or loads if load.takes(num_units, has_lookahead=has_lookahead)]
            return min(able, key=lambda load: load.order(num_units, now), default=None)
        return next((load for load in loads if load.takes(num_units, has_lookahead=has_lookahead)), None)

    def _assign_to(self, entry: Entry, load: Load) -> None:
        entry.is_waiting, entry.engine = False, load.index
        self._running[entry] = None
        self._assigned.append(entry)
        load.num_tokens += entry.num_tokens
        load.num_units += entry.num_units
        self.num_used += entry.num_units

    def _release(self, entry: Entry, load: Load, num_units: int) -> None:
        load.num_units -= num_units
        self.num_used -= num_units
        if entry.num_slots:
            self._fair.release(entry.request.share.caller, num_units)

    def _make_place(self, share: Share, num_tokens: int) -> list[Entry]:
        if self._is_at_limit(share):
            raise QueueIsFull("max_waiting")
        tokens_over = self.num_waiting_tokens + num_tokens - self.limits.max_waiting_tokens if num_tokens and len(self._fair) else 0
        num_over = int(self.num_places <= 0)  # one for one, even if a wide request took several places
        if not num_over and tokens_over <= 0:
            return []
        evicted = self._evicted(share, num_tokens, num_over, tokens_over)
        if not evicted:
            raise QueueIsFull
        return evicted

    def _evicted(self, share: Share, size: int, num: int, num_tokens: int) -> list[Entry]:
        """Return the requests to evict for a new one of `size` tokens: the last of the caller with most, by weight.

        At least `num` requests with `num_tokens` tokens have to go: as few as possible, and none unless their caller has more than
        the new request's caller until the last of them goes.
        """

        def amount(one: CallerQueue) -> int:
            return one.num_tokens if num_tokens > 0 else len(one)

        own = self._fair.of(share.caller)
        part_with_it = ((amount(own) if own is not None else 0) + (size if num_tokens > 0 else 1)) / share.weight
        callers = (one for one in self._fair.waiting if len(one) > 1)
        most = max(callers, key=lambda one: amount(one) / one.share.weight, default=None)
        if most is None or most is own:
            return []
        last = most.last(num, num_tokens)
        tokens = sum(entry.num_tokens for entry in last)
        left = most.num_tokens - tokens + last[-1].num_tokens if num_tokens > 0 else len(most) - len(last) + 1
        is_enough = len(last) >= num and tokens >= num_tokens
        is_fair = left / most.share.weight > part_with_it and len(last) < len(most)
        return last if is_enough and is_fair else []

    def _add_deadline(self, deadline: float, entry: Entry) -> None:
        if len(self._deadlines) > 2 * len(self._fair) + MIN_STALE:
            self._deadlines = [one for one in self._deadlines if one[-1].is_waiting]
            heapq.heapify(self._deadlines)
        self._num_deadlines += 1  # ties in order of addition
        heapq.heappush(self._deadlines, (deadline, self._num_deadlines, entry))


def queue_position(request: Request | ScoreRequest) -> float:
    """Return a caller's ordering key: the time of arrival, moved earlier by priority."""
    return request.arrival - request.priority * SECONDS_PER_PRIORITY
