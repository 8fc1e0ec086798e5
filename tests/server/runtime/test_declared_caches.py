"""Caches of other shapes than a Transformer's: states without positions, positions on another axis, shapes of several kinds."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.caches import Cache
from dragoman.export.manifest import Manifest
from dragoman.export.tensors import Tensors
from dragoman.server.runtime import cache as cache_module
from dragoman.server.runtime.cache import SlotCache

# Keys of two widths, a state of a recurrent layer, and what an encoder gives: with positions first, and once for the whole source.
CACHES = [
    Cache("keys", "self", [2, "T", 4]),
    Cache("state", "self", [6]),
    Cache("values", "self", [2, "T", 4]),
    Cache("wide", "self", [3, 5, "T"]),
    Cache("memory", "cross", ["S", 8]),
    Cache("summary", "cross", [3, 2]),
    Cache("projected", "cross", ["S", 8]),
]
POSITIONS = {"keys": 1, "values": 1, "wide": 2, "memory": 0, "projected": 0}


@pytest.fixture
def cache(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> SlotCache:
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 2)
    return SlotCache(declaring(tiny_bundle, CACHES), 4)


def declaring(bundle: Path, caches: list[Cache]) -> Manifest:
    """Return a bundle's manifest as it would be with other caches."""
    return msgspec.structs.replace(Bundle.open(bundle).manifest, caches=caches, tensors=Tensors.of_caches(caches))


def encoded(num_rows: int, length: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = [cache.row_shape(length) for cache in CACHES if cache.role == "cross"]
    return [1 + random.random((num_rows, *shape), np.float32) for shape in shapes]


def valid(name: str, row: np.ndarray, length: int) -> np.ndarray:
    return row if name not in POSITIONS else np.take(row, range(length), POSITIONS[name])


def fill(cache: SlotCache) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    for buffer in cache.self_kv.values():
        buffer[:] = random.standard_normal(buffer.shape)
    return {name: buffer.copy() for name, buffer in (cache.self_kv | cache.cross_kv).items()}


def test_buffers_have_the_declared_names_order_and_shapes(cache: SlotCache) -> None:
    found = {name: buffer.shape for name, buffer in (cache.self_kv | cache.cross_kv).items()}
    assert list(found.items()) == [(declared.name, (4, *declared.row_shape(2))) for declared in CACHES]
    assert cache.cross_names == ["memory", "summary", "projected"]
    assert all(buffer.flags.c_contiguous for buffer in cache.self_kv.values())


@pytest.mark.parametrize("rows", [[3, 1], [1, 2]])
def test_what_the_encoder_gives_goes_to_its_rows_whatever_its_shape(cache: SlotCache, rows: list[int]) -> None:
    tensors = encoded(2, 5)
    cache.write_cross(rows, np.array([5, 3]), tensors)
    others = [row for row in range(4) if row not in rows]
    for (name, buffer), tensor in zip(cache.cross_kv.items(), tensors, strict=True):
        for row, given, length in zip(rows, tensor, (5, 3), strict=True):
            np.testing.assert_array_equal(valid(name, buffer[row], length), valid(name, given, length))
        assert not buffer[others].any()


def test_tokens_side_by_side_go_where_tensors_apart_go(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes that take turns, positions on different axes, states between them, and rows in any order."""
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 2)
    shapes: list[list[int | str]] = [["S", 8], [6], [3, "S", 4], ["S", 8], [2, 3], [3, "S", 4], [6], [2, 5, "S"]]
    caches = [CACHES[0], *(Cache(f"given_{i}", "cross", shape) for i, shape in enumerate(shapes))]
    packed, padded = (SlotCache(declaring(tiny_bundle, caches), 4) for _ in range(2))
    lengths, rows = np.array([2, 5, 1]), [3, 0, 2]
    random = np.random.default_rng(5)
    tensors = [random.random((3, *cache.row_shape(5)), np.float32) for cache in caches[1:]]
    given = list(zip(caches[1:], tensors, strict=True))
    indexed = [(cache, tensor) for cache, tensor in given if cache.position_axis is not None]
    tokens = [
        np.concatenate([np.take(tensor[b], t, cache.position_axis).ravel() for cache, tensor in indexed])
        for b, length in enumerate(lengths)
        for t in range(length)
    ]
    states = [np.concatenate([tensor[b].ravel() for cache, tensor in given if cache.position_axis is None]) for b in range(3)]
    packed.write_packed(rows, lengths, np.stack(tokens), np.stack(states))
    padded.write_cross(rows, lengths, tensors)
    assert (packed.token_columns, packed.state_columns) == (len(tokens[0]), len(states[0])) == (50, 18)
    assert packed.source_capacity == padded.source_capacity == 8
    assert packed.source_lengths.tolist() == padded.source_lengths.tolist() == [5, 1, 1, 2]
    for cache in caches[1:]:
        for row, length in zip(rows, lengths, strict=True):
            axis = cache.position_axis
            both = [each.cross_kv[cache.name][row] for each in (packed, padded)]
            found, expected = both if axis is None else (np.take(buffer, range(length), axis) for buffer in both)
            np.testing.assert_array_equal(found, expected)
        assert not packed.cross_kv[cache.name][1].any(), "a row of nobody's"


def test_a_new_source_begins_with_a_state_of_zeros(cache: SlotCache) -> None:
    fill(cache)
    before = cache.self_kv["state"].copy()
    cache.write_cross([2], np.array([1]), encoded(1, 1))
    assert not cache.self_kv["state"][2].any()
    np.testing.assert_array_equal(np.delete(cache.self_kv["state"], 2, 0), np.delete(before, 2, 0))


def test_copied_row_has_the_whole_state_and_the_valid_positions(cache: SlotCache) -> None:
    cache.write_cross([0, 1, 2, 3], np.array([3, 6, 5, 1]), encoded(4, 6))
    cache.make_room(np.array([7, 7, 7, 7]))
    before = fill(cache)
    cache.copy_row(2, 0, 4)
    for name, buffer in (cache.self_kv | cache.cross_kv).items():
        length = 4 if name in cache.self_kv else 5
        np.testing.assert_array_equal(valid(name, buffer[0], length), valid(name, before[name][2], length))
        np.testing.assert_array_equal(buffer[1:], before[name][1:])
        if name in POSITIONS:
            beyond = [place for place in range(buffer.shape[1 + POSITIONS[name]]) if place >= length]
            axis = POSITIONS[name]
            np.testing.assert_array_equal(np.take(buffer[0], beyond, axis), np.take(before[name][0], beyond, axis))


def test_copied_positions_take_the_state_along(cache: SlotCache) -> None:
    cache.write_cross([0, 1], np.array([2, 2]), encoded(2, 2))
    cache.make_room(np.array([7, 7]))
    before = fill(cache)
    cache.copy_positions(1, 0, 3, 5)
    np.testing.assert_array_equal(cache.self_kv["state"][0], before["state"][1])
    np.testing.assert_array_equal(cache.self_kv["wide"][0, :, :, 3:5], before["wide"][1, :, :, 3:5])
    np.testing.assert_array_equal(cache.self_kv["wide"][0, :, :, :3], before["wide"][0, :, :, :3])
    for name in cache.cross_kv:
        np.testing.assert_array_equal(cache.cross_kv[name], before[name])


def test_caches_without_positions_stay_where_they_are_when_others_grow(cache: SlotCache) -> None:
    cache.write_cross([0, 1], np.array([2, 1]), encoded(2, 2))
    cache.make_room(np.array([1, 0]))
    before = fill(cache)
    places = {name: (cache.self_kv | cache.cross_kv)[name].ctypes.data for name in ("state", "summary")}
    cache.make_room(np.array([2, 1]))
    cache.write_cross([3], np.array([9]), encoded(1, 9, seed=2))
    assert (cache.target_capacity, cache.source_capacity) == (4, 16)
    for name, place in places.items():
        assert (cache.self_kv | cache.cross_kv)[name].ctypes.data == place
    np.testing.assert_array_equal(cache.self_kv["wide"][0, :, :, :2], before["wide"][0])
    np.testing.assert_array_equal(cache.cross_kv["memory"][0, :2], before["memory"][0])


def test_bytes_are_those_of_what_is_valid(cache: SlotCache) -> None:
    cache.write_cross([0, 1], np.array([2, 1]), encoded(2, 2))
    cache.make_room(np.array([1, 0]))
    written, given = 8 + 8 + 15, 8 + 8
    assert cache.num_bytes_used == 4 * (3 * written + 3 * given + 2 * (6 + 6))
    assert cache.num_bytes_reserved == 4 * 4 * (2 * (written + given) + 6 + 6)
