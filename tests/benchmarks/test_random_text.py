"""Texts of an exact length."""

import pytest

from benchmarks.harness.models import SHIPPED
from benchmarks.harness.random_text import random_texts
from dragoman.model.text.byte_level import ByteLevelTokenizer


@pytest.mark.parametrize("num_tokens", [2, 16, 128])
def test_texts_have_the_tokens_asked_for(num_tokens: int) -> None:
    tokenizer = ByteLevelTokenizer.load(SHIPPED)
    texts = random_texts(tokenizer, num_tokens, 20)
    assert {len(ids) + 1 for ids in tokenizer.encode_batch(texts)} == {num_tokens}
    assert len(set(texts)) > 15
    assert texts == random_texts(tokenizer, num_tokens, 20) != random_texts(tokenizer, num_tokens, 20, seed=1)


def test_impossible_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="none but end-of-sequence"):
        random_texts(ByteLevelTokenizer.load(SHIPPED), 1, 1)
    with pytest.raises(ValueError, match="no token that is a whole word"):
        random_texts(ByteLevelTokenizer.train(["1 2 3"], 260), 4, 1)
