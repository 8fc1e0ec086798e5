import numpy as np
import pytest

from dragoman.model.bpe_dropout import NUM_VARIANTS, BpeDropout
from dragoman.model.text.byte_level import ByteLevelTokenizer

TEXTS = [
    "the dog runs through snow .",
    "über die Straße",
    " leading  and trailing ",
    "собака 雪 🙂 don't",
    "</s> <pad>",
    "façade" * 5,
    "unseen wörds, 123456",
]


def test_no_dropout_gives_the_tokenizers_own_ids(tokenizer: ByteLevelTokenizer) -> None:
    sampler = BpeDropout(tokenizer, TEXTS, 0.0, seed=1)
    for seed in range(5):
        assert sampler.sample(np.random.default_rng(seed)) == tokenizer.encode_batch(TEXTS)


def test_no_dropout_gives_the_corpus_its_own_ids(multi30k, tokenizer: ByteLevelTokenizer) -> None:
    from dragoman.model.corpus import read_lines

    lines = read_lines(multi30k / "val.de.gz")
    assert BpeDropout(tokenizer, lines, 0.0, seed=1).sample(np.random.default_rng(0)) == tokenizer.encode_batch(lines)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.99])
def test_every_sample_decodes_to_the_text(tokenizer: ByteLevelTokenizer, dropout) -> None:
    sampler = BpeDropout(tokenizer, TEXTS, dropout, seed=1)
    for seed in range(NUM_VARIANTS):
        assert list(map(tokenizer.decode, sampler.sample(np.random.default_rng(seed)))) == TEXTS


def test_same_seeds_give_the_same_samples(tokenizer: ByteLevelTokenizer) -> None:
    first, second = (BpeDropout(tokenizer, TEXTS, 0.3, seed=4).sample(np.random.default_rng(9)) for _ in range(2))
    assert first == second


def test_other_seeds_give_other_samples(tokenizer: ByteLevelTokenizer) -> None:
    sampler = BpeDropout(tokenizer, TEXTS, 0.3, seed=4)
    sample = sampler.sample(np.random.default_rng(9))
    assert sampler.sample(np.random.default_rng(10)) != sample
    assert BpeDropout(tokenizer, TEXTS, 0.3, seed=5).sample(np.random.default_rng(9)) != sample


def test_sampling_does_not_depend_on_earlier_samples(tokenizer: ByteLevelTokenizer) -> None:
    sampler = BpeDropout(tokenizer, TEXTS, 0.3, seed=4)
    expected = sampler.sample(np.random.default_rng(2))
    sampler.sample(np.random.default_rng(1))
    assert sampler.sample(np.random.default_rng(2)) == expected


def test_more_dropout_gives_shorter_pieces(tokenizer: ByteLevelTokenizer) -> None:
    def mean_length(dropout: float) -> float:
        sampler = BpeDropout(tokenizer, TEXTS, dropout, seed=1)
        return float(np.mean([len(ids) for seed in range(20) for ids in sampler.sample(np.random.default_rng(seed))]))

    num_bytes = np.mean([len(f" {text}".encode()) for text in TEXTS])
    assert mean_length(0.0) < mean_length(0.3) < mean_length(0.9) <= num_bytes
