"""Both forms of the encoder's graph, packed and padded, in front of one cache."""

import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.session import open_session
from dragoman.server.runtime import encoder as encoder_module
from dragoman.server.runtime.cache import SlotCache
from dragoman.server.runtime.device.model import DeviceModel
from dragoman.server.runtime.encoder import PackedEncoder, PaddedEncoder

SOURCES = [[5, 6, 7, 8, 1], [1], [*range(20, 42), 1], [9, 1]]
ROWS = [2, 0, 3, 1]


@pytest.fixture
def cache(bundle: Bundle) -> SlotCache:
    return SlotCache(bundle.manifest, 4)


@pytest.fixture
def packed(bundle: Bundle, cache: SlotCache) -> PackedEncoder:
    return PackedEncoder(open_session(str(bundle.encoder_path), 1), cache)


def valid(cache: SlotCache) -> list[bytes]:
    return [
        buffer[row, :, : len(source)].tobytes()
        for buffer in cache.cross_kv.values()
        for row, source in zip(ROWS, SOURCES, strict=True)
    ]


def test_packed_and_padded_sources_are_encoded_to_the_same_bits(
    bundle: Bundle, device_model: DeviceModel, packed: PackedEncoder, cache: SlotCache
) -> None:
    other = SlotCache(bundle.manifest, 4)
    packed.fill(cache, SOURCES, ROWS)
    PaddedEncoder(open_session(str(device_model.encoder_path), 1), 0).fill(other, SOURCES, ROWS)
    assert valid(cache) == valid(other)
    assert cache.source_lengths.tolist() == other.source_lengths.tolist() == [1, 2, 5, 23]


@pytest.mark.parametrize("max_bytes", [2**26, 0])
def test_what_was_encoded_stays_when_the_next_batch_is(
    packed: PackedEncoder, cache: SlotCache, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """Whether or not results are written where the last ones were."""
    monkeypatch.setattr(encoder_module, "MAX_KEPT_BYTES", max_bytes)
    first = packed.encode(SOURCES)
    before = [held.tokens.copy() for held in first]
    packed.encode([[77, 78, 1], [50, 1]])
    packed.fill(cache, SOURCES[::-1], ROWS[::-1])
    for held, kept, source in zip(first, before, SOURCES, strict=True):
        np.testing.assert_array_equal(held.tokens, kept)
        assert held.tokens.shape == (len(source), cache.token_columns) and held.tokens.base is None
        assert held.states.shape == (0,) and held.nbytes == held.tokens.nbytes


def test_memory_of_results_is_kept_up_to_a_limit(packed: PackedEncoder, cache: SlotCache, monkeypatch: pytest.MonkeyPatch) -> None:
    packed.fill(cache, SOURCES, ROWS)
    assert len(packed._kept) == 32, "31 tokens, rounded up"
    monkeypatch.setattr(encoder_module, "MAX_KEPT_BYTES", 32 * cache.token_columns * 4)
    packed.fill(cache, [SOURCES[2]] * 3, ROWS[:3])
    assert len(packed._kept) == 32
