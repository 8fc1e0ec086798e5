"""Texts of random words with an exact number of tokens, for models whose answers do not matter."""

import random

from dragoman.model.text.byte_level import ByteLevelTokenizer

SPACE = "Ġ"
"""What byte-level BPE writes for a space."""


def random_texts(tokenizer: ByteLevelTokenizer, num_tokens: int, count: int, seed: int = 0) -> list[str]:
    """Draw texts of `num_tokens` tokens, end-of-sequence included.

    Raises:
        ValueError: If the tokeniser has no whole words, or no text can be so short.
    """
    if num_tokens < 2:
        raise ValueError(f"a text with {num_tokens} tokens has none but end-of-sequence")
    candidates = sorted(token[1:] for token in tokenizer.encoder.get_vocab() if token[0] == SPACE and token[1:].isalpha())
    words = [word for word in candidates if word.isascii() and len(tokenizer.encode(word)) == 1]
    if not words:
        raise ValueError("the tokeniser has no token that is a whole word")
    generator = random.Random(seed)
    return [" ".join(generator.choices(words, k=num_tokens - 1)) for _ in range(count)]
