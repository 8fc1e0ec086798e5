"""Key and value caches of all slots on the CPU."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.export.manifest import Manifest
from dragoman.export.tensors import QUERIES_OUTPUT, Cache, cross_key_name, names_of


def sparse_zeros(shape: tuple[int, ...], dtype: type[np.number[Any]]) -> NDArray[np.number[Any]]:
    """Return zeros whose memory is allocated page by page on writing; raise `MemoryError` if they cannot be reserved.

    NumPy requests huge pages: a cache with few positions in use would take most of its reserved memory, and clearing it would delay
    the first step by 50 to 120 ms for 200 MB.
    """
    count = math.prod(shape)
    num_bytes = count * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes of caches") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


Element = type[np.number[Any]]
Buffer = NDArray[np.number[Any]]


class CacheBlock:
    """The n caches of one role and shape, `[n, max_rows, *shape]`; `places` are their indices among the caches of the role."""

    def __init__(self, caches: Sequence[tuple[int, Cache]], max_rows: int, element_type: Element, capacity: int) -> None:
        """Reserve `capacity` positions of every row; each cache comes with its index among those of its role."""
        self.names, self.places = [cache.name for _, cache in caches], [place for place, _ in caches]
        self._cache, self._max_rows, self.element_type = caches[0][1], max_rows, element_type
        self.is_indexed = self._cache.position_axis is not None
        self._inner = (slice(None),) * (self._cache.position_axis or 0)  # the axes of a row before that of positions
        self._take(self._reserve(capacity))

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of a row in all caches; of the whole row without an axis of positions."""
        return len(self.names) * self._cache.elements_per_position * self.buffer.itemsize

    def write(self, where: slice | NDArray[np.int64], longest: int, tensors: Sequence[Buffer]) -> None:
        """Store the first `longest` positions of rows: tensors `[B, *shape]`, one for each cache."""
        valid = (*self._inner, slice(longest)) if self.is_indexed else ()
        for buffer, tensor in zip(self.buffer, tensors, strict=True):
            buffer[(where, *valid)] = tensor[(slice(None), *valid)]

    def write_packed(self, row: int, tokens: Buffer) -> None:
        """Store one row: `[S, …]`, with the concatenated numbers of all caches for each position."""
        assert self.is_indexed
        view = self._view[:, row, : len(tokens)]
        view[...] = np.moveaxis(tokens.reshape(len(tokens), len(view), *view.shape[2:]), 0, 1)

    def write_state(self, row: int, numbers: Buffer) -> None:
        """Store one row: the concatenated numbers of all caches."""
        assert not self.is_indexed
        view = self.buffer[:, row]
        view[...] = numbers.reshape(view.shape)

    def clear(self, where: slice | NDArray[np.int64]) -> None:
        self.buffer[:, where] = 0

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions `[start, stop)` of a row, or the whole row without an axis of positions."""
        view = self._view
        if self.is_indexed:
            view[:, target, start:stop] = view[:, source, start:stop]
        else:
            view[:, target] = view[:, source]

    def resize(self, lengths: Sequence[int], capacity: int) -> None:
        """Change the capacity, keeping the first `lengths[row]` positions of each row."""
        assert self.is_indexed
        old = self._view
        self._take(self._reserve(capacity))
        for row, length in enumerate(lengths):
            self._view[:, row, :length] = old[:, row, :length]

    def _take(self, buffer: Buffer) -> None:
        """Use an array; `_view` has the axis of positions right after that of rows."""
        self.buffer = buffer
        self._view = np.moveaxis(buffer, 2 + len(self._inner), 2) if self.is_indexed else buffer

    def _reserve(self, capacity: int) -> Buffer:
        shape = len(self.names), self._max_rows, *self._cache.row_shape(capacity)
        return sparse_zeros(shape, self.element_type)


def blocks_of(caches: Sequence[Cache], max_rows: int, element_type: Element, capacity: int) -> list[CacheBlock]:
    """Group the caches of a role by type and shape; `element_type` is for caches without a precision."""
    kinds: dict[tuple[Element, tuple[int | str, ...]], list[tuple[int, Cache]]] = {}
    for place, cache in enumerate(caches):
        element = np.int8 if cache.precision == "int8" else element_type
        kinds.setdefault((element, tuple(cache.shape)), []).append((place, cache))
    return [CacheBlock(alike, max_rows, element, capacity) for (element, _), alike in kinds.items()]


# Minimum positions of every row.
MIN_CAPACITY = 32
# Review interval in steps, and the factor of unused capacity that is given back.
STEPS_PER_REVIEW, EXCESS = 1024, 4

Columns = slice | NDArray[np.int64]


class SlotCache:
    """The caches that a bundle declares, `[max_rows, *shape]` each, and the valid length of each row.

    Capacities T and S change: methods that may move the buffers are marked, and `num_moves` counts the moves.

    Attributes:
        has_prompts: Whether sources are prompts, stored in the self-attention caches before the decoded positions.
        self_kv: Self-attention buffers by name; row r holds `target_lengths[r]` positions.
        cross_kv: Cross-attention buffers by name; row r holds `source_lengths[r]` positions.
        query_width: Numbers of the queries of all heads that align, for one position; 0 without any.
        kept_queries: `[max_rows, T, query_width]`, written for rows that want an alignment, and copied with their caches.
        output_names: Names of caches that are also outputs of a step, at the same address.
        token_columns: Numbers of all cross-attention caches for one source token.
        state_columns: Numbers of caches without an axis of positions for one source.
        source_lengths: `[max_rows]`, source tokens, or prompt tokens read; 1 or 0 for a row never used.
        target_lengths: `[max_rows]`, decoded positions including the prompt's; 0 for an unused row.
        num_moves: Replacements of buffers, each of which invalidates bound addresses.
    """

    def __init__(self, manifest: Manifest, max_rows: int) -> None:
        self.max_source_tokens, self.max_target_tokens = manifest.max_source_tokens, manifest.max_target_tokens
        self.source_capacity = min(MIN_CAPACITY, self.max_source_tokens)
        self.target_capacity = min(MIN_CAPACITY, self.max_target_tokens)
        element_type: Element = np.float16 if manifest.precision == "fp16" else np.float32
        written = [cache for cache in manifest.caches if cache.role == "self"]
        given = [cache for cache in manifest.caches if cache.role == "cross"]
        self.output_names = [cache.name for cache in manifest.caches if cache.is_output]
        self._self_names, self.cross_names = names_of(written, "self"), names_of(given, "cross")
        self._self_blocks = blocks_of(written, max_rows, element_type, self.target_capacity)
        self._cross_blocks = blocks_of(given, max_rows, element_type, self.source_capacity)
        self._columns, self.token_columns = _columns(given, [block for block in self._cross_blocks if block.is_indexed])
        self._state_columns, self.state_columns = _columns(given, [block for block in self._cross_blocks if not block.is_indexed])
        self.token_type = next((block.element_type for block in self._cross_blocks), element_type)
        self._states = [block for block in self._self_blocks if not block.is_indexed]
        self.has_prompts = manifest.has_prompts
        self.source_lengths = np.full(max_rows, 0 if self.has_prompts else 1, np.int64)
        self.target_lengths = np.zeros(max_rows, np.int64)
        self.query_width = 0
        if manifest.alignment:
            shape = next(cache.shape for cache in given if cache.name == cross_key_name(manifest.alignment[0].layer))
            self.query_width = len(manifest.alignment) * int(shape[-1])
            queries = Cache(QUERIES_OUTPUT, "self", ["T", self.query_width])
            self._self_blocks += blocks_of([queries], max_rows, np.float32, self.target_capacity)
        self.num_moves = 0
        self._num_live_rows = 0
        self._num_steps = self._longest_source = self._longest_target = 0
        self._name_buffers()

    @property
    def num_bytes_reserved(self) -> int:
        """Size of the buffers; only written pages take memory."""
        return sum(block.num_bytes for block in (*self._self_blocks, *self._cross_blocks))

    @property
    def num_bytes_used(self) -> int:
        """Bytes of valid positions in rows used by the last step or filled since."""
        live = slice(self._num_live_rows)
        sources, targets = int(self.source_lengths[live].sum()), int(self.target_lengths[live].sum())
        pairs = ((self._self_blocks, targets), (self._cross_blocks, sources))
        return sum(
            block.position_bytes * (num_positions if block.is_indexed else self._num_live_rows)
            for blocks, num_positions in pairs
            for block in blocks
        )

    def write_cross(self, rows: Sequence[int], lengths: NDArray[np.int64], tensors: Sequence[Buffer]) -> None:
        """Store encoded sources: tensors `[B, *shape]`, of which row b goes to `rows[b]`; may move the buffers.

        Padding beyond `lengths[b]` is stored too, in one copy for each tensor, and never read. Recurrent states begin with zeros.
        """
        longest = self._make_source_room(lengths)
        first, count = rows[0], len(rows)
        is_range = all(row == first + i for i, row in enumerate(rows))
        where = slice(first, first + count) if is_range else np.array(rows)  # a slice is copied faster
        for block in self._cross_blocks:
            block.write(where, longest, [tensors[place] for place in block.places])
        self._begin(where, lengths)
        self._num_live_rows = max(self._num_live_rows, max(rows) + 1)

    def write_packed(self, rows: Sequence[int], lengths: NDArray[np.int64], tokens: Buffer, states: Buffer) -> None:
        """Store sources encoded without padding, as `write_cross`: tokens `[P, token_columns]`, states `[B, state_columns]`."""
        self._make_source_room(lengths)
        start = 0
        for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            for block, columns in self._columns:
                block.write_packed(row, tokens[start : start + length, columns])
            for block, columns in self._state_columns:
                block.write_state(row, states[i, columns])
            start += length
        self._begin(np.array(rows), lengths)
        self._num_live_rows = max(self._num_live_rows, max(rows) + 1)

    def make_room(self, positions: NDArray[np.int64]) -> None:
        """Prepare for a step of rows `[0, N)` that writes at `positions` `[N]`; may move the buffers."""
        num_rows = len(positions)
        lengths = positions + 1
        if self.has_prompts:
            lengths += self.source_lengths[:num_rows]
        self._num_live_rows = num_rows
        self.make_target_room(int(lengths.max()))
        self.target_lengths[:num_rows] = lengths
        self._num_steps += 1
        if self._num_steps == STEPS_PER_REVIEW:
            self._review()

    def make_target_room(self, longest: int) -> None:
        """Reserve `longest` positions in the self-attention caches; may move the buffers."""
        assert longest <= self.max_target_tokens, "a row is longer than its cache"
        if longest > self.target_capacity:
            self._move_self(_capacity(longest, self.max_target_tokens))
        self._longest_target = max(self._longest_target, longest)

    def begin_prompt(self, row: int) -> None:
        self.note_read(row, 0)
        self._num_live_rows = max(self._num_live_rows, row + 1)

    def note_read(self, row: int, num_tokens: int) -> None:
        """Record the number of prompt tokens that a row has read."""
        self.source_lengths[row] = self.target_lengths[row] = num_tokens

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the valid part of a row: its source and the first `length` positions after it."""
        source_length = int(self.source_lengths[source])
        self._copy_written(source, target, 0, self._first_position(source) + length)
        for block in self._cross_blocks:
            block.copy_positions(source, target, 0, source_length)
        self.source_lengths[target] = source_length
        self._num_live_rows = max(self._num_live_rows, target + 1)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy decoded positions `[start, stop)`, and all caches without an axis of positions."""
        first = self._first_position(source)
        self._copy_written(source, target, first + start, first + stop)

    def _first_position(self, row: int) -> int:
        """Return the index of a row's first decoded position."""
        return int(self.source_lengths[row]) if self.has_prompts else 0

    def _copy_written(self, source: int, target: int, start: int, stop: int) -> None:
        for block in self._self_blocks:
            block.copy_positions(source, target, start, stop)
        self.target_lengths[target] = stop

    def _make_source_room(self, lengths: NDArray[np.int64]) -> int:
        """Reserve space for sources; return the length of the longest."""
        longest = int(lengths.max())
        assert longest <= self.max_source_tokens, "a source is longer than the model takes"
        self._longest_source = max(self._longest_source, longest)
        if longest > self.source_capacity:
            self._move_cross(_capacity(longest, self.max_source_tokens))
        return longest

    def _begin(self, where: slice | NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Record the lengths of rows with new sources."""
        for block in self._states:
            block.clear(where)
        self.source_lengths[where] = lengths
        self.target_lengths[where] = 0

    def _review(self) -> None:
        """Give back capacity not needed since the last review."""
        live = self.source_lengths[: self._num_live_rows]
        longest_source = max(self._longest_source, int(live.max()))
        if (needed := _capacity(longest_source, self.max_source_tokens)) * EXCESS <= self.source_capacity:
            self._move_cross(needed)
        if (needed := _capacity(self._longest_target, self.max_target_tokens)) * EXCESS <= self.target_capacity:
            self._move_self(needed)
        self._num_steps = self._longest_source = self._longest_target = 0

    def _move_cross(self, capacity: int) -> None:
        self._move(self._cross_blocks, self.source_lengths, self.source_capacity, capacity)
        self.source_capacity = capacity
        self._name_buffers()

    def _move_self(self, capacity: int) -> None:
        self._move(self._self_blocks, self.target_lengths, self.target_capacity, capacity)
        self.target_capacity = capacity
        self._name_buffers()

    def _move(self, blocks: Sequence[CacheBlock], lengths: NDArray[np.int64], old: int, new: int) -> None:
        room = min(old, new)  # an unused row may have a larger length
        valid = np.minimum(lengths[: self._num_live_rows], room).tolist()
        for block in blocks:
            if block.is_indexed:
                block.resize(valid, new)

    def _name_buffers(self) -> None:
        """Update the buffers by name."""
        self.self_kv = _named(self._self_names, self._self_blocks)
        self.cross_kv = _named(self.cross_names, self._cross_blocks)
        self.kept_queries = self._self_blocks[-1].buffer[0]
        self.num_moves += 1


def _named(names: Sequence[str], blocks: Sequence[CacheBlock]) -> dict[str, Buffer]:
    """Return each cache's buffer, in the order of the names."""
    found = {name: buffer for block in blocks for name, buffer in zip(block.names, block.buffer, strict=True)}
    return {name: found[name] for name in names}


def _columns(caches: Sequence[Cache], blocks: Sequence[CacheBlock]) -> tuple[list[tuple[CacheBlock, Columns]], int]:
    """Return each block with its column indices among the numbers of one position, and the number of columns."""
    places = sorted(place for block in blocks for place in block.places)
    sizes = [caches[place].elements_per_position for place in places]
    stops = dict(zip(places, np.cumsum(sizes).tolist(), strict=True))
    found: list[tuple[CacheBlock, Columns]] = []
    for block in blocks:
        parts = [np.arange(stops[place] - caches[place].elements_per_position, stops[place]) for place in block.places]
        columns = np.concatenate(parts)
        is_range = bool((np.diff(columns) == 1).all())
        found.append((block, slice(int(columns[0]), int(columns[-1]) + 1) if is_range else columns))  # a slice is not copied
    return found, sum(sizes)


def _capacity(longest: int, limit: int) -> int:
    """Return the power of two with space for `longest` positions, within the model's limit."""
    return min(max(MIN_CAPACITY, 1 << (longest - 1).bit_length()), limit)
