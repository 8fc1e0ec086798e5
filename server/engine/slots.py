"""Which row of the decode batch belongs to whom.

Active rows are always `[0, num_rows)`, so that a step binds a prefix of the caches. Content is the runner's; this is bookkeeping.
"""

import heapq
from typing import NamedTuple

from server.engine.sequence import Sequence


class Move(NamedTuple):
    """A row whose content is to be copied to another."""

    source: int
    target: int


class Slots:
    """Owners of rows, with holes only between a release and the next `compact`."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._owners: list[Sequence | None] = []
        self._holes: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows in use, holes included."""
        return len(self._owners)

    def owner(self, row: int) -> Sequence:
        """Return whose row it is."""
        sequence = self._owners[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def take(self, sequence: Sequence) -> int:
        """Give a sequence one more row: the lowest hole, or the next one at the end."""
        if self._holes:
            row = heapq.heappop(self._holes)
            self._owners[row] = sequence
        else:
            row = len(self._owners)
            assert row < self.max_rows, "no row is free"
            self._owners.append(sequence)
        sequence.rows.append(row)
        return row

    def release(self, sequence: Sequence) -> None:
        """Take all rows of a sequence back."""
        for row in sequence.rows:
            assert self._owners[row] is sequence, f"row {row} is not its own"
            self._owners[row] = None
            heapq.heappush(self._holes, row)
        sequence.rows.clear()

    def compact(self) -> list[Move]:
        """Close the holes by moving the last rows into the first holes; the caller copies what the moves say, in order."""
        moves: list[Move] = []
        while self._holes:
            while self._owners and self._owners[-1] is None:
                self._owners.pop()
            hole = heapq.heappop(self._holes)
            if hole >= len(self._owners):
                self._holes.clear()  # the lowest hole is beyond the end, so are the others
                break
            last = len(self._owners) - 1
            sequence = self.owner(last)
            sequence.rows[sequence.rows.index(last)] = hole
            self._owners[hole] = sequence
            self._owners.pop()
            moves.append(Move(last, hole))
        return moves
