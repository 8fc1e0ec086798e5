"""Answers that grow independently of each other: greedy search with options, samples, and alternatives after a prefix."""

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.messages import Answer, Request
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.constraints import Option
from dragoman.server.engine.search.hypothesis import Hypothesis
from dragoman.server.engine.search.sampler import NUM_CANDIDATES, Sampler
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.target import TargetSide


class SeparateSearch(Search):
    """One row until the first token is generated, then one for each answer that has not ended."""

    def __init__(self, request: Request, target: TargetSide) -> None:
        self._finished: list[Hypothesis] = []
        self._has_branched = False
        sampling, count = request.search.sampling, request.search.num_answers
        self._picks: dict[int, list[Option | None]] = {}
        self._samplers = [Sampler(sampling, index) for index in range(count)] if sampling else []
        super().__init__(request, target)

    @property
    def max_rows(self) -> int:
        """See `Search`."""
        return len(self.live) if self._has_branched else self.options.num_answers

    @property
    def num_generated(self) -> int:
        """See `Search`."""
        if self.live:
            return max(hypothesis.num_generated for hypothesis in self.live)
        return sum(hypothesis.num_generated for hypothesis in self._finished)

    @property
    def certain_tokens(self) -> list[int]:
        """See `Search`: all of the first answer's."""
        first = next(hypothesis for hypothesis in (*self.live, *self._finished) if hypothesis.index == 0)
        return first.token_ids

    def answers(self) -> list[Answer]:
        """See `Search`: in the order of their indices."""
        finished = sorted(self._finished, key=lambda hypothesis: hypothesis.index)
        return [self._answer(hypothesis) for hypothesis in finished]

    @property
    def _num_wanted(self) -> int:
        if self._samplers:
            sampling = self.options.sampling
            assert sampling is not None
            return min(sampling.top_k or NUM_CANDIDATES, NUM_CANDIDATES)
        return self.options.num_answers if not self._has_branched else 1

    def _set_num_candidates(self) -> None:
        super()._set_num_candidates()
        if self._samplers:  # rules are no reason to see more, for a draw knows bounds of what it does not see
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
            if option is None:  # fewer alternatives than asked for, or rules that leave nothing to go on with
                if self._has_branched or index == 0:
                    self._finished.append(self.live[row])
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
        """Return what each answer in a row goes on with, None for one that cannot go on; None for all if more has to be seen."""
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
        """Return what each answer in a row draws, None for one that cannot go on; None for all if more has to be seen."""
        num_unseen = self._target.num_choices - len(ids)
        indices = [self.live[row].index] if self._has_branched else range(self.options.num_answers)
        options = self._constraints.apply(self.live[row], ids, log_probs)
        if not len(options.ids):
            if num_unseen and log_probs[-1] > -np.inf:  # the rules have taken all that was seen
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
