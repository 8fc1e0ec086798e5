"""Slots of the caches hold exactly what was written, whatever is written, copied, grown and shrunk around them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.manifest import Manifest
from dragoman.export.tensors import Cache, Tensors, attention_caches
from dragoman.server.runtime import cache as cache_module
from dragoman.server.runtime.cache import SlotCache

Array = np.ndarray[Any, np.dtype[Any]]
NUM_ROWS, MAX_SOURCE, MAX_TARGET, REVIEW = 4, 24, 20, 8
# Keys of two widths, a state of a recurrent layer, and what an encoder gives: for each token, and once for the whole source.
MIXTURE = [
    Cache("keys", "self", [2, "T", 4]),
    Cache("state", "self", [6]),
    Cache("values", "self", [2, "T", 4]),
    Cache("wide", "self", [3, 5, "T"]),
    Cache("memory", "cross", ["S", 8]),
    Cache("summary", "cross", [6]),
    Cache("planes", "cross", [3, "S", 4]),
    Cache("projected", "cross", ["S", 8]),
    Cache("square", "cross", [2, 3]),
    Cache("again", "cross", [6]),
    Cache("deep", "cross", [2, 5, "S"]),
]
TEXT = [cache for cache in attention_caches(1, 2, 4) if cache.role == "self"]
KINDS = {"attention": attention_caches(2, 4, 8), "mixture": MIXTURE, "prompts": TEXT}


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two positions to begin with, and frequent reviews."""
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 2)
    monkeypatch.setattr(cache_module, "STEPS_PER_REVIEW", REVIEW)


@pytest.fixture
def manifest(tiny_bundle: Path) -> Manifest:
    return Bundle.open(tiny_bundle).manifest


def cache_of(manifest: Manifest, kind: str) -> SlotCache:
    caches, said = KINDS[kind], {"has_prompts": True, "max_source_tokens": MAX_TARGET} if kind == "prompts" else {}
    tensors = Tensors.of_caches(caches, has_prompts=kind == "prompts")
    return SlotCache(msgspec.structs.replace(manifest, caches=caches, tensors=tensors, **said), NUM_ROWS)


class Row:
    """Content of a row: of each cache its valid positions, of one without positions all of it."""

    def __init__(self, source: int, prompt: int, content: dict[str, Array]) -> None:
        self.source, self.prompt, self.content = source, prompt, content


class Machine:
    """Random operations on a cache, and a model of what its live rows hold.

    Attributes:
        rows: By slot, those whose content is defined.
        length: Positions of the caches that steps write, by slot.
    """

    def __init__(self, kind: str, cache: SlotCache, seed: int) -> None:
        self.cache, self.declared, self.is_prompt = cache, {x.name: x for x in KINDS[kind]}, kind == "prompts"
        self.random = np.random.default_rng(seed)
        self.rows: dict[int, Row] = {}
        self.length = dict.fromkeys(range(NUM_ROWS), 0)
        self.places = {name: self.buffers[name].ctypes.data for name, x in self.declared.items() if x.position_axis is None}

    @property
    def buffers(self) -> dict[str, Array]:
        return self.cache.self_kv | self.cache.cross_kv

    def part(self, name: str, row: Array, start: int, stop: int) -> Array:
        """Return a view of positions of a row, or all of it."""
        axis = self.declared[name].position_axis
        return row if axis is None else row[(slice(None),) * axis + (slice(start, stop),)]

    def names(self, role: str) -> list[str]:
        return [name for name, x in self.declared.items() if x.role == role]

    def write(self) -> None:
        """Store encoded sources, in either form, into rows in any order."""
        chosen = self.random.permutation(NUM_ROWS)[: self.random.integers(1, NUM_ROWS + 1)].tolist()
        lengths = self.random.choice([1, 2, 3, 5, 9, 17, MAX_SOURCE], len(chosen))
        shapes = {name: self.declared[name].row_shape(int(lengths.max())) for name in self.names("cross")}
        tensors = {name: self.random.random((len(chosen), *shape), np.float32) for name, shape in shapes.items()}
        if self.random.random() < 0.5:
            self.cache.write_cross(chosen, lengths, list(tensors.values()))
        else:
            self.cache.write_packed(chosen, lengths, *self.packed(tensors, lengths))
        for i, (slot, length) in enumerate(zip(chosen, lengths.tolist(), strict=True)):
            content = {name: self.part(name, tensor[i], 0, length) for name, tensor in tensors.items()}
            content |= {name: np.zeros(self.declared[name].row_shape(0), np.float32) for name in self.names("self")}
            self.rows[slot], self.length[slot] = Row(length, 0, content), 0

    def packed(self, tensors: dict[str, Array], lengths: Array) -> tuple[Array, Array]:
        indexed = {name: self.declared[name].position_axis for name in tensors}
        tokens = [
            np.concatenate([np.take(tensors[name][b], t, axis).ravel() for name, axis in indexed.items() if axis is not None])
            for b, length in enumerate(lengths)
            for t in range(length)
        ]
        states = [[*(tensors[name][b].ravel() for name in tensors if indexed[name] is None)] for b in range(len(lengths))]
        assert self.cache.token_columns == len(tokens[0])
        assert self.cache.state_columns == sum(map(len, states[0]))
        return np.stack(tokens), np.array([np.concatenate([*row, []]) for row in states], np.float32)

    def read(self) -> None:
        """Begin a prompt in a row, or read a piece more of one."""
        slot = int(self.random.integers(NUM_ROWS))
        row = self.rows.get(slot)
        if row is None or self.length[slot] > row.prompt or self.random.random() < 0.3:
            self.cache.begin_prompt(slot)
            content = {name: np.zeros(self.declared[name].row_shape(0), np.float32) for name in self.declared}
            row = self.rows[slot] = Row(0, 0, content)
        stop = min(row.prompt + int(self.random.integers(1, 8)), MAX_TARGET - 1)
        self.cache.make_target_room(stop)
        self.append(slot, row.prompt, stop)
        self.cache.note_read(slot, stop)
        row.source = row.prompt = stop

    def step(self) -> None:
        """Decode a token of the first rows; the others are free after it."""
        count = int(self.random.integers(1, NUM_ROWS + 1))
        if not set(range(count)) <= self.rows.keys():
            return
        positions = np.array([max(self.length[slot] - self.rows[slot].prompt, 0) for slot in range(count)])
        if any(self.rows[slot].prompt + position >= MAX_TARGET for slot, position in enumerate(positions)):
            return
        self.cache.make_room(positions)
        for slot, position in enumerate(positions.tolist()):
            start = self.rows[slot].prompt + position
            self.append(slot, start, start + 1)
        self.rows = {slot: row for slot, row in self.rows.items() if slot < count}

    def append(self, slot: int, start: int, stop: int) -> None:
        """Write positions of a row's caches as a graph does, and the states as a whole."""
        for name in self.names("self"):
            target = self.part(name, self.buffers[name][slot], start, stop)
            target[...] = self.random.random(target.shape, np.float32)
            axis, old = self.declared[name].position_axis, self.rows[slot].content[name]
            kept = target.copy() if axis is None else np.concatenate([self.part(name, old, 0, start), target], axis)
            self.rows[slot].content[name] = kept
        self.length[slot] = stop

    def copy(self) -> None:
        """Copy a row up to a position, or a range of positions over those of another."""
        if not self.rows:
            return
        source, target = int(self.random.choice(list(self.rows))), int(self.random.integers(NUM_ROWS))
        row, other = self.rows[source], self.rows.get(target)
        stop = int(self.random.integers(0, self.length[source] - row.prompt + 1)) if self.length[source] >= row.prompt else 0
        if source == target:
            return
        if other is not None and other.source == row.source and self.random.random() < 0.7:
            start = int(self.random.integers(0, min(stop, max(self.length[target] - other.prompt, 0)) + 1))
            self.cache.copy_positions(source, target, start, stop)
        else:
            start, other = 0, Row(row.source, row.prompt, dict(row.content))
            self.cache.copy_row(source, target, stop)
        for name in self.names("self"):
            parts = [self.part(name, other.content[name], 0, other.prompt + start)]
            parts.append(self.part(name, row.content[name], row.prompt + start, row.prompt + stop))
            axis = self.declared[name].position_axis
            other.content[name] = row.content[name].copy() if axis is None else np.concatenate(parts, axis)
        self.rows[target], self.length[target] = other, other.prompt + stop

    def check(self) -> None:
        cache = self.cache
        for name, buffer in self.buffers.items():
            capacity = cache.target_capacity if self.declared[name].role == "self" else cache.source_capacity
            assert buffer.shape == (NUM_ROWS, *self.declared[name].row_shape(capacity)) and buffer.flags.c_contiguous
            for slot, row in self.rows.items():
                length = self.length[slot] if self.declared[name].role == "self" else row.source
                np.testing.assert_array_equal(self.part(name, buffer[slot], 0, length), row.content[name])
        for slot, row in self.rows.items():
            assert (cache.source_lengths[slot], cache.target_lengths[slot]) == (row.source, self.length[slot])
        assert all(self.buffers[name].ctypes.data == place for name, place in self.places.items()), "states never move"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_live_rows_hold_what_was_written_after_any_operations(manifest: Manifest, kind: str, seed: int) -> None:
    machine = Machine(kind, cache_of(manifest, kind), seed)
    operations = [machine.read if machine.is_prompt else machine.write, *[machine.step] * 3, machine.copy]
    for _ in range(150):
        operations[machine.random.integers(len(operations))]()
        machine.check()
    assert machine.cache.num_moves > 2


def sources(cache: SlotCache, rows: list[int], *lengths: int) -> None:
    """Store sources of these lengths."""
    shapes = [x.row_shape(max(lengths)) for x in KINDS["attention"] if x.role == "cross"]
    cache.write_cross(rows, np.array(lengths), [np.ones((len(rows), *shape), np.float32) for shape in shapes])


def capacities(cache: SlotCache) -> tuple[int, int]:
    return cache.source_capacity, cache.target_capacity


def test_room_grows_by_powers_of_two_up_to_what_the_model_can_need(manifest: Manifest) -> None:
    cache = cache_of(manifest, "attention")
    for length, expected in ((2, 2), (3, 4), (4, 4), (9, 16), (16, 16), (17, 24), (24, 24)):
        sources(cache, [0], length)
        assert cache.source_capacity == expected
    for position, expected in ((1, 2), (2, 4), (15, 16), (19, 20)):
        cache.make_room(np.array([position]))
        assert cache.target_capacity == expected
    with pytest.raises(AssertionError, match="longer than its cache"):
        cache.make_room(np.array([20]))
    with pytest.raises(AssertionError):
        sources(cache, [0], 25)


def test_room_is_given_back_after_a_review_unless_a_row_needs_it(manifest: Manifest) -> None:
    cache = cache_of(manifest, "attention")
    sources(cache, [0], 20)
    cache.make_room(np.array([17]))
    reserved = cache.num_bytes_reserved
    sources(cache, [0], 3)
    for position in [0] * (REVIEW - 1) + [1] * (REVIEW - 1):  # the first review still knows the long ones
        cache.make_room(np.array([position]))
        assert capacities(cache) == (24, 20)
    cache.make_room(np.array([1]))
    assert capacities(cache) == (4, 2) and cache.num_bytes_reserved < reserved / 4
    sources(cache, [2], 2)
    sources(cache, [3], 9)
    assert cache.source_capacity == 16 and all(buffer[2, :, :2].all() for buffer in cache.cross_kv.values())
    sources(cache, [1], 24)
    for _ in range(3 * REVIEW):
        cache.make_room(np.array([0, 15]))
    assert capacities(cache) == (24, 16), "the row is still running"


def test_buffers_are_named_and_bytes_in_use_are_those_of_valid_positions_of_live_rows(manifest: Manifest) -> None:
    cache, position = cache_of(manifest, "attention"), 4 * 4 * 8 * 4  # tensors, heads, head size, bytes
    assert cache.num_bytes_used == 0
    sources(cache, [0, 1], 2, 5)
    assert cache.num_bytes_used == 7 * position
    cache.make_room(np.array([0, 3]))
    assert cache.num_bytes_used == (7 + 1 + 4) * position
    assert cache.num_bytes_reserved == 4 * (8 + 4) * position
    cache.make_room(np.array([1]))
    assert cache.num_bytes_used == (2 + 2) * position, "the last row is free"
    cache.copy_row(0, 1, 2)
    assert cache.num_bytes_used == 2 * (2 + 2) * position
    mixed = cache_of(manifest, "mixture")
    assert [*mixed.self_kv, *mixed.cross_kv] == [x.name for x in MIXTURE]
    assert mixed.cross_names == [x.name for x in MIXTURE if x.role == "cross"]
    assert mixed.source_lengths.tolist() == [1] * 4 and mixed.target_lengths.tolist() == [0] * 4
    mixed.make_room(np.array([1, 0]))
    written, given, states = 8 + 8 + 15, 8 + 12 + 8 + 10, 6 + 6 + 6 + 6
    assert mixed.num_bytes_used == 4 * (3 * written + 2 * given + 2 * states)
    assert mixed.num_bytes_reserved == 4 * 4 * (2 * (written + given) + states)
    text = cache_of(manifest, "prompts")
    assert text.source_lengths.tolist() == text.target_lengths.tolist() == [0] * 4
    for row, length in ((0, 6), (1, 3)):
        text.begin_prompt(row)
        text.note_read(row, length)
    assert text.num_bytes_used == (6 + 3) * 2 * 8 * 4
    text.make_room(np.array([1, 0]))
    assert text.num_bytes_used == (6 + 2 + 3 + 1) * 2 * 8 * 4
    empty = cache_of(manifest, "prompts")
    empty.make_room(np.zeros(4, np.int64))
    assert empty.target_capacity == 2
