"""Whose turn it is: a queue in which every caller has a line of its own. Policy over plain objects: no clock, no I/O.

Weighted fair queuing with counters of tokens (Sheng et al., "Fairness in Serving Large Language Models", 2024): what a caller is
served counts, by its weight, and the next is the first in line of the caller who has had least. Who comes back to the queue begins
where the least served of those who wait are, so that idleness earns nothing, nor does the time in which a caller's own limit of
slots holds it back.

Counts are whole numbers of very small parts of a token: they do not drift, however long and by whatever weights they are added up.
"""

import heapq
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from dragoman.server.engine.messages import Share

T = TypeVar("T", bound=Hashable)

TOKENS_PER_PRIORITY = 500
"""How far a caller of weight 1 may be served ahead of the others, for each step of the priority of its first item."""
PARTS_PER_TOKEN = 1 << 40
"""Of a count; a weight of 10^9 leaves a thousand."""
NUM_KEPT = 64
"""What has left is forgotten when it is more than what is there, and more than this."""


class Place(NamedTuple, Generic[T]):
    """An item's place in its caller's line; places compare as tuples do.

    Attributes:
        at: Where it belongs; less is earlier.
        number: How many came before it.
        item: What waits.
        line: Its caller's.
        priority: Of the item.
        size: Its tokens.
        num_slots: Slots that it will hold.
    """

    at: float
    number: int
    item: T
    line: "Line[T]"
    priority: int
    size: int
    num_slots: int


@dataclass(slots=True, eq=False)
class Line(Generic[T]):
    """What a caller waits for and what it has had.

    Attributes:
        share: As its newest item says.
        parts_per_token: What a token counts.
        served: What it has been served, as of the tick `since`, in parts.
        since: See `served`.
        num_slots: Slots that the caller holds.
        num_waiting: Items that wait.
        num_waiting_tokens: Their sizes.
        num_waiting_slots: Slots that they will hold.
        priorities: How many items of each priority wait.
        turn: Its valid entry among the turns; None while it has none.
        places: Of what waits, and some of what has left; a heap whose first has not.
        last: The same backwards, once somebody has asked for the last in line.
    """

    share: Share
    parts_per_token: int = 0
    served: int = 0
    since: int = 0
    num_slots: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_waiting_slots: int = 0
    priorities: Counter[int] = field(default_factory=Counter)
    turn: "Turn[T] | None" = None
    places: list[Place[T]] = field(default_factory=list)
    last: list[tuple[float, int, Place[T]]] | None = None

    def is_held_back(self) -> bool:
        """Return whether the caller's own limit keeps its first item waiting."""
        limit = self.share.max_slots
        return bool(limit and self.num_slots) and self.num_slots + self.places[0].num_slots > limit


Turn = tuple[int, float, int, Line[T]]
"""What a caller has had, less the lead of its first item's priority; that item's place and number; its line."""


class FairQueue(Generic[T]):
    """Lines of callers, and whose turn it is.

    Between callers: the next is who has been served least, by weight. The priority of a caller's first item gives it a lead of
    `TOKENS_PER_PRIORITY` for each step, which is used up once it is so far ahead: in the long run priority wins nobody more than the
    share that its weight says. Of equals that one goes first whose first item has the earlier place.

    Within a line: by place, and of equal places in the order in which they came. With a single caller that is all there is.

    A caller whose first item needs more slots than its share's `max_slots` leaves is passed over until it does not. An item that
    needs more than that by itself, which it may after a limit was lowered, goes when its caller holds none.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_slots = 0
        self._waiting: dict[T, Place[T]] = {}
        self._lines: dict[str, Line[T]] = {}
        self._crowd: dict[Line[T], None] = {}
        self._turns: list[Turn[T]] = []
        self._num_pushed = 0
        self._num_held = 0
        self._num_ticks = 0
        self._floor = 0
        self._num_lines_kept = NUM_KEPT

    def __len__(self) -> int:
        """Return how many items wait."""
        return len(self._waiting)

    def push(self, item: T, share: Share, at: float, *, priority: int = 0, size: int = 1, num_slots: int = 0) -> None:
        """Let an item wait.

        Args:
            item: Which does not wait yet.
            share: Whose it is; from now on that is the caller's share.
            at: Its place in line; less is earlier.
            priority: For the lead over other callers.
            size: Its tokens, which its caller is charged when it is taken.
            num_slots: Slots that it will then hold.
        """
        assert item not in self._waiting and 0 < share.weight < math.inf
        line = self._lines.get(share.caller) or self._new_line(share)
        if line.share.weight != share.weight or not line.parts_per_token:
            self._settle(line)
            line.parts_per_token = max(1, round(PARTS_PER_TOKEN / share.weight))
        is_new_limit, line.share = line.share.max_slots != share.max_slots, share
        self._num_pushed += 1
        place = self._waiting[item] = Place(at, self._num_pushed, item, line, priority, size, num_slots)
        self._count(place, 1)
        heapq.heappush(line.places, place)
        if line.last is not None:
            heapq.heappush(line.last, (-at, -place.number, place))
        if line.turn is None or line.places[0] is place or is_new_limit:
            self._update_turn(line)

    def first(self) -> T | None:
        """Return the item whose turn it is; None if none waits but such as their callers' limits hold back."""
        turn = self._first_turn()
        return None if turn is None else turn[-1].places[0].item

    def take(self, item: T) -> None:
        """Let an item that waits have its tokens and slots, at its caller's charge."""
        place = self._leave(item)
        line = place.line
        self._settle(line)
        line.served += place.size * line.parts_per_token
        line.num_slots += place.num_slots
        self._num_held += place.num_slots
        self._floor = max(self._floor, line.served)
        self._tidy(line)

    def remove(self, item: T) -> None:
        """Let an item wait no longer."""
        self._tidy(self._leave(item).line)

    def give_back(self, caller: str, num_slots: int) -> None:
        """Note that a caller holds fewer slots by so many."""
        line = self._lines[caller]
        assert 0 <= num_slots <= line.num_slots
        self._settle(line)
        line.num_slots -= num_slots
        self._num_held -= num_slots
        self._tidy(line)

    def tick(self) -> None:
        """Charge every caller a token for each slot that it holds."""
        self._num_ticks += 1

    def _new_line(self, share: Share) -> Line[T]:
        """Return a line for a caller that has none, and forget those that nobody is in and that have nothing to catch up with."""
        if len(self._lines) >= self._num_lines_kept:
            floor = self._least_served()
            idle = [line for line in self._lines.values() if not (line.num_waiting or line.num_slots) and line.served <= floor]
            for line in idle:
                del self._lines[line.share.caller]
            self._num_lines_kept = 2 * len(self._lines) + NUM_KEPT
        new = self._lines[share.caller] = Line(share, since=self._num_ticks)
        return new

    def _count(self, place: Place[T], sign: int) -> None:
        line = place.line
        if not line.num_waiting:
            self._crowd[line] = None
        line.num_waiting += sign
        line.num_waiting_tokens += sign * place.size
        line.num_waiting_slots += sign * place.num_slots
        line.priorities[place.priority] += sign
        self.num_tokens += sign * place.size
        self.num_slots += sign * place.num_slots

    def _leave(self, item: T) -> Place[T]:
        """Take an item out of its line, which `_tidy` has to follow."""
        place = self._waiting.pop(item)
        self._count(place, -1)
        if not place.line.priorities[place.priority]:
            del place.line.priorities[place.priority]
        return place

    def _tidy(self, line: Line[T]) -> None:
        """Put a line in order after something has left it or its slots."""
        places = line.places
        if not line.num_waiting:
            self._crowd.pop(line, None)
            places.clear()
            line.last = None
        elif len(places) > 2 * line.num_waiting + NUM_KEPT:
            line.places = places = [place for place in places if self._waiting.get(place.item) is place]
            heapq.heapify(places)
        while places and self._waiting.get(places[0].item) is not places[0]:
            heapq.heappop(places)
        self._update_turn(line)
        if not (self._waiting or self._num_held):  # nobody can be ahead of anybody any more
            self._lines.clear()
            self._turns.clear()
            self._floor = self._num_ticks = 0

    def _settle(self, line: Line[T]) -> None:
        """Count what a line's slots have had since they were last counted."""
        line.served += line.num_slots * (self._num_ticks - line.since) * line.parts_per_token
        line.since = self._num_ticks

    def _turn(self, line: Line[T]) -> Turn[T]:
        """Return what a line is compared by now."""
        self._settle(line)
        first = line.places[0]
        return (line.served - first.priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN, first.at, first.number, line)

    def _update_turn(self, line: Line[T]) -> None:
        """See to it that a line has a turn if its first item may go, and none if not, or if there is none.

        A turn that was noted is never later than the true one: what a line has had only grows, and what else changes comes here.
        """
        if not line.num_waiting or line.is_held_back():
            line.turn = None
            return
        if line.turn is None:
            self._settle(line)
            line.served = max(line.served, self._least_served())
        turn = self._turn(line)
        if line.turn is None or turn[:3] != line.turn[:3]:
            line.turn = turn
            heapq.heappush(self._turns, turn)
            if len(self._turns) > 2 * len(self._crowd) + NUM_KEPT:
                self._turns = [turn for turn in self._turns if turn[-1].turn is turn]
                heapq.heapify(self._turns)

    def _first_turn(self) -> Turn[T] | None:
        turns = self._turns
        while turns:
            turn = turns[0]
            line = turn[-1]
            if line.turn is not turn:
                heapq.heappop(turns)
                continue
            now = self._turn(line) if line.num_slots else turn
            if now[0] == turn[0]:
                return turn
            line.turn = now
            heapq.heapreplace(turns, now)
        return None

    def _least_served(self) -> int:
        """Return what those have had who have had least, of those who wait; if nobody does, those who were served last."""
        turn = self._first_turn()
        return self._floor if turn is None else min(turn[0], turn[-1].served)
