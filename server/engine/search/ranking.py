"""How beams may go on where there are no rules: continuations of several searches, ranked together on arrays."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.search.constraints import Option

Extension = tuple[int, Option]
"""Which of a search's hypotheses is continued, by index, and with what."""


def ranked(
    totals: NDArray[np.float64], ids: NDArray[np.int64], log_probs: NDArray[np.float32], num_wanted: int
) -> list[Iterable[Extension]]:
    """Return the best continuations of each search, best first; of equals the better hypothesis and the lower id first.

    Args:
        totals: `[G, B]`, of the B live hypotheses of G searches, the better ones first.
        ids: `[G, B, K]`, the likeliest tokens of each, in their order.
        log_probs: `[G, B, K]`.
        num_wanted: How many of each search; all where there are fewer.
    """
    num_searches, num_live, width = ids.shape
    values = log_probs.astype(np.float64)
    costs = -(totals[:, :, None] + values).reshape(num_searches, num_live * width)
    places = costs.argsort(axis=1, kind="stable")[:, :num_wanted]
    rows = (places // width).tolist()
    places += np.arange(0, costs.size, num_live * width)[:, None]
    tokens, chosen = ids.reshape(-1)[places].tolist(), values.reshape(-1)[places].tolist()
    return [
        zip(own, zip(ids_of_own, by, by, strict=True), strict=True)
        for own, ids_of_own, by in zip(rows, tokens, chosen, strict=True)
    ]
