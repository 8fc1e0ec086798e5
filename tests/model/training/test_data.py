"""Batches of training pairs: special tokens, buckets of like lengths, and epochs of BPE dropout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.model.bpe_dropout import NUM_VARIANTS, BpeDropout
from dragoman.model.config import ModelConfig
from dragoman.model.errors import InputError
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.training.data import collate
from dragoman.model.training.sampler import PairSampler, bucket

TEXTS = ["the dog runs through snow .", "über die Straße", " leading  and trailing ", "собака 雪 🙂 don't", "</s> <pad>"]
TEXTS += ["façade" * 5, "unseen wörds, 123456"]
SOURCES = ["the dog runs", "snow " * 30, "a dog", "unseenwords"]
TARGETS = ["über", "snow", "snow " * 30, "die Straße"]


def test_batch_has_special_tokens_where_the_model_wants_them() -> None:
    config = ModelConfig(source_vocab_size=20, target_vocab_size=20, pad_id=0, eos_id=1, decoder_start_id=2)
    batch = collate([[5, 6], [7]], [[8], [9, 10, 11]], config)
    assert batch.source_ids.tolist() == [[5, 6, 1], [7, 1, 0]] and batch.source_lengths.tolist() == [3, 2]
    assert batch.target_ids.tolist() == [[2, 8, 0, 0], [2, 9, 10, 11]] and batch.labels.tolist() == [[8, 1, 0, 0], [9, 10, 11, 1]]
    assert batch.num_target_tokens == int((batch.labels != 0).sum()) == 6
    moved = batch.to(torch.device("cpu"))
    for name in ("source_ids", "source_lengths", "target_ids", "labels"):
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    assert moved.num_target_tokens == 6


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None, database=None)
@given(lengths=PAIRS, max_tokens=st.integers(1, 200), seed=st.integers(0, 2**32))
def test_buckets_hold_each_pair_once_within_the_limit(lengths, max_tokens, seed) -> None:
    sources, targets = [[7] * s for s, _ in lengths], [[7] * t for _, t in lengths]
    batches = bucket(sources, targets, max_tokens, np.random.default_rng(seed))
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(max(lengths[i]) + 1 for i in batch) <= max_tokens
    again = bucket(sources, targets, max_tokens, np.random.default_rng(seed))
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_buckets_waste_little_and_differ_from_epoch_to_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    rows = [[7] * (int(length) - 1) for length in lengths]
    batches = bucket(rows, rows, 1000, np.random.default_rng(0))
    assert lengths.sum() / sum(len(batch) * int(lengths[batch].max()) for batch in batches) > 0.95
    assert len(batches) < 1.1 * lengths.sum() / 1000
    other = bucket(rows, rows, 1000, np.random.default_rng(1))
    assert [batch.tolist() for batch in batches] != [batch.tolist() for batch in other]


def test_every_sample_decodes_to_the_text_and_more_dropout_gives_shorter_pieces(tokenizer: ByteLevelTokenizer) -> None:
    means = []
    for dropout in (0.0, 0.3, 0.9, 0.99):
        sampler = BpeDropout(tokenizer, TEXTS, dropout, seed=1)
        samples = [sampler.sample(np.random.default_rng(seed)) for seed in range(NUM_VARIANTS)]
        assert all(list(map(tokenizer.decode, sample)) == TEXTS for sample in samples)
        assert dropout or all(sample == tokenizer.encode_batch(TEXTS) for sample in samples)
        means.append(np.mean([len(ids) for sample in samples for ids in sample]))
    assert means == sorted(set(means)) and means[-1] <= np.mean([len(f" {text}".encode()) for text in TEXTS])


def test_seeds_alone_decide_a_sample(tokenizer: ByteLevelTokenizer) -> None:
    sampler, same, other = (BpeDropout(tokenizer, TEXTS, 0.3, seed=seed) for seed in (4, 4, 5))
    sample = sampler.sample(np.random.default_rng(9))
    assert sampler.sample(np.random.default_rng(10)) != sample
    assert sampler.sample(np.random.default_rng(9)) == same.sample(np.random.default_rng(9)) == sample
    assert other.sample(np.random.default_rng(9)) != sample


def test_long_pairs_are_left_out_whichever_side_is_long(tokenizer: ByteLevelTokenizer) -> None:
    sampler = PairSampler(tokenizer, (SOURCES, TARGETS), (20, 20), 0.0, seed=1)
    assert (sampler.num_pairs, sampler.num_left_out) == (2, 2)
    sources, targets = sampler.sample(np.random.default_rng(0))
    assert [tokenizer.decode(ids) for ids in sources] == ["the dog runs", "unseenwords"]
    assert [tokenizer.decode(ids) for ids in targets] == ["über", "die Straße"]
    length = len(tokenizer.encode("the dog runs"))  # the limit counts the special token
    assert PairSampler(tokenizer, (["the dog runs"], ["a"]), (length + 1, 9), 0.0, seed=1).num_pairs == 1
    with pytest.raises(InputError, match=f"no training pair is short enough for {length} source and 9 target tokens"):
        PairSampler(tokenizer, (["the dog runs"], ["a"]), (length, 9), 0.0, seed=1)


def test_dropout_never_makes_a_pair_too_long(tokenizer: ByteLevelTokenizer) -> None:
    limits = (12, 14)
    sampler = PairSampler(tokenizer, (SOURCES, TARGETS), limits, 0.9, seed=1)
    for seed in range(30):
        for limit, rows, texts in zip(limits, sampler.sample(np.random.default_rng(seed)), (SOURCES, TARGETS), strict=True):
            assert max(map(len, rows)) < limit and [tokenizer.decode(ids) for ids in rows] == [texts[0], texts[3]]


def test_an_epoch_is_decided_by_its_seeds_and_sides_are_cut_independently(tokenizer: ByteLevelTokenizer) -> None:
    def epoch(seed: int) -> tuple[list[list[int]], list[list[int]]]:
        return PairSampler(tokenizer, (SOURCES[:1], SOURCES[:1]), (50, 50), 0.5, seed=3).sample(np.random.default_rng(seed))

    assert epoch(4) == epoch(4)
    epochs = [epoch(seed) for seed in range(12)]
    assert any(sources != targets for sources, targets in epochs) and len({str(sources) for sources, _ in epochs}) > 1
