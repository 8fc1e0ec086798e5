"""Batches of training pairs, buckets, epochs of BPE dropout; and losses over chunks of a projection, against PyTorch's own."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dragoman.model.config import ModelConfig
from dragoman.model.errors import InputError
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.training import loss
from dragoman.model.training.data import collate
from dragoman.model.training.loss import projected_cross_entropy
from dragoman.model.training.sampler import NUM_VARIANTS, BpeDropout, PairSampler, bucket

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


@settings(max_examples=60, deadline=None, database=None)
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
    sampler, same, other = (BpeDropout(tokenizer, TEXTS, 0.3, seed=seed) for seed in (4, 4, 5))
    sample = sampler.sample(np.random.default_rng(9))
    assert sampler.sample(np.random.default_rng(10)) != sample
    assert sampler.sample(np.random.default_rng(9)) == same.sample(np.random.default_rng(9)) == sample
    assert other.sample(np.random.default_rng(9)) != sample
    assert means == sorted(set(means)) and means[-1] <= np.mean([len(f" {text}".encode()) for text in TEXTS])


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


def test_dropout_never_makes_a_pair_too_long_and_seeds_decide_an_epoch(tokenizer: ByteLevelTokenizer) -> None:
    limits = (12, 14)
    sampler = PairSampler(tokenizer, (SOURCES, TARGETS), limits, 0.9, seed=1)
    for seed in range(30):
        for limit, rows, texts in zip(limits, sampler.sample(np.random.default_rng(seed)), (SOURCES, TARGETS), strict=True):
            assert max(map(len, rows)) < limit and [tokenizer.decode(ids) for ids in rows] == [texts[0], texts[3]]
    seeds = (4, *range(12))
    first, *epochs = (
        PairSampler(tokenizer, (SOURCES[:1], SOURCES[:1]), (50, 50), 0.5, seed=3).sample(np.random.default_rng(i)) for i in seeds
    )
    assert first == epochs[4] and len({str(sources) for sources, _ in epochs}) > 1
    assert any(sources != targets for sources, targets in epochs), "sides are cut independently"


D, V, PAD = 8, 19, 3


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ROWS", 7)
    torch.manual_seed(0)


def assert_same(value: torch.Tensor, expected: torch.Tensor, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    (value * 0.7).backward()
    (expected * 0.7).backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def some_inputs(shape: tuple[int, ...], has_bias: bool, labels_shape: tuple[int, ...]) -> Any:
    """Return hidden states, weight and bias twice, with gradients of their own, and labels with padding."""
    inputs = [torch.randn(*shape, D), torch.randn(V, D), *([torch.randn(V)] if has_bias else [])]
    labels = torch.randint(0, V, labels_shape)
    labels.view(-1)[::4] = PAD
    return *([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2)), labels


@pytest.mark.parametrize("shape", [(6,), (4, 6), (1, 10, 5)], ids=["one chunk", "four chunks", "eight chunks"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_and_gradients_equal_cross_entropy(shape, has_bias, smoothing) -> None:
    ours, theirs, labels = some_inputs(shape, has_bias, shape)
    value = projected_cross_entropy(ours[0], ours[1], ours[2] if has_bias else None, labels, PAD, smoothing)
    logits = F.linear(*theirs).flatten(0, -2)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    assert_same(value, expected, ours, theirs)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
def test_two_passes_are_drawn_together_as_the_paper_says(has_bias, alpha) -> None:
    """Against R-Drop's equation 4 written with PyTorch's own losses, halved."""
    ours, theirs, labels = some_inputs((2, 4, 6), has_bias, (4, 6))
    value = projected_cross_entropy(ours[0], ours[1], ours[2] if has_bias else None, labels, PAD, 0.1, alpha)
    first, second = F.linear(*theirs)[:, labels != PAD]
    real = labels[labels != PAD]
    entropies = sum(F.cross_entropy(logits, real, reduction="sum", label_smoothing=0.1) for logits in (first, second))
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    divergences = sum(F.kl_div(b, a, reduction="sum", log_target=True) for a, b in ((p, q), (q, p)))
    assert_same(value, (entropies + alpha * divergences / 2) / 2, ours, theirs)


def test_padding_alone_costs_nothing() -> None:
    hidden, weight = torch.randn(4, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    value = projected_cross_entropy(hidden, weight, None, torch.full((4,), PAD), PAD, 0.1)
    value.backward()
    assert value.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("alpha", [None, 5.0], ids=["one pass", "two passes"])
def test_half_precision_is_as_near_as_its_rounding(alpha) -> None:
    """Hidden states in bfloat16, as autocast gives them, against the same numbers in float32; the loss stays in float32."""
    given, weight, labels = torch.randn(2, 40, D).bfloat16(), torch.randn(V, D), torch.randint(4, V, (40,))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, table = given.to(dtype).requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = projected_cross_entropy(hidden, table, None, labels.expand(2, -1) if alpha is None else labels, PAD, 0.1, alpha)
        value.backward()
        assert (value.dtype, hidden.grad.dtype, table.grad.dtype) == (torch.float32, dtype, torch.float32)
        found[dtype] = value.detach(), hidden.grad.float(), table.grad
    for exact, rounded in zip(found[torch.float32], found[torch.bfloat16], strict=True):
        assert (exact - rounded).norm() < 0.02 * exact.norm()
