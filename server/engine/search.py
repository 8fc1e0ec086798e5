"""How the next tokens are chosen. A search sees only `[rows, K]` arrays: the candidates that a decode step returned, best first."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a decode step says of each row.

    Attributes:
        ids: `[N, K]` int64, likeliest first, the lower id first in a tie.
        log_probs: `[N, K]` float32, natural logarithms over the whole vocabulary.
    """

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """How rows go on.

    Attributes:
        tokens: `[N]` int64, the token each row is fed next.
        parents: `[N]` int64, the row each one continues, or None where every row continues itself.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64] | None = None


class Search(Protocol):
    """A way of choosing, applied at once to all rows that want it."""

    num_candidates: int
    """K, at the least."""

    def choose(self, candidates: Candidates) -> Choice:
        """Choose for the rows of `candidates`."""
        ...


class GreedySearch:
    """Take the likeliest token. Rows are independent, so one object serves all of them."""

    num_candidates = 1

    def choose(self, candidates: Candidates) -> Choice:
        """See `Search`."""
        return Choice(candidates.ids[:, 0])
