"""Rows of the caches: what is written goes where it belongs, and nowhere else."""

from pathlib import Path

import numpy as np
import pytest

from export.bundle import Bundle
from server.runtime.cache import SlotCache


@pytest.fixture
def cache(tiny_bundle: Path) -> SlotCache:
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


def test_encoded_sources_go_to_their_rows_without_padding(cache: SlotCache) -> None:
    tensors = encoded(cache, 2, 6)
    cache.write_cross([3, 1], np.array([6, 2]), tensors)
    assert cache.source_lengths.tolist() == [1, 2, 1, 6]
    for buffer, tensor in zip(cache.cross_kv.values(), tensors, strict=True):
        np.testing.assert_array_equal(buffer[3, :, :6], tensor[0])
        np.testing.assert_array_equal(buffer[1, :, :2], tensor[1, :, :2])
        assert not buffer[1, :, 2:].any() and not buffer[[0, 2]].any()


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
