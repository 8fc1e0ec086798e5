"""Keys and values of every slot, in buffers that have room for what is there, not for all that could be.

Room is made for the longest source and the longest target at hand, in powers of two, and given back when nothing has needed it for
a while. What a row holds is the same bits whatever room there is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.export.bundle import Manifest, cross_kv_names, self_kv_names
from dragoman.server.runtime.memory import sparse_zeros

Buffer = NDArray[np.floating[Any]]

MIN_CAPACITY = 32
"""Positions that a row always has room for, if the model takes so many."""

STEPS_PER_REVIEW = 1024
"""Steps between two looks at whether the room is still needed."""

EXCESS = 4
"""Room is given back when a quarter of it would have done since the last look."""


class SlotCache:
    """Self-attention caches `[max_rows, H, T, Dh]`, cross-attention caches `[max_rows, H, S, Dh]`, and what is valid in them.

    T and S change: every method that may move the buffers says so, and `num_moves` counts how often it happened.

    Attributes:
        self_kv: Tensor name to buffer; row r holds `target_lengths[r]` positions.
        cross_kv: Tensor name to buffer; row r holds `source_lengths[r]` positions.
        source_lengths: `[max_rows]`, tokens, end-of-sequence included; 1 for a row that was never used.
        target_lengths: `[max_rows]`, positions decoded; 0 for a row out of use.
        num_moves: How often buffers were replaced, so that addresses kept elsewhere have become invalid.
    """

    def __init__(self, manifest: Manifest, max_rows: int) -> None:
        """Reserve buffers for short sources and targets."""
        self.max_source_tokens, self.max_target_tokens = manifest.max_source_tokens, manifest.max_target_tokens
        self._max_rows, self._num_heads, self._head_dim = max_rows, manifest.num_heads, manifest.head_dim
        self._element_type: type[np.floating[Any]] = np.float16 if manifest.precision == "fp16" else np.float32
        num_layers = manifest.num_decoder_layers
        self._self_names, self._cross_names = self_kv_names(num_layers), cross_kv_names(num_layers)
        self._self_kv = self._reserve(min(MIN_CAPACITY, self.max_target_tokens))
        self._cross_kv = self._reserve(min(MIN_CAPACITY, self.max_source_tokens))
        self.source_lengths = np.ones(max_rows, np.int64)
        self.target_lengths = np.zeros(max_rows, np.int64)
        self.num_moves = 0
        self._num_live_rows = 0
        self._num_steps = self._longest_source = self._longest_target = 0
        self._name_buffers()

    @property
    def cross_names(self) -> list[str]:
        """Names of the cross-attention tensors: the encoder's outputs, in the order `write_cross` takes them."""
        return self._cross_names

    @property
    def source_capacity(self) -> int:
        """Source tokens that a row has room for now (S)."""
        return int(self._cross_kv.shape[3])

    @property
    def target_capacity(self) -> int:
        """Target tokens that a row has room for now (T)."""
        return int(self._self_kv.shape[3])

    @property
    def num_bytes_reserved(self) -> int:
        """Size of the buffers. The operating system gives memory only to the parts that were written."""
        return self._self_kv.nbytes + self._cross_kv.nbytes

    @property
    def num_bytes_used(self) -> int:
        """Size of what is valid in the rows that were in use at the last step or have been filled since."""
        live = slice(self._num_live_rows)
        num_positions = int(self.source_lengths[live].sum() + self.target_lengths[live].sum())
        return num_positions * len(self._self_names) * self._num_heads * self._head_dim * self._self_kv.itemsize

    def write_cross(self, rows: Sequence[int], lengths: NDArray[np.int64], tensors: Sequence[Buffer]) -> None:
        """Store encoded sources: tensors `[B, H, S, Dh]`, of which row b goes to `rows[b]`; may move the buffers.

        What is beyond `lengths[b]` in row b is stored too, since one copy a tensor is faster, and never read.
        """
        longest = int(lengths.max())
        assert longest <= self.max_source_tokens, "a source is longer than the model takes"
        self._longest_source = max(self._longest_source, longest)
        if longest > self.source_capacity:
            self._move_cross(_capacity(longest, self.max_source_tokens))
        first, count = rows[0], len(rows)
        is_range = all(row == first + i for i, row in enumerate(rows))
        where = slice(first, first + count) if is_range else np.array(rows)  # a slice is copied faster
        for buffer, tensor in zip(self._cross_kv, tensors, strict=True):
            buffer[where, :, :longest] = tensor[:, :, :longest]
        self.source_lengths[where] = lengths
        self.target_lengths[where] = 0
        self._num_live_rows = max(self._num_live_rows, max(rows) + 1)

    def make_room(self, positions: NDArray[np.int64]) -> None:
        """Prepare for a step of rows `[0, N)` that writes at `positions` `[N]`; may move the buffers."""
        num_rows, longest = len(positions), int(positions.max()) + 1
        assert longest <= self.max_target_tokens, "a row is longer than its cache"
        self._num_live_rows = num_rows
        if longest > self.target_capacity:
            self._move_self(_capacity(longest, self.max_target_tokens))
        np.add(positions, 1, out=self.target_lengths[:num_rows])
        self._longest_target = max(self._longest_target, longest)
        self._num_steps += 1
        if self._num_steps == STEPS_PER_REVIEW:
            self._review()

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the valid part of a row: its source and the first `length` positions of its self-attention cache."""
        source_length = int(self.source_lengths[source])
        self.copy_positions(source, target, 0, length)
        self._cross_kv[:, target, :, :source_length] = self._cross_kv[:, source, :, :source_length]
        self.source_lengths[target] = source_length
        self._num_live_rows = max(self._num_live_rows, target + 1)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions `[start, stop)` of a row's self-attention cache."""
        self._self_kv[:, target, :, start:stop] = self._self_kv[:, source, :, start:stop]
        self.target_lengths[target] = stop

    def _review(self) -> None:
        """Give back room that nothing has needed since the last review."""
        live = self.source_lengths[: self._num_live_rows]
        longest_source = max(self._longest_source, int(live.max()))
        if (needed := _capacity(longest_source, self.max_source_tokens)) * EXCESS <= self.source_capacity:
            self._move_cross(needed)
        if (needed := _capacity(self._longest_target, self.max_target_tokens)) * EXCESS <= self.target_capacity:
            self._move_self(needed)
        self._num_steps = self._longest_source = self._longest_target = 0

    def _move_cross(self, capacity: int) -> None:
        """Replace the cross-attention caches by larger or smaller ones."""
        self._cross_kv = self._moved(self._cross_kv, self.source_lengths, capacity)
        self._name_buffers()

    def _move_self(self, capacity: int) -> None:
        """Replace the self-attention caches by larger or smaller ones."""
        self._self_kv = self._moved(self._self_kv, self.target_lengths, capacity)
        self._name_buffers()

    def _moved(self, old: Buffer, lengths: NDArray[np.int64], capacity: int) -> Buffer:
        """Return a copy of the valid part of the live rows, with room for `capacity` positions."""
        new = self._reserve(capacity)
        room = min(capacity, old.shape[3])  # a row that nobody uses may say that it holds more
        for row, length in enumerate(np.minimum(lengths[: self._num_live_rows], room).tolist()):
            new[:, row, :, :length] = old[:, row, :, :length]
        return new

    def _reserve(self, capacity: int) -> Buffer:
        """Reserve buffers `[2·L, max_rows, H, capacity, Dh]`."""
        shape = len(self._self_names), self._max_rows, self._num_heads, capacity, self._head_dim
        return sparse_zeros(shape, self._element_type)

    def _name_buffers(self) -> None:
        """Say where the buffers are now."""
        self.self_kv: dict[str, Buffer] = dict(zip(self._self_names, self._self_kv, strict=True))
        self.cross_kv: dict[str, Buffer] = dict(zip(self._cross_names, self._cross_kv, strict=True))
        self.num_moves += 1


def _capacity(longest: int, limit: int) -> int:
    """Return the power of two with room for `longest` positions, no more than the model can need."""
    return min(max(MIN_CAPACITY, 1 << (longest - 1).bit_length()), limit)
