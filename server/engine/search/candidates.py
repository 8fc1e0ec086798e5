"""What a decode step says of each row: the likeliest next tokens, and nothing about the rest of the vocabulary."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class Candidates(Struct, frozen=True, eq=False):
    """The K likeliest next tokens of N rows.

    Which they are, their order and their log-probabilities depend neither on K nor on the other rows.

    Attributes:
        ids: `[N, K]` int64, likeliest first, the lower id first in a tie.
        log_probs: `[N, K]` float32, natural logarithms over the whole vocabulary.
    """

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]

    def of(self, rows: Sequence[int], num_candidates: int) -> "Candidates":
        """Return the first `num_candidates` of some rows, in the order given; they may share memory with what is here."""
        chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else list(rows)
        return Candidates(self.ids[chosen, :num_candidates], self.log_probs[chosen, :num_candidates])

    def kept(self, num_candidates: int) -> "Candidates":
        """Return a copy of the first `num_candidates`, in memory of its own."""
        return Candidates(self.ids[:, :num_candidates].copy(), self.log_probs[:, :num_candidates].copy())
