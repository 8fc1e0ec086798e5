"""BPE-dropout (Provilkov et al., 2020): a word is cut differently each time it is met, repeatably from a seed.

The library's own BPE-dropout draws from a generator that cannot be seeded, so a resumed training could not see the same batches.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dragoman.model.text.byte_level import ByteLevelTokenizer

NUM_VARIANTS = 16


class BpeDropout:
    """Random segmentations of a fixed set of texts."""

    def __init__(self, tokenizer: ByteLevelTokenizer, texts: Sequence[str], dropout: float, seed: int) -> None:
        """Draw `NUM_VARIANTS` segmentations of every distinct word of the texts, skipping merges with probability `dropout`."""
        encoder = tokenizer.encoder
        self._vocab: dict[str, int] = encoder.get_vocab()
        self._dropout = dropout
        self._rng = np.random.default_rng(seed)
        self._ranks = merge_ranks(tokenizer)
        words: dict[str, int] = {}
        self._texts = []
        for text in texts:
            pieces = encoder.pre_tokenizer.pre_tokenize_str(encoder.normalizer.normalize_str(text))
            self._texts.append([words.setdefault(piece, len(words)) for piece, _ in pieces])
        self._variants = [[self.segment(word) for _ in range(NUM_VARIANTS)] for word in words]

    def sample(self, rng: np.random.Generator) -> list[list[int]]:
        """Encode every text afresh, each word by one of its segmentations."""
        return [
            [
                i
                for word, k in zip(words, rng.integers(NUM_VARIANTS, size=len(words)).tolist(), strict=True)
                for i in self._variants[word][k]
            ]
            for words in self._texts
        ]

    def segment(self, word: str) -> list[int]:
        """Cut one pre-tokenised word: merges by rank, each candidate skipped with the dropout probability at each turn."""
        symbols = list(word)
        while len(symbols) > 1:
            draws = self._rng.random(len(symbols) - 1)
            candidates = [
                (self._ranks[pair], i)
                for i, pair in enumerate(pairwise(symbols))
                if pair in self._ranks and draws[i] >= self._dropout
            ]
            if not candidates:
                break
            _, i = min(candidates)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        return [self._vocab[symbol] for symbol in symbols]


def merge_ranks(tokenizer: ByteLevelTokenizer) -> dict[tuple[str, str], int]:
    """Read the order of merges from the tokeniser's own description."""
    merges = json.loads(tokenizer.encoder.to_str())["model"]["merges"]
    return {(left, right): rank for rank, (left, right) in enumerate(merges)}
