"""Rows of the caches: what is written goes where it belongs, and nowhere else."""

from pathlib import Path

import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.runtime import cache as cache_module
from dragoman.server.runtime.cache import SlotCache


@pytest.fixture
def cache(tiny_bundle: Path) -> SlotCache:
    return SlotCache(Bundle.open(tiny_bundle).manifest, 4)


@pytest.fixture
def growing(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> SlotCache:
    """Room for two positions to begin with, and frequent reviews."""
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 2)
    monkeypatch.setattr(cache_module, "STEPS_PER_REVIEW", 8)
    return SlotCache(Bundle.open(tiny_bundle).manifest, 4)


def encoded(cache: SlotCache, num_rows: int, length: int) -> list[np.ndarray]:
    """Return tensors `[B, H, S, Dh]` of which no two numbers are the same, none of them 0."""
    shape = num_rows, 4, length, 8
    size = int(np.prod(shape))
    return [(1 + i * size + np.arange(size, dtype=np.float32)).reshape(shape) for i in range(len(cache.cross_names))]


def test_buffers_have_the_shapes_of_the_graphs(cache: SlotCache) -> None:
    assert {buffer.shape for buffer in cache.self_kv.values()} == {(4, 4, 20, 8)}
    assert {buffer.shape for buffer in cache.cross_kv.values()} == {(4, 4, 24, 8)}
    assert len(cache.self_kv) == len(cache.cross_kv) == 4


@pytest.mark.parametrize("rows", [[3, 1], [1, 2], [2, 1]])
def test_encoded_sources_go_to_their_rows_and_nowhere_else(cache: SlotCache, rows: list[int]) -> None:
    tensors = encoded(cache, 2, 6)
    cache.write_cross(rows, np.array([6, 2]), tensors)
    assert cache.source_lengths[rows].tolist() == [6, 2]
    others = [row for row in range(4) if row not in rows]
    assert cache.source_lengths[others].tolist() == [1, 1]
    for buffer, tensor in zip(cache.cross_kv.values(), tensors, strict=True):
        np.testing.assert_array_equal(buffer[rows[0], :, :6], tensor[0])
        np.testing.assert_array_equal(buffer[rows[1], :, :2], tensor[1, :, :2])
        assert not buffer[rows, :, 6:].any() and not buffer[others].any()


def test_a_copied_row_is_exact_and_the_others_are_left_alone(cache: SlotCache) -> None:
    cache.write_cross([0, 1, 2, 3], np.array([3, 6, 5, 1]), encoded(cache, 4, 6))
    random = np.random.default_rng(0)
    for buffer in cache.self_kv.values():
        buffer[:] = random.standard_normal(buffer.shape)
    before = {name: buffer.copy() for name, buffer in (cache.self_kv | cache.cross_kv).items()}
    cache.copy_row(2, 0, 7)
    assert cache.source_lengths.tolist() == [5, 6, 5, 1]
    for name, buffer in (cache.self_kv | cache.cross_kv).items():
        length = 7 if name in cache.self_kv else 5
        np.testing.assert_array_equal(buffer[0, :, :length], before[name][2, :, :length])
        np.testing.assert_array_equal(buffer[0, :, length:], before[name][0, :, length:])
        np.testing.assert_array_equal(buffer[1:], before[name][1:])


def test_copied_positions_are_exact_and_all_else_is_left_alone(cache: SlotCache) -> None:
    cache.write_cross([0, 1, 2, 3], np.array([3, 6, 5, 1]), encoded(cache, 4, 6))
    random = np.random.default_rng(0)
    for buffer in cache.self_kv.values():
        buffer[:] = random.standard_normal(buffer.shape)
    before = {name: buffer.copy() for name, buffer in (cache.self_kv | cache.cross_kv).items()}
    cache.copy_positions(1, 3, 4, 9)
    assert cache.source_lengths.tolist() == [3, 6, 5, 1]
    for name, buffer in (cache.self_kv | cache.cross_kv).items():
        expected = before[name].copy()
        if name in cache.self_kv:
            expected[3, :, 4:9] = before[name][1, :, 4:9]
        np.testing.assert_array_equal(buffer, expected)


def test_room_is_made_for_a_longer_target_and_what_is_there_stays(growing: SlotCache) -> None:
    growing.write_cross([0, 1], np.array([2, 2]), encoded(growing, 2, 2))
    growing.make_room(np.array([1, 0]))
    random = np.random.default_rng(0)
    for buffer in growing.self_kv.values():
        buffer[:] = random.standard_normal(buffer.shape)
    before, num_moves = {name: buffer.copy() for name, buffer in growing.self_kv.items()}, growing.num_moves
    growing.make_room(np.array([2, 1]))
    assert (growing.target_capacity, growing.source_capacity, growing.num_moves) == (4, 2, num_moves + 1)
    for name, buffer in growing.self_kv.items():
        assert buffer.flags.c_contiguous and buffer.shape == (4, 4, 4, 8)
        np.testing.assert_array_equal(buffer[0, :, :2], before[name][0])
        np.testing.assert_array_equal(buffer[1, :, :1], before[name][1, :, :1])
        assert not buffer[0, :, 2:].any() and not buffer[1, :, 1:].any() and not buffer[2:].any()


def test_room_is_made_for_a_longer_source_and_the_others_stay(growing: SlotCache) -> None:
    tensors = encoded(growing, 2, 2)
    growing.write_cross([2, 0], np.array([2, 1]), tensors)
    growing.write_cross([1], np.array([9]), encoded(growing, 1, 9))
    assert growing.source_capacity == 16
    for buffer, tensor in zip(growing.cross_kv.values(), tensors, strict=True):
        np.testing.assert_array_equal(buffer[2, :, :2], tensor[0])
        np.testing.assert_array_equal(buffer[0, :, :1], tensor[1, :, :1])
        assert buffer[1, :, :9].all()
    assert growing.source_lengths.tolist() == [1, 9, 2, 1]


def test_no_more_room_is_made_than_the_model_can_need(growing: SlotCache) -> None:
    growing.write_cross([0], np.array([24]), encoded(growing, 1, 24))
    growing.make_room(np.array([19]))
    assert (growing.source_capacity, growing.target_capacity) == (24, 20)
    with pytest.raises(AssertionError):
        growing.make_room(np.array([20]))


def test_room_that_nothing_needs_any_more_is_given_back(growing: SlotCache) -> None:
    growing.write_cross([0], np.array([20]), encoded(growing, 1, 20))
    growing.make_room(np.array([17]))
    reserved = growing.num_bytes_reserved
    short = encoded(growing, 1, 3)
    growing.write_cross([0], np.array([3]), short)
    for _ in range(cache_module.STEPS_PER_REVIEW - 1):  # the review at the end of these still knows the long ones
        growing.make_room(np.array([0]))
    assert (growing.source_capacity, growing.target_capacity) == (24, 20)
    for _ in range(cache_module.STEPS_PER_REVIEW):
        growing.make_room(np.array([1]))
    assert (growing.source_capacity, growing.target_capacity) == (4, 2)
    assert growing.num_bytes_reserved < reserved / 4
    for buffer, tensor in zip(growing.cross_kv.values(), short, strict=True):
        np.testing.assert_array_equal(buffer[0, :, :3], tensor[0])


def test_room_that_a_running_row_needs_is_kept_however_long_it_runs(growing: SlotCache) -> None:
    growing.write_cross([1], np.array([24]), encoded(growing, 1, 24))
    for _ in range(3 * cache_module.STEPS_PER_REVIEW):
        growing.make_room(np.array([0, 15]))
    assert (growing.source_capacity, growing.target_capacity) == (24, 16)


def test_what_a_free_row_once_held_does_not_hinder_a_move(growing: SlotCache) -> None:
    """Between two rows that are filled lies one that nobody has used since it held more than there is room for now."""
    growing.write_cross([0, 1, 2], np.array([20, 20, 20]), encoded(growing, 3, 20))
    growing.make_room(np.array([0, 0, 0]))
    growing.write_cross([0], np.array([2]), encoded(growing, 1, 2))
    for _ in range(2 * cache_module.STEPS_PER_REVIEW):
        growing.make_room(np.array([0]))
    assert growing.source_capacity == 2
    tensors = encoded(growing, 1, 2)
    growing.write_cross([2], np.array([2]), tensors)
    growing.write_cross([3], np.array([9]), encoded(growing, 1, 9))
    assert growing.source_capacity == 16
    for buffer, tensor in zip(growing.cross_kv.values(), tensors, strict=True):
        np.testing.assert_array_equal(buffer[2, :, :2], tensor[0])


def test_bytes_in_use_are_those_of_valid_positions(growing: SlotCache) -> None:
    position = 4 * 4 * 8 * 4  # tensors, heads, head size, bytes
    assert growing.num_bytes_used == 0
    growing.write_cross([0, 1], np.array([2, 5]), encoded(growing, 2, 5))
    assert growing.num_bytes_used == 7 * position
    growing.make_room(np.array([0, 3]))
    assert growing.num_bytes_used == (7 + 1 + 4) * position
    assert growing.num_bytes_reserved == 4 * (8 + 4) * position
    growing.make_room(np.array([1]))
    assert growing.num_bytes_used == (2 + 2) * position, "the last row is free"
    growing.copy_row(0, 1, 2)
    assert growing.num_bytes_used == 2 * (2 + 2) * position
