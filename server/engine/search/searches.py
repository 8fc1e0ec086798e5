"""Choice of a request's search, and joint advance of the searches of one step.

Plain greedy requests have no search: the engine chooses for all of them at once. Forced prefixes, forced ends and the length in a
score leave a request plain, since imported models have them in every request; only the end itself is found by a search that
continues the plain request.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from dragoman.server.engine.messages import GREEDY, Answer, Request, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch, ranked
from dragoman.server.engine.search.constraints import Option
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide
from dragoman.server.engine.search.sampler import NUM_CANDIDATES, Sampler
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.terms import TermSearch
from dragoman.server.runtime.runner import Candidates


class SeparateSearch(Search):
    """Independent answers: greedy search with options, samples, and alternatives after a prefix.

    It has one row until the first token is generated, then one for each answer that has not ended.
    """

    def __init__(self, request: Request, target: TargetSide) -> None:
        self._finished: list[Hypothesis] = []
        self._has_branched = False
        sampling, count = request.search.sampling, request.search.num_answers
        self._picks: dict[int, list[Option | None]] = {}
        self._samplers = [Sampler(sampling, index) for index in range(count)] if sampling else []
        super().__init__(request, target)

    @property
    def max_rows(self) -> int:
        return len(self.live) if self._has_branched else self.options.num_answers

    @property
    def num_generated(self) -> int:
        if self.live:
            return max(hypothesis.num_generated for hypothesis in self.live)
        return sum(hypothesis.num_generated for hypothesis in self._finished)

    @property
    def certain_tokens(self) -> list[int]:
        first = next(hypothesis for hypothesis in (*self.live, *self._finished) if hypothesis.index == 0)
        return first.token_ids

    @property
    def finished(self) -> list[Hypothesis]:
        return self._finished

    def answers(self) -> list[Answer]:
        finished = sorted(self._finished, key=lambda hypothesis: hypothesis.index)
        return [self._answer(hypothesis) for hypothesis in finished]

    @property
    def num_wanted(self) -> int:
        if self._samplers:
            sampling = self.options.sampling
            assert sampling is not None
            return min(sampling.top_k or NUM_CANDIDATES, NUM_CANDIDATES)
        return self.options.num_answers if not self._has_branched else 1

    def _set_num_candidates(self) -> None:
        super()._set_num_candidates()
        if self._samplers:  # a draw has bounds for unseen tokens, so rules need no more
            self.num_candidates = min(self.num_candidates, NUM_CANDIDATES)

    def _decide(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        self._picks.pop(row, None)
        picks = self._drawn(row, ids, log_probs) if self._samplers else self._likeliest(row, ids, log_probs)
        if picks is not None:
            self._picks[row] = picks

    def _decide_on(self, row: int, option: Option) -> None:
        count = 1 if self._has_branched else self.options.num_answers
        self._picks[row] = [option, *[None if self.options.has_alternatives else option] * (count - 1)]

    def _choose(self, candidates: Candidates) -> list[int]:
        count = self.options.num_answers
        if self._has_branched:
            places = [(row, hypothesis.index, self._picks[row][0]) for row, hypothesis in enumerate(self.live)]
        else:
            places = [(0, index, option) for index, option in zip(range(count), self._picks[0], strict=True)]
        live: list[Hypothesis] = []
        parents: list[int] = []
        for row, index, option in places:
            if option is None:  # too few alternatives, or none left by the rules
                if self._has_branched or index == 0:
                    self._finished.append(structs.replace(self.live[row], parent=row))
                continue
            hypothesis = self._extend(row, option, candidates, index)
            if hypothesis.is_eos or hypothesis.num_generated >= self._max_new_tokens:
                self._finished.append(hypothesis)
            else:
                live.append(hypothesis)
                parents.append(row)
        for sampler in self._samplers:
            sampler.accept()
        self.live, self._has_branched = live, True
        return parents

    def _likeliest(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> list[Option | None] | None:
        """Return each answer's next option in a row, None for one that cannot continue; None if more candidates are needed."""
        count = 1 if self._has_branched else self.options.num_answers
        num_wanted = count if self.options.has_alternatives else 1
        best = self._constraints.certain(self.live[row], ids, log_probs, num_wanted)
        if best is None:
            self._want_more(row, len(ids))
            return None
        if num_wanted < count:
            return [best[0] if best else None] * count
        return [*best, *[None] * (count - len(best))]

    def _drawn(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> list[Option | None] | None:
        """Return each answer's drawn option in a row, None for one that cannot continue; None if more candidates are needed."""
        num_unseen = self._target.num_choices - len(ids)
        indices = [self.live[row].index] if self._has_branched else range(self.options.num_answers)
        options = self._constraints.apply(self.live[row], ids, log_probs)
        if not len(options.ids):
            if num_unseen and log_probs[-1] > -np.inf:  # the rules exclude all that was seen
                self._want_more(row, len(ids))
                return None
            return [None] * len(indices)
        drawn: list[Option | None] = []
        unseen: float | None = None
        for index in indices:
            sampler = self._samplers[index]
            if unseen is None and sampler.weighs_unseen(options, num_unseen):
                unseen = 1.0 - float(np.exp(log_probs.astype(np.float64)).sum())
            place = sampler.draw(options, float(log_probs[-1]), unseen or 0.0, num_unseen)
            if place is None:
                self._want_more(row, len(ids), is_far=sampler.is_far)
                return None
            drawn.append((options.ids.item(place), options.log_probs.item(place), options.values.item(place)))
        return drawn


def search_for(request: Request, target: TargetSide) -> Search | None:
    """Return a request's search, or None for plain greedy search."""
    if is_plain(request.search, request.max_new_tokens):
        return None
    if request.search.terms:
        return TermSearch(request, target)
    if request.search.num_beams > 1:
        return BeamSearch(request, target)
    return SeparateSearch(request, target)


def search_from(request: Request, target: TargetSide, hypothesis: Hypothesis) -> Search:
    """Return the search that continues a plain request after its forced prefix and a generated token."""
    search = SeparateSearch(request, target)
    search.go_on_from(hypothesis)
    return search


def is_plain(options: SearchOptions, max_new_tokens: int) -> bool:
    """Return whether a request needs no search: its forced prefix, then the likeliest tokens, and no details."""
    if options is GREEDY:
        return True
    if options.is_end_forced and max_new_tokens == 1:
        return False
    unlike = {"length_penalty": 1.0, "num_forced": 0, "forced_prefix": [], "is_end_forced": False, "has_log_probs": True}
    return structs.replace(options, **unlike) == GREEDY


# Call with the result of `Search.advance`.
Advance = Callable[[], list[int] | None]


def advances(searches: Sequence[Search], rows: Sequence[list[int]], candidates: Candidates) -> list[Advance]:
    """Return a call that advances each search with a step's candidates, bit-identical to `Search.advance`.

    Beam searches without rules are ranked together. No search may be paused; `rows` are those of each search's live hypotheses.
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
        if log_probs[:, :, -1].min() == -np.inf:  # some tokens have no probability
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
