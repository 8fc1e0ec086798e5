"""Weighted fair queuing among callers; pure policy without clock or I/O.

After Sheng et al., "Fairness in Serving Large Language Models" (2024): tokens served to each caller are counted, divided by its
weight, and the next item is the first of the caller with the lowest count. A caller that returns to the queue starts at the
lowest count of the waiting callers, so neither idle time nor time blocked by its own limit of slots earns credit.
"""

import heapq
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from dragoman.server.engine.messages import Share

T = TypeVar("T", bound=Hashable)

# Lead over other callers of a caller of weight 1, for each priority level of its first item.
TOKENS_PER_PRIORITY = 500
# Fixed-point unit of counts; a caller of weight 10^9 still has a thousand parts for each token.
PARTS_PER_TOKEN = 1 << 40
# Fixed-point unit of sums of weights; a weight of 10^-9 is still a thousand parts.
PARTS_PER_WEIGHT = 1 << 40
# Stale heap entries are dropped when they outnumber the valid ones, and this.
NUM_KEPT = 64


class Place(NamedTuple, Generic[T]):
    """An item in its caller's queue; `at` (position) and `number` (arrival) order places as tuples."""

    at: float
    number: int
    item: T
    priority: int
    size: int
    num_slots: int


class CallerQueue(Generic[T]):
    """One caller's waiting items, and the tokens served to it, in integer parts of a token so that counts do not drift.

    Attributes:
        parts_per_token: Count of a token at the caller's weight.
        parts_of_weight: The weight in parts.
        served: Tokens served, in parts; `settle` brings it up to date.
        num_slots: Slots held by the caller.
        num_waiting_slots: Slots that the waiting items will hold.
        num_held_back: Part of these denied by the caller's own limit, as last computed.
        turn: Key in the heap of turns; None without an eligible item.
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
        self._waiting: dict[T, Place[T]] = {}
        self._places: list[Place[T]] = []
        self._backwards: list[tuple[float, int, Place[T]]] | None = None
        self._priorities: dict[int, int] = {}
        self._since = tick
        self.served = self.num_slots = self.num_tokens = self.num_waiting_slots = self.num_held_back = 0
        self.turn: Turn[T] | None = None
        self.share = share
        self._weigh(share.weight)

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._waiting)

    @property
    def first(self) -> Place[T]:
        """Place of the next item; the queue must not be empty."""
        return self._places[0]

    @property
    def least_priority(self) -> int:
        """Lowest priority of the waiting items; the queue must not be empty."""
        return min(self._priorities)

    @property
    def is_held_back(self) -> bool:
        """Whether `max_slots` blocks the first item; an item above the limit runs when the caller holds no slots."""
        limit = self.share.max_slots
        return limit > 0 and self.num_slots > 0 and self.num_slots + self._places[0].num_slots > limit

    def held_back(self) -> int:
        """Return the slots of waiting items that exceed the caller's `max_slots` now."""
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

    def turn_at(self, tick: int) -> "Turn[T]":
        """Return the caller's sort key at a tick; the queue must not be empty."""
        self.settle(tick)
        first = self._places[0]
        return self.served - first.priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN, first.at, first.number, self

    def push(self, place: Place[T]) -> bool:
        """Add an item; return whether it is now the first."""
        assert place.item not in self._waiting
        self._waiting[place.item] = place
        self._count(place, 1)
        heapq.heappush(self._places, place)
        if self._backwards is not None:
            heapq.heappush(self._backwards, (-place.at, -place.number, place))
        return self._places[0] is place

    def remove(self, item: T) -> tuple[Place[T], bool]:
        """Remove an item; return its place, and whether it was the first."""
        place = self._waiting.pop(item)
        self._count(place, -1)
        was_first, most = self._places[0] is place, 2 * len(self._waiting) + NUM_KEPT
        if not self._waiting:
            self._places.clear()
            self._backwards = None
        elif len(self._places) > most:
            self._places = list(self._waiting.values())
            heapq.heapify(self._places)
        if self._backwards is not None and len(self._backwards) > most:
            self._backwards = None
        while self._places and self._waiting.get(self._places[0].item) is not self._places[0]:
            heapq.heappop(self._places)
        return place, was_first

    def places(self) -> Collection[Place[T]]:
        """Return the places of the waiting items in order of arrival."""
        return self._waiting.values()

    def last(self, num: int, num_tokens: int) -> list[Place[T]]:
        """Return the fewest places from the end, last first, that have at least `num` items and `num_tokens` tokens, or all."""
        if self._backwards is None:
            self._backwards = [(-place.at, -place.number, place) for place in self._waiting.values()]
            heapq.heapify(self._backwards)
        found: list[tuple[float, int, Place[T]]] = []
        while self._backwards and (num > 0 or num_tokens > 0):
            entry = heapq.heappop(self._backwards)
            place = entry[-1]
            if self._waiting.get(place.item) is place:
                found.append(entry)
                num -= 1
                num_tokens -= place.size
        for entry in found:
            heapq.heappush(self._backwards, entry)
        return [place for _, _, place in found]

    def _weigh(self, weight: float) -> None:
        assert 1e-9 <= weight <= 1e9, "a weight that can be counted with"
        self.parts_per_token = round(PARTS_PER_TOKEN / weight)
        self.parts_of_weight = round(PARTS_PER_WEIGHT * weight)

    def _count(self, place: Place[T], sign: int) -> None:
        self.num_tokens += sign * place.size
        self.num_waiting_slots += sign * place.num_slots
        count = self._priorities[place.priority] = self._priorities.get(place.priority, 0) + sign
        if not count:
            del self._priorities[place.priority]


# Sort key: tokens served less the first item's priority lead, that item's position and number, and the caller's queue.
Turn = tuple[int, float, int, CallerQueue[T]]


class FairQueue(Generic[T]):
    """Weighted fair queue over all callers.

    Among callers: lowest count first, ties by the earlier first item. The priority of a caller's first item gives it a lead of
    `TOKENS_PER_PRIORITY` for each level, which gains no caller more than its weight's share in the long run. Within a caller: by
    position, ties in order of arrival.

    A caller whose first item exceeds its `max_slots` is skipped until it fits. An item that exceeds the limit alone, possible after
    the limit was lowered, runs when its caller holds no slots.

    Attributes:
        num_held_back: Slots of waiting items denied by callers' own limits now; part of `num_slots`.
        parts_of_weight: Sum of the weights of the waiting callers.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_slots = self.num_held_back = self.parts_of_weight = 0
        self._num_waiting = self._num_pushed = self._num_held = self._num_ticks = self._floor = 0
        self._queues: dict[str, CallerQueue[T]] = {}
        self._waiting: dict[CallerQueue[T], None] = {}
        self._turns: list[Turn[T]] = []
        self._num_queues_kept = NUM_KEPT

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self._num_waiting

    def __iter__(self) -> Iterator[T]:
        """Yield the waiting items, caller by caller."""
        for queue in self._waiting:
            for place in queue.places():
                yield place.item

    @property
    def waiting(self) -> Collection[CallerQueue[T]]:
        """Queues of the callers with waiting items."""
        return self._waiting.keys()

    def of(self, caller: str) -> CallerQueue[T] | None:
        """Return a caller's queue; None if it has no items and no count to keep."""
        return self._queues.get(caller)

    def push(self, item: T, share: Share, at: float, *, priority: int = 0, size: int = 1, num_slots: int = 0) -> None:
        """Add an item that is not waiting yet; `share` replaces its caller's, `size` in tokens is charged by `take`."""
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
        is_first = queue.push(Place(at, self._num_pushed, item, priority, size, num_slots))
        self._num_waiting += 1
        self.num_tokens += size
        self.num_slots += num_slots
        if is_first or has_new_share or queue.turn is None:
            self._update_turn(queue)
        self._update_held_back(queue)

    def first(self) -> T | None:
        """Return the next item; None if no item waits, or callers' own limits block all."""
        turn = self._first_turn()
        return None if turn is None else turn[-1].first.item

    def charge(self, share: Share, size: int, num_slots: int) -> bool:
        """Charge a caller for an item that bypasses the empty queue; return False, without a charge, if `max_slots` blocks it."""
        assert not self._num_waiting
        queue = self._queues.get(share.caller)
        if queue is None:
            queue = self._new_queue(share)
        elif share != queue.share:
            self._exchange(queue, share)
        if share.max_slots and queue.num_slots and queue.num_slots + num_slots > share.max_slots:
            return False
        queue.settle(self._num_ticks)
        queue.served = self._floor = max(queue.served, self._floor) + size * queue.parts_per_token
        queue.num_slots += num_slots
        self._num_held += num_slots
        if not self._num_held:
            self._forget_all()
        return True

    def take(self, item: T, caller: str) -> None:
        """Remove a caller's item and charge the caller its tokens and slots."""
        queue = self._queues[caller]
        place, _ = self._leave(item, queue)
        queue.settle(self._num_ticks)
        queue.served += place.size * queue.parts_per_token
        queue.num_slots += place.num_slots
        self._num_held += place.num_slots
        self._floor = max(self._floor, queue.served)
        self._update_turn(queue)
        self._update_held_back(queue)

    def remove(self, item: T, caller: str) -> None:
        """Remove a caller's item without charge."""
        queue = self._queues[caller]
        if self._leave(item, queue)[1]:
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
        """Return the count at which a new item of a caller would be ranked."""
        queue = self._queues.get(caller)
        if queue is None:
            return self._least_served()
        queue.settle(self._num_ticks)
        return queue.served if queue.turn is not None else max(queue.served, self._least_served())

    def turn(self, queue: CallerQueue[T]) -> Turn[T]:
        """Return the current sort key of a non-empty caller queue."""
        return queue.turn_at(self._num_ticks)

    def _least_served(self) -> int:
        """Return the lowest count of the waiting callers; without any, that of the caller served last."""
        turn = self._first_turn()
        return self._floor if turn is None else min(turn[0], turn[-1].served)

    def _new_queue(self, share: Share) -> CallerQueue[T]:
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
        """Reset all counts; called when no item waits and no slot is held."""
        self._queues.clear()
        self._turns.clear()
        self._floor = 0

    def _exchange(self, queue: CallerQueue[T], share: Share) -> None:
        before = queue.parts_of_weight
        queue.exchange(share, self._num_ticks)
        if len(queue):
            self.parts_of_weight += queue.parts_of_weight - before

    def _leave(self, item: T, queue: CallerQueue[T]) -> tuple[Place[T], bool]:
        """Remove an item from its queue; return its place and whether it was the first."""
        place, was_first = queue.remove(item)
        self._num_waiting -= 1
        self.num_tokens -= place.size
        self.num_slots -= place.num_slots
        if not len(queue):
            del self._waiting[queue]
            self.parts_of_weight -= queue.parts_of_weight
        return place, was_first

    def _update_held_back(self, queue: CallerQueue[T]) -> None:
        if queue.share.max_slots or queue.num_held_back:
            before, queue.num_held_back = queue.num_held_back, queue.held_back()
            self.num_held_back += queue.num_held_back - before

    def _update_turn(self, queue: CallerQueue[T]) -> None:
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

    def _first_turn(self) -> Turn[T] | None:
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
