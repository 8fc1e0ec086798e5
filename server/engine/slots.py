"""Allocation of the rows of the decode batch.

Active rows are always `[0, num_rows)`, so that a step binds a prefix of the caches; the runner holds their content.
"""

import heapq
from typing import NamedTuple

from dragoman.server.engine.sequence import Sequence


class Move(NamedTuple):
    """A row to copy to another."""

    source: int
    target: int


class Inheritance(NamedTuple):
    """Copy of a row whose hypothesis is continued more than once."""

    source: int
    target: int
    parent: int  # index of the continued hypothesis
    predecessor: int | None  # index of the hypothesis that had the target row before; None for a new row


class Slots:
    """Owners of rows; there are holes only between a release and the next `compact`."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._owners: list[Sequence | None] = []
        self._holes: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows in use, holes included."""
        return len(self._owners)

    def owner(self, row: int) -> Sequence:
        """Return the owner of a row."""
        sequence = self._owners[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def take(self, sequence: Sequence) -> int:
        """Append one row to a sequence's `rows`: the lowest hole, or the next one at the end."""
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
        """Free all rows of a sequence."""
        for row in list(sequence.rows):
            self.release_row(sequence, row)

    def release_row(self, sequence: Sequence, row: int) -> None:
        """Free one row of a sequence."""
        assert self._owners[row] is sequence, f"row {row} is not its own"
        self._owners[row] = None
        heapq.heappush(self._holes, row)
        sequence.rows.remove(row)

    def inherit(self, sequence: Sequence, parents: list[int]) -> list[Inheritance]:
        """Assign a row to each new hypothesis, given its parent's index, and update `rows`; return the copies, in any order.

        A hypothesis keeps its parent's row unless another already does; a twin gets the row of a hypothesis that is not continued,
        or a new row. Remaining rows are freed. No row is both source and target.
        """
        old = sequence.rows.copy()
        if parents == list(range(len(old))):
            return []
        continued = set(parents)
        unused = [i for i in range(len(old)) if i not in continued]
        rows: list[int] = []
        copies: list[Inheritance] = []
        kept: set[int] = set()
        for parent in parents:
            if parent not in kept:
                kept.add(parent)
                rows.append(old[parent])
                continue
            predecessor = unused.pop(0) if unused else None
            row = self.take(sequence) if predecessor is None else old[predecessor]
            rows.append(row)
            copies.append(Inheritance(old[parent], row, parent, predecessor))
        for i in unused:
            self.release_row(sequence, old[i])
        sequence.rows[:] = rows
        return copies

    def compact(self) -> list[Move]:
        """Close holes by moving the last rows into the first holes; the caller copies in this order."""
        moves: list[Move] = []
        while self._holes:
            while self._owners and self._owners[-1] is None:
                self._owners.pop()
            hole = heapq.heappop(self._holes)
            if hole >= len(self._owners):
                self._holes.clear()  # all holes are beyond the end if the lowest is
                break
            last = len(self._owners) - 1
            sequence = self.owner(last)
            sequence.rows[sequence.rows.index(last)] = hole
            self._owners[hole] = sequence
            self._owners.pop()
            moves.append(Move(last, hole))
        return moves
