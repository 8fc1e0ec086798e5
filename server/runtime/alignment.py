"""Alignment of answers to their sources by the heads that export chose: their queries are kept beside the caches of a row.

Only rows of requests that want an alignment cost anything: a copy of their queries in each step, and at their end one product of
queries and cached keys for each head.
"""

from collections.abc import Sequence

import numpy as np

from dragoman.export.manifest import AlignmentHead
from dragoman.export.tensors import ALIGNMENT_FLOOR, cross_key_name
from dragoman.server.runtime.cache import SlotCache


class Aligner:
    """Queries of the heads of all rows.

    Attributes:
        queries: `[max_rows, 1, n·Dh]`, output of the last step.
    """

    def __init__(self, heads: Sequence[AlignmentHead], cache: SlotCache) -> None:
        """Use a cache with room for the queries of these heads."""
        self.queries = np.zeros((len(cache.source_lengths), 1, cache.query_width), np.float32)
        self._heads, self._cache = heads, cache
        self._width = cache.query_width // len(heads)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the last step's queries of rows."""
        self._cache.kept_queries[rows, self._cache.target_lengths[rows] - 1] = self.queries[rows, 0]

    def align(self, row: int, num_steps: int, num_tokens: int, text: tuple[int, int]) -> list[int]:
        """Return the source token of each of a row's `num_tokens` tokens, counted from the start of `text`.

        `num_steps` steps of the row were kept; `text` is the range of source tokens to choose from.
        """
        start, stop = text
        queries = self._cache.kept_queries[row, :num_steps]
        total = np.zeros((num_tokens, stop - start), np.float32)
        for i, head in enumerate(self._heads):
            keys = self._cache.cross_kv[cross_key_name(head.layer)][row, head.head, start:stop].astype(np.float32)
            scores = queries[:, i * self._width : (i + 1) * self._width] @ keys.T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            steps = np.minimum(np.arange(num_tokens) + head.is_next, num_steps - 1)
            total += np.log(weights[steps] + ALIGNMENT_FLOOR)
        return total.argmax(1).tolist()  # type: ignore[no-any-return]
