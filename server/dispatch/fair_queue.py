"""Whose turn it is: a queue in which every caller has a line of its own. Policy over plain objects: no clock, no I/O.

Weighted fair queuing with counters of tokens (Sheng et al., "Fairness in Serving Large Language Models", 2024): what a caller is
served counts, by its weight, and the next is the first in line of the caller who has had least. Who comes back to the queue begins
where the least served of those who wait are, so that idleness earns nothing, nor does the time in which a caller's own limit of
slots holds it back.
"""

import heapq
from collections.abc import Collection
from typing import Generic

from dragoman.server.dispatch.caller_queue import NUM_KEPT, Line, Place, T, Turn
from dragoman.server.engine.messages import Share


class FairQueue(Generic[T]):
    """Lines of callers, and whose turn it is.

    Between callers: the next is who has been served least, by weight. The priority of a caller's first item gives it a lead of
    `line.TOKENS_PER_PRIORITY` for each step, which is used up once it is so far ahead: in the long run priority wins nobody more
    than the share that its weight says. Of equals that one goes first whose first item has the earlier place.

    Within a line: by place, and of equal places in the order in which they came. With a single caller that is all there is.

    A caller whose first item needs more slots than its share's `max_slots` leaves is passed over until it does not. An item that
    needs more than that by itself, which it may after a limit was lowered, goes when its caller holds none.

    Attributes:
        num_tokens: Sizes of all that waits.
        num_slots: Slots that all that waits will hold.
        num_held_back: Those of them that limits of callers do not let them have now.
        parts_of_weight: The sum of the weights of those who wait, see `Line`.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_slots = 0
        self.num_held_back = 0
        self.parts_of_weight = 0
        self._num_waiting = 0
        self._lines: dict[str, Line[T]] = {}
        self._crowd: dict[Line[T], None] = {}
        self._turns: list[Turn[T]] = []
        self._num_pushed = self._num_held = self._num_ticks = self._floor = 0
        self._num_lines_kept = NUM_KEPT

    def __len__(self) -> int:
        """Return how many items wait."""
        return self._num_waiting

    @property
    def crowd(self) -> Collection[Line[T]]:
        """The lines in which anything waits."""
        return self._crowd.keys()

    def line(self, caller: str) -> Line[T] | None:
        """Return a caller's line; None for one that waits for nothing and has nothing to catch up with."""
        return self._lines.get(caller)

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
        line = self._lines.get(share.caller)
        if line is None:
            line = self._new_line(share)
        has_new_share = share != line.share
        if has_new_share:
            self._exchange(line, share)
        self._num_pushed += 1
        if not len(line):
            self._crowd[line] = None
            self.parts_of_weight += line.parts_of_weight
        is_first = line.push(Place(at, self._num_pushed, item, priority, size, num_slots))
        self._num_waiting += 1
        self.num_tokens += size
        self.num_slots += num_slots
        if is_first or has_new_share or line.turn is None:
            self._update_turn(line)
        self._reckon(line)

    def first(self) -> T | None:
        """Return the item whose turn it is; None if none waits but such as their callers' limits hold back."""
        turn = self._first_turn()
        return None if turn is None else turn[-1].first.item

    def items(self) -> list[T]:
        """Return everything that waits."""
        return [place.item for line in self._crowd for place in line.places()]

    def charge(self, share: Share, size: int, num_slots: int) -> bool:
        """Charge a caller for an item that does not have to wait, as `push` and `take` would; nothing may wait.

        Returns:
            Whether the caller's own limit of slots lets the item go; if not, nothing is charged.
        """
        assert not self._num_waiting
        line = self._lines.get(share.caller)
        if line is None:
            line = self._new_line(share)
        elif share != line.share:
            self._exchange(line, share)
        if share.max_slots and line.num_slots and line.num_slots + num_slots > share.max_slots:
            return False
        line.settle(self._num_ticks)
        line.served = self._floor = max(line.served, self._floor) + size * line.parts_per_token
        line.num_slots += num_slots
        self._num_held += num_slots
        if not self._num_held:
            self._forget_all()
        return True

    def take(self, item: T, caller: str) -> None:
        """Let an item of a caller's that waits have its tokens and slots, at its caller's charge."""
        line = self._lines[caller]
        place, _ = self._leave(item, line)
        line.settle(self._num_ticks)
        line.served += place.size * line.parts_per_token
        line.num_slots += place.num_slots
        self._num_held += place.num_slots
        self._floor = max(self._floor, line.served)
        self._update_turn(line)
        self._reckon(line)

    def remove(self, item: T, caller: str) -> None:
        """Let an item of a caller's wait no longer."""
        line = self._lines[caller]
        if self._leave(item, line)[1]:
            self._update_turn(line)
        self._reckon(line)

    def give_back(self, caller: str, num_slots: int) -> None:
        """Note that a caller holds so many slots less."""
        line = self._lines[caller]
        assert 0 <= num_slots <= line.num_slots
        line.settle(self._num_ticks)
        line.num_slots -= num_slots
        self._num_held -= num_slots
        if line.turn is None:
            self._update_turn(line)
        self._reckon(line)

    def tick(self) -> None:
        """Charge every caller a token for each slot that it holds."""
        self._num_ticks += 1

    def least_served(self) -> int:
        """Return what those have had who have had least, of those who wait; if nobody does, those who were served last."""
        turn = self._first_turn()
        return self._floor if turn is None else min(turn[0], turn[-1].served)

    def served(self, caller: str) -> int:
        """Return what a caller has had, as a new item of its own will be judged by."""
        line = self._lines.get(caller)
        if line is None:
            return self.least_served()
        line.settle(self._num_ticks)
        return line.served if line.turn is not None else max(line.served, self.least_served())

    def turn(self, line: Line[T]) -> Turn[T]:
        """Return what a line in which something waits is compared by now."""
        return line.turn_at(self._num_ticks)

    def _forget_all(self) -> None:
        """Forget what callers have had: nothing waits and nothing is held, so nobody is ahead of anybody any more."""
        self._lines.clear()
        self._turns.clear()
        self._floor = 0

    def _new_line(self, share: Share) -> Line[T]:
        """Return a line for a caller that has none; forget those in which nothing waits and which have nothing to catch up with."""
        if len(self._lines) >= self._num_lines_kept:
            floor = self.least_served()
            idle = [line for line in self._lines.values() if not (len(line) or line.num_slots) and line.served <= floor]
            for line in idle:
                del self._lines[line.share.caller]
            self._num_lines_kept = 2 * len(self._lines) + NUM_KEPT
        new = self._lines[share.caller] = Line(share, self._num_ticks)
        return new

    def _exchange(self, line: Line[T], share: Share) -> None:
        """Exchange a caller's share."""
        before = line.parts_of_weight
        line.exchange(share, self._num_ticks)
        if len(line):
            self.parts_of_weight += line.parts_of_weight - before

    def _leave(self, item: T, line: Line[T]) -> tuple[Place[T], bool]:
        """Take an item out of its line; return its place and whether it was the first, so that the turn has to be updated."""
        place, was_first = line.remove(item)
        self._num_waiting -= 1
        self.num_tokens -= place.size
        self.num_slots -= place.num_slots
        if not len(line):
            del self._crowd[line]
            self.parts_of_weight -= line.parts_of_weight
        return place, was_first

    def _reckon(self, line: Line[T]) -> None:
        """Reckon anew what a caller's own limit holds back."""
        if line.share.max_slots or line.num_held_back:
            before, line.num_held_back = line.num_held_back, line.held_back()
            self.num_held_back += line.num_held_back - before

    def _update_turn(self, line: Line[T]) -> None:
        """Give a line a turn if its first item may go, and take it away if not.

        A turn that was noted is never later than the true one: what a line has had only grows, and what else changes comes here.
        """
        if not len(line) or line.is_held_back:
            line.turn = None
            if not (self._num_waiting or self._num_held):  # nobody is ahead of anybody any more
                self._forget_all()
            return
        if line.turn is None:
            line.settle(self._num_ticks)
            line.served = max(line.served, self.least_served())
        turns, before = self._turns, line.turn
        line.turn = line.turn_at(self._num_ticks)
        if before is not None and turns[0] is before:
            heapq.heapreplace(turns, line.turn)
            return
        heapq.heappush(turns, line.turn)
        if len(turns) > 2 * len(self._crowd) + NUM_KEPT:
            self._turns = [turn for turn in turns if turn[-1].turn is turn]
            heapq.heapify(self._turns)

    def _first_turn(self) -> Turn[T] | None:
        """Return the first of the turns, as it is now; None if there is none."""
        turns = self._turns
        while turns:
            turn = turns[0]
            line = turn[-1]
            if line.turn is not turn:
                heapq.heappop(turns)
                continue
            # Also where it holds no slots any more: what it was charged for those it held may not be in this turn yet.
            if (now := line.turn_at(self._num_ticks))[0] == turn[0]:
                return turn
            line.turn = now
            heapq.heapreplace(turns, now)
        return None
