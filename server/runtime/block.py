"""Caches of one shape for every row, in one array, so that a row of all of them is copied in one call."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.export.caches import Cache
from dragoman.server.runtime.memory import sparse_zeros

Element = type[np.number[Any]]
Buffer = NDArray[np.number[Any]]


class CacheBlock:
    """The caches of one role and shape, `[n, max_rows, *shape]`; where the shape has an axis of positions, its room can change.

    Attributes:
        names: Of the caches, n of them.
        places: Where each stands among the caches of its role.
        buffer: What they hold.
        element_type: Of the numbers.
        is_indexed: Whether there is an axis of positions.
    """

    def __init__(self, caches: Sequence[tuple[int, Cache]], max_rows: int, element_type: Element, capacity: int) -> None:
        """Reserve room for `capacity` positions of every row.

        Args:
            caches: Of one role and shape, each with its place among those of the role.
            max_rows: Rows.
            element_type: Of the numbers.
            capacity: Positions; it means nothing where the shape has no axis of them.
        """
        self.names, self.places = [cache.name for _, cache in caches], [place for place, _ in caches]
        self._cache, self._max_rows, self.element_type = caches[0][1], max_rows, element_type
        self.is_indexed = self._cache.position_axis is not None
        self._inner = (slice(None),) * (self._cache.position_axis or 0)  # the axes of a row before that of positions
        self._take(self._reserve(capacity))

    @property
    def num_bytes(self) -> int:
        """Size of what is reserved."""
        return self.buffer.nbytes

    @property
    def position_bytes(self) -> int:
        """What a position of a row takes in all of the caches; all of the row where there is no axis of positions."""
        return len(self.names) * self._cache.elements_per_position * self.buffer.itemsize

    def write(self, where: slice | NDArray[np.int64], longest: int, tensors: Sequence[Buffer]) -> None:
        """Store rows: tensors `[B, *shape]` of these caches, of which the first `longest` positions are taken."""
        valid = (*self._inner, slice(longest)) if self.is_indexed else ()
        for buffer, tensor in zip(self.buffer, tensors, strict=True):
            buffer[(where, *valid)] = tensor[(slice(None), *valid)]

    def write_packed(self, row: int, tokens: Buffer) -> None:
        """Store one row: `[S, …]`, in which each position has what these caches hold of it, one cache after the other."""
        assert self.is_indexed
        view = self._view[:, row, : len(tokens)]
        view[...] = np.moveaxis(tokens.reshape(len(tokens), len(view), *view.shape[2:]), 0, 1)

    def write_state(self, row: int, numbers: Buffer) -> None:
        """Store one row: what these caches hold of it, one cache after the other."""
        assert not self.is_indexed
        view = self.buffer[:, row]
        view[...] = numbers.reshape(view.shape)

    def clear(self, where: slice | NDArray[np.int64]) -> None:
        """Put zeros in place of all that rows hold."""
        self.buffer[:, where] = 0

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions `[start, stop)` of a row; all of it where there is no axis of positions."""
        view = self._view
        if self.is_indexed:
            view[:, target, start:stop] = view[:, source, start:stop]
        else:
            view[:, target] = view[:, source]

    def resize(self, lengths: Sequence[int], capacity: int) -> None:
        """Take another array, with room for `capacity` positions, that holds as many of the first rows' as `lengths` says."""
        assert self.is_indexed
        old = self._view
        self._take(self._reserve(capacity))
        for row, length in enumerate(lengths):
            self._view[:, row, :length] = old[:, row, :length]

    def _take(self, buffer: Buffer) -> None:
        """Use an array; `_view` is the same with the positions right after the rows."""
        self.buffer = buffer
        self._view = np.moveaxis(buffer, 2 + len(self._inner), 2) if self.is_indexed else buffer

    def _reserve(self, capacity: int) -> Buffer:
        shape = len(self.names), self._max_rows, *self._cache.row_shape(capacity)
        return sparse_zeros(shape, self.element_type)


def blocks_of(caches: Sequence[Cache], max_rows: int, element_type: Element, capacity: int) -> list[CacheBlock]:
    """Return the caches of a role in as few blocks as they have kinds; numbers have the type given where a cache says no other."""
    kinds: dict[tuple[Element, tuple[int | str, ...]], list[tuple[int, Cache]]] = {}
    for place, cache in enumerate(caches):
        element = np.int8 if cache.precision == "int8" else element_type
        kinds.setdefault((element, tuple(cache.shape)), []).append((place, cache))
    return [CacheBlock(alike, max_rows, element, capacity) for (element, _), alike in kinds.items()]
