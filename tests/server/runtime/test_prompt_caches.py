"""Caches in which an answer follows its prompt: a row's positions are counted from where the prompt ends."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.caches import Cache
from dragoman.export.tensors import Tensors
from dragoman.server.runtime import cache as cache_module
from dragoman.server.runtime.cache import SlotCache

CACHES = [Cache(f"self_{part}_0", "self", [2, "T", 4]) for part in "kv"]


@pytest.fixture
def cache(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> SlotCache:
    """Four rows of at most 20 positions, prompt and answer together."""
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 2)
    tensors = Tensors.of_caches(CACHES, has_prompts=True)
    manifest = Bundle.open(tiny_bundle).manifest
    said = {"has_prompts": True, "max_source_tokens": manifest.max_target_tokens}
    manifest = msgspec.structs.replace(manifest, caches=CACHES, tensors=tensors, **said)
    return SlotCache(manifest, 4)


def read(cache: SlotCache, row: int, *stops: int) -> None:
    for stop in stops:
        cache.make_target_room(stop)
        cache.note_read(row, stop)


def filled(cache: SlotCache) -> np.ndarray:
    """Fill all there is with different numbers; return keys."""
    random = np.random.default_rng(1)
    for buffer in cache.self_kv.values():
        buffer[:] = 1 + random.random(buffer.shape)
    return cache.self_kv["self_k_0"].copy()


def test_a_row_that_was_never_used_holds_nothing(cache: SlotCache) -> None:
    assert cache.source_lengths.tolist() == cache.target_lengths.tolist() == [0] * 4
    cache.make_room(np.zeros(4, np.int64))
    assert cache.target_capacity == 2


def test_room_is_for_prompt_and_answer(cache: SlotCache) -> None:
    cache.begin_prompt(1)
    read(cache, 1, 3)
    assert (cache.target_capacity, cache.source_capacity) == (4, 2), "the source has no other place"
    cache.make_room(np.array([5, 1]))
    assert cache.target_capacity == 8 and cache.target_lengths[:2].tolist() == [6, 5]
    cache.make_room(np.array([5, 6]))
    assert cache.target_capacity == 16 and cache.target_lengths[:2].tolist() == [6, 10]
    cache.make_room(np.array([5, 16]))
    assert cache.target_capacity == 20, "no more than the model can need"
    with pytest.raises(AssertionError, match="longer than its cache"):
        cache.make_room(np.array([5, 17]))


def test_what_has_been_read_stays_when_caches_grow(cache: SlotCache) -> None:
    cache.begin_prompt(2)
    read(cache, 2, 2)
    before = filled(cache)
    read(cache, 2, 9)
    np.testing.assert_array_equal(cache.self_kv["self_k_0"][2, :, :2], before[2])


def test_a_step_beside_one_that_is_being_read_writes_behind_what_was_read(cache: SlotCache) -> None:
    cache.begin_prompt(0)
    read(cache, 0, 4)
    cache.make_room(np.array([0]))
    assert cache.source_lengths[0] == 4 and cache.target_lengths[0] == 5
    read(cache, 0, 7)
    assert cache.source_lengths[0] == cache.target_lengths[0] == 7


def test_a_copied_row_has_the_prompt_and_so_much_of_the_answer(cache: SlotCache) -> None:
    for row, length in ((0, 6), (3, 5)):
        cache.begin_prompt(row)
        read(cache, row, length)
    cache.make_room(np.array([3, 0, 0, 9]))
    before = filled(cache)
    cache.copy_row(3, 0, 2)
    keys = cache.self_kv["self_k_0"]
    np.testing.assert_array_equal(keys[0, :, :7], before[3, :, :7])
    np.testing.assert_array_equal(keys[0, :, 7:], before[0, :, 7:])
    np.testing.assert_array_equal(keys[1:], before[1:])
    assert (cache.source_lengths[0], cache.target_lengths[0]) == (5, 7)


def test_copied_positions_are_those_of_the_answer(cache: SlotCache) -> None:
    for row in (0, 1):
        cache.begin_prompt(row)
        read(cache, row, 5)
    cache.make_room(np.array([4, 4]))
    before = filled(cache)
    cache.copy_positions(1, 0, 1, 3)
    keys = cache.self_kv["self_k_0"]
    np.testing.assert_array_equal(keys[0, :, 6:8], before[1, :, 6:8])
    for places in (slice(6), slice(8, None)):
        np.testing.assert_array_equal(keys[0, :, places], before[0, :, places])
    np.testing.assert_array_equal(keys[1:], before[1:])
    assert cache.target_lengths[0] == 8


def test_bytes_in_use_are_those_of_prompts_and_answers(cache: SlotCache) -> None:
    for row, length in ((0, 6), (1, 3)):
        cache.begin_prompt(row)
        read(cache, row, length)
    assert cache.num_bytes_used == (6 + 3) * 2 * 8 * 4
    cache.make_room(np.array([1, 0]))
    assert cache.num_bytes_used == (6 + 2 + 3 + 1) * 2 * 8 * 4


def test_room_is_given_back_when_neither_prompts_nor_answers_need_it(cache: SlotCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "STEPS_PER_REVIEW", 3)
    cache.begin_prompt(0)
    read(cache, 0, 18)
    for _ in range(3):
        cache.make_room(np.array([0]))
    assert cache.target_capacity == 20
    cache.begin_prompt(0)
    read(cache, 0, 1)
    before = filled(cache)
    for _ in range(3):
        cache.make_room(np.array([1]))
    assert cache.target_capacity == 4
    np.testing.assert_array_equal(cache.self_kv["self_k_0"][0, :, :3], before[0, :, :3])
