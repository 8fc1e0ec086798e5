"""One caller's line in a queue: what waits, in which order, and what its caller has had. Whose turn it is: `fair_queue.py`."""

import heapq
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from dragoman.server.engine.messages import Share

T = TypeVar("T", bound=Hashable)

TOKENS_PER_PRIORITY = 500
"""How far a caller of weight 1 may be served ahead of the others, for each step of the priority of its first item."""
PARTS_PER_TOKEN = 1 << 40
"""Of a count; a weight of 10^9 leaves a thousand."""
PARTS_PER_WEIGHT = 1 << 40
"""Of a sum of weights; a weight of 10^-9 is still a thousand."""
NUM_KEPT = 64
"""What has left is forgotten when it is more than what is there, and more than this."""


class Place(NamedTuple, Generic[T]):
    """An item's place in line; places compare as tuples do.

    Attributes:
        at: Where it belongs; less is earlier.
        number: How many came before it.
        item: What waits.
        priority: Of the item.
        size: Its tokens.
        num_slots: Slots that it will hold.
    """

    at: float
    number: int
    item: T
    priority: int
    size: int
    num_slots: int


class Line(Generic[T]):
    """What a caller waits for and what it has had.

    What it has had are whole numbers of very small parts of a token: they do not drift, however long and by whatever weights they
    are added up.

    Attributes:
        share: As its newest item says.
        parts_per_token: What a token counts, by the caller's weight.
        parts_of_weight: What its weight counts in a sum.
        served: What it has been served, in parts; `settle` brings it up to now.
        num_slots: Slots that the caller holds.
        num_tokens: Sizes of the items that wait.
        num_waiting_slots: Slots that they will hold.
        num_held_back: Those of them that the caller's own limit does not let it have now, as was reckoned last.
        turn: What it is compared by, as was noted last; None while it has no turn.
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
        """Return how many items wait."""
        return len(self._waiting)

    @property
    def first(self) -> Place[T]:
        """The place of the item that is next in line; there must be one."""
        return self._places[0]

    @property
    def least_priority(self) -> int:
        """The lowest priority of those that wait; there must be one."""
        return min(self._priorities)

    @property
    def is_held_back(self) -> bool:
        """Whether the caller's own limit keeps its first item waiting; one that exceeds it alone goes when nothing else runs."""
        limit = self.share.max_slots
        return limit > 0 and self.num_slots > 0 and self.num_slots + self._places[0].num_slots > limit

    def held_back(self) -> int:
        """Return the slots that what waits needs and the caller's own limit does not let it have now."""
        limit = self.share.max_slots
        return max(self.num_waiting_slots - max(limit - self.num_slots, 0), 0) if limit else 0

    def exchange(self, share: Share, tick: int) -> None:
        """Take another share for the caller's."""
        if share.weight != self.share.weight:
            self.settle(tick)
            self._weigh(share.weight)
        self.share = share

    def settle(self, tick: int) -> None:
        """Count a token for each slot and tick since this was done last."""
        if self.num_slots:
            self.served += self.num_slots * (tick - self._since) * self.parts_per_token
        self._since = tick

    def turn_at(self, tick: int) -> "Turn[T]":
        """Return what the line is compared by at a tick; something must wait."""
        self.settle(tick)
        first = self._places[0]
        return self.served - first.priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN, first.at, first.number, self

    def push(self, place: Place[T]) -> bool:
        """Let an item wait; return whether it is now the first."""
        assert place.item not in self._waiting
        self._waiting[place.item] = place
        self._count(place, 1)
        heapq.heappush(self._places, place)
        if self._backwards is not None:
            heapq.heappush(self._backwards, (-place.at, -place.number, place))
        return self._places[0] is place

    def remove(self, item: T) -> tuple[Place[T], bool]:
        """Let an item wait no longer; return its place, and whether it was the first."""
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
        """Return the places of what waits, as they came."""
        return self._waiting.values()

    def last(self, num: int, num_tokens: int) -> list[Place[T]]:
        """Return the fewest places at the end that are so many and have so many tokens, or all there are; the last one first."""
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


Turn = tuple[int, float, int, Line[T]]
"""What a caller has had, less the lead of its first item's priority; that item's place and number; its line."""
