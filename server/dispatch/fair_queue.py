"""Weighted fair queuing among callers; pure policy without clock or I/O.

After Sheng et al., "Fairness in Serving Large Language Models" (2024): tokens served to each caller are counted, divided by its
weight, and the next request is the first of the caller with the lowest count. A caller that returns to the queue starts at the
lowest count of the waiting callers, so neither idle time nor time blocked by its own limit of slots earns credit.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from dragoman.server.engine.messages import Request, ScoreRequest, Share

# Lead over other callers of a caller of weight 1, for each priority level of its first request.
TOKENS_PER_PRIORITY = 500
# Fixed-point unit of counts; a caller of weight 10^9 still has a thousand parts for each token.
PARTS_PER_TOKEN = 1 << 40
# Fixed-point unit of sums of weights; a weight of 10^-9 is still a thousand parts.
PARTS_PER_WEIGHT = 1 << 40
# Stale heap entries are dropped when they outnumber the valid ones, and this.
NUM_KEPT = 64


@dataclass(slots=True, eq=False)
class Entry:
    """A request from submission to its end."""

    request: Request | ScoreRequest
    deliver: Callable[[Any], None]  # called with its streamed tokens and its end
    num_tokens: int  # tokens counted against limits and charged to the caller
    num_slots: int  # slots held while running; 0 for a score request
    engine: int | None = None  # index of its engine; None while waiting
    is_waiting: bool = False

    @property
    def num_units(self) -> int:
        """Size in an engine's load."""
        return self.num_slots or self.num_tokens


# A waiting request in its caller's queue: position, number of arrival, entry.
Place = tuple[float, int, Entry]


class CallerQueue:
    """One caller's waiting requests, and the tokens served to it, in integer parts of a token so that counts do not drift.

    Attributes:
        parts_per_token: Count of a token at the caller's weight.
        parts_of_weight: The weight in parts.
        served: Tokens served, in parts; `settle` brings it up to date.
        num_slots: Slots held by the caller.
        num_waiting_slots: Slots that the waiting requests will hold.
        num_held_back: Part of these denied by the caller's own limit, as last computed.
        turn: Key in the heap of turns; None without an eligible request.
    """

    __slots__ = (
        "_backwards",
        "_places",
        "_priorities",
        "_since",
        "_waiting",
        "num_held_back",
        "num_slots",
        "num_tokens",
        "num_waiting_slots",
        "parts_of_weight",
        "parts_per_token",
        "served",
        "share",
        "turn",
    )

    def __init__(self, share: Share, tick: int) -> None:
        self._waiting: dict[Entry, Place] = {}
        self._places: list[Place] = []
        self._backwards: list[Place] | None = None
        self._priorities: dict[int, int] = {}
        self._since = tick
        self.served = self.num_slots = self.num_tokens = self.num_waiting_slots = self.num_held_back = 0
        self.turn: Turn | None = None
        self.share = share
        self._weigh(share.weight)

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._waiting)

    @property
    def first(self) -> Entry:
        """The next request; the queue must not be empty."""
        return self._places[0][-1]

    @property
    def is_held_back(self) -> bool:
        """Whether `max_slots` blocks the first request; one above the limit runs when the caller holds no slots."""
        limit = self.share.max_slots
        return limit > 0 and self.num_slots > 0 and self.num_slots + self._places[0][-1].num_slots > limit

    def held_back(self) -> int:
        """Return the slots of waiting requests that exceed the caller's `max_slots` now."""
        limit = self.share.max_slots
        return max(self.num_waiting_slots - max(limit - self.num_slots, 0), 0) if limit else 0

    def exchange(self, share: Share, tick: int) -> None:
        """Replace the caller's share."""
        if share.weight != self.share.weight:
            self.settle(tick)
            self._weigh(share.weight)
        self.share = share

    def settle(self, tick: int) -> None:
        """Charge a token for each held slot and tick since the last call."""
        if self.num_slots:
            self.served += self.num_slots * (tick - self._since) * self.parts_per_token
        self._since = tick

    def turn_at(self, tick: int) -> "Turn":
        """Return the caller's sort key at a tick; the queue must not be empty."""
        self.settle(tick)
        at, number, first = self._places[0]
        return self.served - first.request.priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN, at, number, self

    def push(self, entry: Entry, at: float, number: int) -> bool:
        """Add a request, which may be added only once; return whether it is now the first."""
        assert entry not in self._waiting
        place = self._waiting[entry] = at, number, entry
        self._count(entry, 1)
        heapq.heappush(self._places, place)
        if self._backwards is not None:
            heapq.heappush(self._backwards, (-at, -number, entry))
        return self._places[0] is place

    def remove(self, entry: Entry) -> bool:
        """Remove a request; return whether it was the first."""
        place = self._waiting.pop(entry)
        self._count(entry, -1)
        was_first, most = self._places[0] is place, 2 * len(self._waiting) + NUM_KEPT
        if not self._waiting:
            self._places.clear()
            self._backwards = None
        elif len(self._places) > most:
            self._places = list(self._waiting.values())
            heapq.heapify(self._places)
        if self._backwards is not None and len(self._backwards) > most:
            self._backwards = None
        while self._places and self._places[0][-1] not in self._waiting:
            heapq.heappop(self._places)
        return was_first

    def entries(self) -> Collection[Entry]:
        """Return the waiting requests in order of arrival."""
        return self._waiting.keys()

    def num_ahead(self, at: float, priority: int) -> tuple[int, int]:
        """Return the slots and tokens of the waiting requests ahead of a new one."""
        if not self._waiting or priority <= min(self._priorities):  # all came earlier with no lower priority
            return self.num_waiting_slots, self.num_tokens
        ahead = [entry for own_at, _, entry in self._waiting.values() if own_at <= at]
        return sum(entry.num_slots for entry in ahead), sum(entry.num_tokens for entry in ahead)

    def last(self, num: int, num_tokens: int) -> list[Entry]:
        """Return the fewest requests from the end, last first, that are at least `num` and have `num_tokens` tokens, or all."""
        if self._backwards is None:
            self._backwards = [(-at, -number, entry) for at, number, entry in self._waiting.values()]
            heapq.heapify(self._backwards)
        found: list[Place] = []
        while self._backwards and (num > 0 or num_tokens > 0):
            place = heapq.heappop(self._backwards)
            if place[-1] in self._waiting:
                found.append(place)
                num -= 1
                num_tokens -= place[-1].num_tokens
        for place in found:
            heapq.heappush(self._backwards, place)
        return [entry for _, _, entry in found]

    def _weigh(self, weight: float) -> None:
        assert 1e-9 <= weight <= 1e9, "a weight that can be counted with"
        self.parts_per_token = round(PARTS_PER_TOKEN / weight)
        self.parts_of_weight = round(PARTS_PER_WEIGHT * weight)

    def _count(self, entry: Entry, sign: int) -> None:
        self.num_tokens += sign * entry.num_tokens
        self.num_waiting_slots += sign * entry.num_slots
        priority = entry.request.priority
        count = self._priorities[priority] = self._priorities.get(priority, 0) + sign
        if not count:
            del self._priorities[priority]


# Sort key: tokens served less the first request's priority lead, that request's position and number, and the caller's queue.
Turn = tuple[int, float, int, CallerQueue]


class FairQueue:
    """Weighted fair queue over all callers.

    Among callers: lowest count first, ties by the earlier first request. The priority of a caller's first request gives it a lead
    of `TOKENS_PER_PRIORITY` for each level, which gains no caller more than its weight's share in the long run. Within a caller:
    by position, ties in order of arrival.

    A caller whose first request exceeds its `max_slots` is skipped until it fits. One that exceeds the limit alone, possible after
    the limit was lowered, runs when its caller holds no slots.

    Attributes:
        num_held_back: Slots of waiting requests denied by callers' own limits now; part of `num_slots`.
        parts_of_weight: Sum of the weights of the waiting callers.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_slots = self.num_held_back = self.parts_of_weight = 0
        self._num_waiting = self._num_pushed = self._num_held = self._num_ticks = self._floor = 0
        self._queues: dict[str, CallerQueue] = {}
        self._waiting: dict[CallerQueue, None] = {}
        self._turns: list[Turn] = []
        self._num_queues_kept = NUM_KEPT

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._num_waiting

    def __iter__(self) -> Iterator[Entry]:
        """Yield the waiting requests, caller by caller."""
        for queue in self._waiting:
            yield from queue.entries()

    @property
    def waiting(self) -> Collection[CallerQueue]:
        """Queues of the callers with waiting requests."""
        return self._waiting.keys()

    def of(self, caller: str) -> CallerQueue | None:
        """Return a caller's queue; None if it has no requests and no count to keep."""
        return self._queues.get(caller)

    def part_of(self, share: Share) -> float:
        """Return a caller's part of the service, given the callers that wait now."""
        own = self._queues.get(share.caller)
        if own is not None and len(own):
            return own.parts_of_weight / self.parts_of_weight
        parts = round(PARTS_PER_WEIGHT * share.weight)
        return parts / (self.parts_of_weight + parts)

    def push(self, entry: Entry, at: float) -> None:
        """Add a request, which may be added only once, at a position `at`; its share replaces its caller's."""
        share = entry.request.share
        queue = self._queues.get(share.caller)
        if queue is None:
            queue = self._new_queue(share)
        has_new_share = share != queue.share
        if has_new_share:
            self._exchange(queue, share)
        self._num_pushed += 1
        if not len(queue):
            self._waiting[queue] = None
            self.parts_of_weight += queue.parts_of_weight
        is_first = queue.push(entry, at, self._num_pushed)
        self._num_waiting += 1
        self.num_tokens += entry.num_tokens
        self.num_slots += entry.num_slots
        if is_first or has_new_share or queue.turn is None:
            self._update_turn(queue)
        self._update_held_back(queue)

    def first(self) -> Entry | None:
        """Return the next request; None if none waits, or callers' own limits block all."""
        turn = self._first_turn()
        return None if turn is None else turn[-1].first

    def charge(self, entry: Entry) -> bool:
        """Charge a request that bypasses the empty queue; return False, without a charge, if its caller's `max_slots` blocks it."""
        assert not self._num_waiting
        share, num_slots = entry.request.share, entry.num_slots
        queue = self._queues.get(share.caller)
        if queue is None:
            queue = self._new_queue(share)
        elif share != queue.share:
            self._exchange(queue, share)
        if share.max_slots and queue.num_slots and queue.num_slots + num_slots > share.max_slots:
            return False
        queue.settle(self._num_ticks)
        queue.served = self._floor = max(queue.served, self._floor) + entry.num_tokens * queue.parts_per_token
        queue.num_slots += num_slots
        self._num_held += num_slots
        if not self._num_held:
            self._forget_all()
        return True

    def take(self, entry: Entry) -> None:
        """Remove a request and charge its tokens and slots to its caller."""
        queue = self._queues[entry.request.share.caller]
        self._leave(entry, queue)
        queue.settle(self._num_ticks)
        queue.served += entry.num_tokens * queue.parts_per_token
        queue.num_slots += entry.num_slots
        self._num_held += entry.num_slots
        self._floor = max(self._floor, queue.served)
        self._update_turn(queue)
        self._update_held_back(queue)

    def remove(self, entry: Entry) -> None:
        """Remove a request without charge."""
        queue = self._queues[entry.request.share.caller]
        if self._leave(entry, queue):
            self._update_turn(queue)
        self._update_held_back(queue)

    def release(self, caller: str, num_slots: int) -> None:
        """Release slots held by a caller."""
        queue = self._queues[caller]
        assert 0 <= num_slots <= queue.num_slots
        queue.settle(self._num_ticks)
        queue.num_slots -= num_slots
        self._num_held -= num_slots
        if queue.turn is None and (len(queue) or not self._num_held):
            self._update_turn(queue)
        self._update_held_back(queue)

    def tick(self, num_ticks: int = 1) -> None:
        """Charge every caller `num_ticks` tokens for each slot that it holds."""
        self._num_ticks += num_ticks

    def served(self, caller: str) -> int:
        """Return the count at which a new request of a caller would be ranked."""
        queue = self._queues.get(caller)
        if queue is None:
            return self._least_served()
        queue.settle(self._num_ticks)
        return queue.served if queue.turn is not None else max(queue.served, self._least_served())

    def turn(self, queue: CallerQueue) -> Turn:
        """Return the current sort key of a non-empty caller queue."""
        return queue.turn_at(self._num_ticks)

    def _least_served(self) -> int:
        """Return the lowest count of the waiting callers; without any, that of the caller served last."""
        turn = self._first_turn()
        return self._floor if turn is None else min(turn[0], turn[-1].served)

    def _new_queue(self, share: Share) -> CallerQueue:
        """Return a new caller queue; drop idle ones whose count is no higher than the lowest."""
        if len(self._queues) >= self._num_queues_kept:
            floor = self._least_served()
            idle = [queue for queue in self._queues.values() if not (len(queue) or queue.num_slots) and queue.served <= floor]
            for queue in idle:
                del self._queues[queue.share.caller]
            self._num_queues_kept = 2 * len(self._queues) + NUM_KEPT
        new = self._queues[share.caller] = CallerQueue(share, self._num_ticks)
        return new

    def _forget_all(self) -> None:
        """Reset all counts; called when no request waits and no slot is held."""
        self._queues.clear()
        self._turns.clear()
        self._floor = 0

    def _exchange(self, queue: CallerQueue, share: Share) -> None:
        before = queue.parts_of_weight
        queue.exchange(share, self._num_ticks)
        if len(queue):
            self.parts_of_weight += queue.parts_of_weight - before

    def _leave(self, entry: Entry, queue: CallerQueue) -> bool:
        """Remove a request from its queue; return whether it was the first."""
        was_first = queue.remove(entry)
        self._num_waiting -= 1
        self.num_tokens -= entry.num_tokens
        self.num_slots -= entry.num_slots
        if not len(queue):
            del self._waiting[queue]
            self.parts_of_weight -= queue.parts_of_weight
        return was_first

    def _update_held_back(self, queue: CallerQueue) -> None:
        if queue.share.max_slots or queue.num_held_back:
            before, queue.num_held_back = queue.num_held_back, queue.held_back()
            self.num_held_back += queue.num_held_back - before

    def _update_turn(self, queue: CallerQueue) -> None:
        """Set a caller's turn; a stored turn is never later than the true one, as counts only grow and other changes come here."""
        if not len(queue) or queue.is_held_back:
            queue.turn = None
            if not (self._num_waiting or self._num_held):
                self._forget_all()
            return
        if queue.turn is None:
            queue.settle(self._num_ticks)
            queue.served = max(queue.served, self._least_served())
        turns, before = self._turns, queue.turn
        queue.turn = queue.turn_at(self._num_ticks)
        if before is not None and turns[0] is before:
            heapq.heapreplace(turns, queue.turn)
            return
        heapq.heappush(turns, queue.turn)
        if len(turns) > 2 * len(self._waiting) + NUM_KEPT:
            self._turns = [turn for turn in turns if turn[-1].turn is turn]
            heapq.heapify(self._turns)

    def _first_turn(self) -> Turn | None:
        """Return the first turn, brought up to date; None if there is none."""
        turns = self._turns
        while turns:
            turn = turns[0]
            queue = turn[-1]
            if queue.turn is not turn:
                heapq.heappop(turns)
                continue
            # Recomputed even without held slots: this turn may lack the charge for slots released since.
            if (now := queue.turn_at(self._num_ticks))[0] == turn[0]:
                return turn
            queue.turn = now
            heapq.heapreplace(turns, now)
        return None
