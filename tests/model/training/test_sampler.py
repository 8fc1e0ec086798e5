import numpy as np
import pytest

from dragoman.model.errors import InputError
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.training.sampler import PairSampler

SOURCES = ["the dog runs", "snow " * 30, "a dog", "unseenwords"]
TARGETS = ["über", "snow", "snow " * 30, "die Straße"]


def test_long_pairs_are_left_out_whichever_side_is_long(tokenizer: ByteLevelTokenizer) -> None:
    sampler = PairSampler(tokenizer, (SOURCES, TARGETS), (20, 20), 0.0, seed=1)
    assert (sampler.num_pairs, sampler.num_left_out) == (2, 2)
    sources, targets = sampler.sample(np.random.default_rng(0))
    assert [tokenizer.decode(ids) for ids in sources] == ["the dog runs", "unseenwords"]
    assert [tokenizer.decode(ids) for ids in targets] == ["über", "die Straße"]


def test_limits_count_the_special_token(tokenizer: ByteLevelTokenizer) -> None:
    length = len(tokenizer.encode("the dog runs"))
    assert PairSampler(tokenizer, (["the dog runs"], ["a"]), (length + 1, 9), 0.0, seed=1).num_pairs == 1
    with pytest.raises(InputError, match=f"no training pair is short enough for {length} source and 9 target tokens"):
        PairSampler(tokenizer, (["the dog runs"], ["a"]), (length, 9), 0.0, seed=1)


def test_dropout_never_makes_a_pair_too_long(tokenizer: ByteLevelTokenizer) -> None:
    limits = (12, 14)
    sampler = PairSampler(tokenizer, (SOURCES, TARGETS), limits, 0.9, seed=1)
    longest = [0, 0]
    for seed in range(30):
        for i, (rows, texts) in enumerate(zip(sampler.sample(np.random.default_rng(seed)), (SOURCES, TARGETS), strict=True)):
            longest[i] = max(longest[i], *map(len, rows))
            assert [tokenizer.decode(ids) for ids in rows] == [texts[0], texts[3]]
    assert longest[0] < limits[0]
    assert longest[1] < limits[1]


def test_same_seeds_give_the_same_epoch(tokenizer: ByteLevelTokenizer) -> None:
    first, second = (
        PairSampler(tokenizer, (SOURCES, TARGETS), (50, 50), 0.5, seed=3).sample(np.random.default_rng(4)) for _ in range(2)
    )
    assert first == second
    assert first != PairSampler(tokenizer, (SOURCES, TARGETS), (50, 50), 0.5, seed=3).sample(np.random.default_rng(5))


def test_both_sides_are_cut_independently(tokenizer: ByteLevelTokenizer) -> None:
    sampler = PairSampler(tokenizer, (SOURCES[:1], SOURCES[:1]), (50, 50), 0.5, seed=3)
    epochs = [sampler.sample(np.random.default_rng(seed)) for seed in range(20)]
    assert any(sources != targets for sources, targets in epochs)
