"""Training pairs as ids in every epoch, with BPE-dropout (Provilkov et al., 2020), and their batches. No torch.

BPE-dropout cuts a word differently each time, repeatably from a seed. The library's own draws from a generator that cannot be
seeded, so a resumed training could not see the same batches.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dragoman.model.errors import InputError
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


class PairSampler:
    """Training pairs as ids, cut afresh in every epoch where there is BPE-dropout.

    Attributes:
        num_pairs: Pairs that are trained on.
        num_left_out: Pairs that were too long.
        plain: The sources and the targets as the tokeniser cuts them, without special tokens.
    """

    def __init__(
        self,
        tokenizer: ByteLevelTokenizer,
        texts: tuple[Sequence[str], Sequence[str]],
        max_lengths: tuple[int, int],
        bpe_dropout: float,
        seed: int,
    ) -> None:
        """Encode both sides and leave out the pairs that are too long.

        Args:
            tokenizer: Of both sides.
            texts: Sources and targets.
            max_lengths: Most tokens of a source and of a target, with the one special token each gets.
            bpe_dropout: Probability that a merge is skipped; 0 gives the tokeniser's own ids in every epoch.
            seed: Of the segmentations.

        Raises:
            InputError: If no pair is left.
        """
        encoded = list(map(tokenizer.encode_batch, texts))
        pairs = enumerate(zip(*encoded, strict=True))
        keep = [i for i, pair in pairs if all(len(ids) < limit for ids, limit in zip(pair, max_lengths, strict=True))]
        if not keep:
            raise InputError(f"no training pair is short enough for {max_lengths[0]} source and {max_lengths[1]} target tokens")
        self.num_pairs, self.num_left_out = len(keep), len(encoded[0]) - len(keep)
        self._max_lengths = max_lengths
        source_ids, target_ids = ([rows[i] for i in keep] for rows in encoded)
        self.plain = source_ids, target_ids
        kept = ([side[i] for i in keep] for side in texts)
        self._dropouts = [BpeDropout(tokenizer, side, bpe_dropout, seed + i) for i, side in enumerate(kept) if bpe_dropout]

    def sample(self, rng: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:
        """Return an epoch's source and target ids; a cut that came out too long gives way to the tokeniser's own."""
        if not self._dropouts:
            return self.plain
        sources, targets = (
            [ids if len(ids) < limit else plain for ids, plain in zip(dropout.sample(rng), rows, strict=True)]
            for dropout, rows, limit in zip(self._dropouts, self.plain, self._max_lengths, strict=True)
        )
        return sources, targets


def bucket(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int, rng: np.random.Generator
) -> list[npt.NDArray[np.intp]]:
    """Group pairs of similar length into batches of at most `max_tokens` and shuffle the batches.

    Args:
        sources: Sequence[int] without special tokens.
        targets: The same number of rows.
        max_tokens: Rows times the longer side, padding and special token included; a single longer pair is a batch of its own.
        rng: Decides which pairs of equal lengths meet, and the order of batches.

    Returns:
        Indices into `sources`, one array a batch; each pair exactly once.
    """
    source_lengths = np.array([len(ids) + 1 for ids in sources])
    target_lengths = np.array([len(ids) + 1 for ids in targets])
    order = rng.permutation(len(sources))
    order = order[np.lexsort((source_lengths[order], target_lengths[order]))]
    batches, start, longest = [], 0, 0
    for end, length in enumerate(np.maximum(source_lengths, target_lengths)[order]):
        longest = max(longest, length)
        if end > start and longest * (end + 1 - start) > max_tokens:
            batches.append(order[start:end])
            start, longest = end, length
    batches.append(order[start:])
    return [batches[i] for i in rng.permutation(len(batches))]
