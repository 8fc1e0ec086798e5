"""When what has been submitted is no longer wanted: deadlines of things that may end before, by any other way."""

import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Deadlines of what has ended are forgotten once they are the larger part, but a few are not worth the trouble.
MIN_STALE = 64


class Expiry(Generic[Item]):
    """Deadlines in order. What has ended is not taken out where it lies, but left out when its turn comes."""

    def __init__(self, is_there: Callable[[Item], bool], count: Callable[[], int]) -> None:
        """Start without any.

        Args:
            is_there: Tells whether something has not ended.
            count: Returns how many have not, with or without a deadline.
        """
        self._is_there, self._count = is_there, count
        self._heap: list[tuple[float, int, Item]] = []
        self._num_added = 0

    def __len__(self) -> int:
        """Return how many deadlines are kept, those of what has ended among them."""
        return len(self._heap)

    @property
    def next(self) -> float:
        """When `take` may find something; infinity for never."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, deadline: float | None, item: Item) -> None:
        """Note a deadline; None is none."""
        if deadline is None:
            return
        if len(self._heap) > 2 * self._count() + MIN_STALE:
            self._heap = [entry for entry in self._heap if self._is_there(entry[2])]
            heapq.heapify(self._heap)
        self._num_added += 1  # of equal deadlines the one noted first comes first
        heapq.heappush(self._heap, (deadline, self._num_added, item))

    def take(self, now: float) -> list[Item]:
        """Return what has not ended and should have by now, in the order of deadlines."""
        late: list[Item] = []
        while self.next <= now:
            item = heapq.heappop(self._heap)[2]
            if self._is_there(item):
                late.append(item)
        return late
