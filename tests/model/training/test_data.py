import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.model.config import ModelConfig
from dragoman.model.training.data import collate
from dragoman.model.training.sampler import bucket


def test_batch_has_special_tokens_where_the_model_wants_them() -> None:
    config = ModelConfig(source_vocab_size=20, target_vocab_size=20, pad_id=0, eos_id=1, decoder_start_id=2)
    batch = collate([[5, 6], [7]], [[8], [9, 10, 11]], config)
    assert batch.source_ids.tolist() == [[5, 6, 1], [7, 1, 0]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target_ids.tolist() == [[2, 8, 0, 0], [2, 9, 10, 11]]
    assert batch.labels.tolist() == [[8, 1, 0, 0], [9, 10, 11, 1]]
    assert batch.num_target_tokens == int((batch.labels != 0).sum()) == 6
    moved = batch.to(torch.device("cpu"))
    assert all(
        torch.equal(getattr(moved, name), getattr(batch, name)) for name in ("source_ids", "source_lengths", "target_ids", "labels")
    )
    assert moved.num_target_tokens == 6


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None, database=None)
@given(lengths=PAIRS, max_tokens=st.integers(1, 200), seed=st.integers(0, 2**32))
def test_buckets_hold_each_pair_once_within_the_limit(lengths, max_tokens, seed) -> None:
    sources, targets = [[7] * s for s, _ in lengths], [[7] * t for _, t in lengths]
    batches = bucket(sources, targets, max_tokens, np.random.default_rng(seed))
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(max(lengths[i]) + 1 for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_tokens
    again = bucket(sources, targets, max_tokens, np.random.default_rng(seed))
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_buckets_differ_from_epoch_to_epoch() -> None:
    rows = [[7] * (i % 10) for i in range(100)]
    first, second = ([batch.tolist() for batch in bucket(rows, rows, 50, np.random.default_rng(seed))] for seed in (1, 2))
    assert first != second


def test_buckets_waste_little() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    rows = [[7] * (int(length) - 1) for length in lengths]
    batches = bucket(rows, rows, 1000, np.random.default_rng(0))
    filled = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    assert lengths.sum() / filled > 0.95
    assert len(batches) < 1.1 * lengths.sum() / 1000
