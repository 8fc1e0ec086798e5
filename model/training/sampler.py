"""What a training run sees of its text: which pairs are short enough, their ids in every epoch, and their batches. No torch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dragoman.model.bpe_dropout import BpeDropout
from dragoman.model.errors import InputError
from dragoman.model.ids import Ids
from dragoman.model.text.byte_level import ByteLevelTokenizer


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


def bucket(sources: Sequence[Ids], targets: Sequence[Ids], max_tokens: int, rng: np.random.Generator) -> list[npt.NDArray[np.intp]]:
    """Group pairs of similar length into batches of at most `max_tokens` and shuffle the batches.

    Args:
        sources: Ids without special tokens.
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
