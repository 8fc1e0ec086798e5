"""What a training run sees of its text: which pairs are short enough, and their ids in every epoch."""

from collections.abc import Sequence

import numpy as np

from dragoman.model.bpe_dropout import BpeDropout
from dragoman.model.errors import InputError
from dragoman.model.tokenizer import Tokenizer


class PairSampler:
    """Training pairs as ids, cut afresh in every epoch where there is BPE-dropout.

    Attributes:
        num_pairs: Pairs that are trained on.
        num_left_out: Pairs that were too long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
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
        self._plain = [[rows[i] for i in keep] for rows in encoded]
        kept = ([side[i] for i in keep] for side in texts)
        self._dropouts = [BpeDropout(tokenizer, side, bpe_dropout, seed + i) for i, side in enumerate(kept) if bpe_dropout]

    def sample(self, rng: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:
        """Return an epoch's source and target ids; a cut that came out too long gives way to the tokeniser's own."""
        if not self._dropouts:
            return self._plain[0], self._plain[1]
        sources, targets = (
            [ids if len(ids) < limit else plain for ids, plain in zip(dropout.sample(rng), rows, strict=True)]
            for dropout, rows, limit in zip(self._dropouts, self._plain, self._max_lengths, strict=True)
        )
        return sources, targets
