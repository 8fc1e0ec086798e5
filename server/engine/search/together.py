"""Searches of one step side by side: beams without rules are ranked all at once, everything else sees its own candidates."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.ranking import ranked
from dragoman.server.engine.search.search import Search

Advance = Callable[[], list[int] | None]
"""Lets one search go on; see `Search.advance`."""


def advances(searches: Sequence[Search], rows: Sequence[list[int]], candidates: Candidates) -> list[Advance]:
    """Return what lets each search go on with a step's candidates; the outcome is that of its own `advance`, to the last bit.

    Args:
        searches: None of which waits to see more.
        rows: Of the candidates, those of each search's live hypotheses.
        candidates: Of at least as many tokens as the most that a search needs.
    """
    found: list[Advance | None] = [None] * len(searches)
    alike: dict[tuple[int, int], list[int]] = {}
    for place, search in enumerate(searches):
        if isinstance(search, BeamSearch) and search.is_unruled:
            alike.setdefault((len(rows[place]), search.num_wanted), []).append(place)
    for (_, num_wanted), places in alike.items():
        beams = [searches[place] for place in places]
        where = np.array([rows[place] for place in places])
        log_probs = candidates.log_probs[where, :num_wanted]
        if log_probs[:, :, -1].min() == -np.inf:  # some tokens are no options
            continue
        totals = np.array([[hypothesis.total for hypothesis in search.live] for search in beams])
        extensions = ranked(totals, candidates.ids[where, :num_wanted], log_probs, num_wanted)
        for place, search, own in zip(places, beams, extensions, strict=True):
            assert isinstance(search, BeamSearch)
            found[place] = partial(search.go_on_with, own)
    return [
        advance or partial(search.advance, candidates.of(own, search.num_candidates))
        for advance, search, own in zip(found, searches, rows, strict=True)
    ]
