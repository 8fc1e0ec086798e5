"""Beam search with the semantics of Transformers' `generate`."""

import heapq
import math
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dragoman.server.engine.messages import Answer, Request
from dragoman.server.engine.search.constraints import Option
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide, num_common_tokens
from dragoman.server.engine.search.search import Search
from dragoman.server.runtime.runner import Candidates

# Index of the continued hypothesis, and the option.
Extension = tuple[int, Option]


def ranked(
    totals: NDArray[np.float64], ids: NDArray[np.int64], log_probs: NDArray[np.float32], num_wanted: int
) -> list[Iterable[Extension]]:
    """Return the best `num_wanted` extensions of each of G searches, best first; ties by the better hypothesis, then the lower id.

    `totals` `[G, B]` are those of B live hypotheses, best first; `ids` and `log_probs` are `[G, B, K]`, likeliest first.
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


class BeamSearch(Search):
    """Up to `num_beams` live prefixes and the best `num_beams` finished ones.

    Each step takes the best 2·`num_beams` extensions by total: those that end while among the best `num_beams` are finished, the
    best `num_beams` others stay live. The search ends when `num_beams` hypotheses are finished and the best live prefix, scored at
    its current length, is no better than the worst of them (not required with early stopping), or at `max_new_tokens`, where live
    prefixes compete with the finished ones.
    """

    def __init__(self, request: Request, target: TargetSide) -> None:
        self._finished: list[Hypothesis] = []
        self._best: dict[int, list[Option]] = {}
        super().__init__(request, target)
        options = self.options
        has_more = bool(options.num_top_log_probs or options.forced_prefix or options.is_end_forced)
        self._is_never_ruled = self._constraints.is_idle and not has_more

    @property
    def max_rows(self) -> int:
        return self.options.num_beams

    @property
    def num_generated(self) -> int:
        if self.live:
            return self.live[0].num_generated
        return sum(hypothesis.num_generated for hypothesis in self._finished[: self.options.num_answers])

    @property
    def certain_tokens(self) -> list[int]:
        """Common prefix of all hypotheses that can still win."""
        hypotheses = self.live + self._finished
        if not self.live:
            return hypotheses[0].token_ids
        # The common prefix of the first and the last in lexicographic order is common to all.
        sequences = [hypothesis.token_ids for hypothesis in hypotheses]
        first = min(sequences)
        return first[: num_common_tokens(first, max(sequences))]

    @property
    def finished(self) -> list[Hypothesis]:
        return self._finished

    def answers(self) -> list[Answer]:
        """Return the answers by descending score."""
        return [self._answer(hypothesis) for hypothesis in self._finished[: self.options.num_answers]]

    @property
    def num_wanted(self) -> int:
        return 2 * self.options.num_beams

    @property
    def is_unruled(self) -> bool:
        """Whether the next choice depends on candidates alone, without top tokens, so that searches can be ranked together."""
        if self._is_never_ruled:
            return True
        if not self._constraints.is_idle or self.options.num_top_log_probs:
            return False
        first = self.live[0]
        is_fed = len(first.token_ids) < len(self.options.forced_prefix)
        return not is_fed and not self._constraints.forces_end(first)

    def advance(self, candidates: Candidates) -> list[int] | None:
        self._best = {}
        return super().advance(candidates)

    def go_on_with(self, extensions: Iterable[Extension]) -> list[int]:
        """Advance an `is_unruled` search with extensions from `ranked`."""
        parents = self._take(extensions, None)
        if parents and not self._is_never_ruled:  # otherwise it never changes
            self._set_num_candidates()
        return parents

    def _decide_all(self, candidates: Candidates) -> None:
        if not self._constraints.is_idle or candidates.log_probs[:, -1].min() == -math.inf:
            super()._decide_all(candidates)

    def _decide(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        best = self._constraints.certain(self.live[row], ids, log_probs, min(self.num_wanted, len(ids)))
        if best is None:
            self._want_more(row, len(ids))
        else:
            self._best[row] = best

    def _decide_on(self, row: int, option: Option) -> None:
        self._best[row] = [option]

    def _extensions(self, candidates: Candidates) -> Iterable[Extension]:
        """Return the best `num_wanted` extensions of all hypotheses, in the order of `ranked`."""
        if not self._best:
            num_wanted = self.num_wanted
            totals = np.array([[hypothesis.total for hypothesis in self.live]])
            ids, log_probs = candidates.ids[None, :, :num_wanted], candidates.log_probs[None, :, :num_wanted]
            return ranked(totals, ids, log_probs, num_wanted)[0]
        extensions = [
            (-(self.live[row].total + option[2]), row, place, option)
            for row, best in self._best.items()
            for place, option in enumerate(best)
        ]
        return [(row, option) for _, row, _, option in heapq.nsmallest(self.num_wanted, extensions)]

    def _choose(self, candidates: Candidates) -> list[int]:
        return self._take(self._extensions(candidates), candidates)

    def _take(self, extensions: Iterable[Extension], candidates: Candidates | None) -> list[int]:
        width, eos_id = self.options.num_beams, self._target.eos_id
        live: list[Hypothesis] = []
        parents: list[int] = []
        finished: list[Hypothesis] = []
        for rank, (row, option) in enumerate(extensions):
            if option[0] != eos_id:
                live.append(self._extend(row, option, candidates))
                parents.append(row)
                if len(live) == width:  # later ones can neither live nor finish
                    break
            elif rank < width:
                finished.append(self._extend(row, option, candidates))
        self._keep_best(finished)
        if not self._is_over(live):
            self.live = live
            return parents
        if not self._finished:  # the rules leave no extension
            self._keep_best([replace(hypothesis, parent=row) for row, hypothesis in enumerate(self.live)])
        self.live = []
        return []

    def _is_over(self, live: list[Hypothesis]) -> bool:
        """Return whether the search ends; hypotheses of full length are finished then."""
        if not live:
            return True
        if live[0].num_generated >= self._max_new_tokens:
            self._keep_best(live)
            return True
        if len(self._finished) < self.options.num_beams:
            return False
        return self.options.is_stopped_early or self._score(live[0]) <= self._score(self._finished[-1])

    def _keep_best(self, hypotheses: list[Hypothesis]) -> None:
        """Merge hypotheses into the best finished ones; earlier ones win ties."""
        if not hypotheses:
            return
        ranked = sorted(self._finished + hypotheses, key=lambda hypothesis: -self._score(hypothesis))
        self._finished = ranked[: self.options.num_beams]
