"""Answers that grow independently of each other: greedy search with options, samples, and alternatives after a prefix."""

from collections.abc import Sequence

import numpy as np

from dragoman.server.engine.messages import Answer, Request
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.constraints import Option, Options
from dragoman.server.engine.search.hypothesis import Hypothesis
from dragoman.server.engine.search.sampler import NUM_CANDIDATES, Sampler
from dragoman.server.engine.search.search import Search, TargetSide


class SeparateSearch(Search):
    """One row until the first token is generated, then one for each answer that has not ended."""

    def __init__(self, request: Request, target: TargetSide) -> None:
        self._finished: list[Hypothesis] = []
        self._has_branched = False
        sampling, count = request.search.sampling, request.search.num_answers
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
        return [hypothesis.answer(self.options.length_penalty) for hypothesis in finished]

    @property
    def _num_wanted(self) -> int:
        if self._samplers:
            sampling = self.options.sampling
            assert sampling is not None
            return sampling.top_k or NUM_CANDIDATES
        return self.options.num_answers if not self._has_branched else 1

    def _choose(self, candidates: Candidates) -> list[int] | None:
        count = self.options.num_answers
        rows = range(len(self.live)) if self._has_branched else [0] * count
        indices = [hypothesis.index for hypothesis in self.live] if self._has_branched else range(count)
        options = self._drawn(rows, indices, candidates) if self._samplers else self._likeliest(candidates)
        if options is None:
            return None
        live: list[Hypothesis] = []
        parents: list[int] = []
        for index, row, option in zip(indices, rows, options, strict=True):
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

    def _likeliest(self, candidates: Candidates) -> list[Option | None]:
        """Return what each answer goes on with, None for one that cannot go on."""
        if self._has_branched:
            return [next(iter(self._best(candidates, row, 1)), None) for row in range(len(self.live))]
        count = self.options.num_answers
        if not self.options.has_alternatives:
            return [next(iter(self._best(candidates, 0, 1)), None)] * count
        best = self._best(candidates, 0, count)
        return [*best, *[None] * (count - len(best))]

    def _drawn(self, rows: Sequence[int], indices: Sequence[int], candidates: Candidates) -> list[Option | None] | None:
        """Return what each answer draws, None for one that cannot go on; None for all if more has to be seen."""
        num_unseen = self._target.vocab_size - candidates.ids.shape[1]
        options: list[Options] = []
        for row, hypothesis in enumerate(self.live):
            options.append(self._constraints.apply(hypothesis, candidates.ids[row], candidates.log_probs[row]))
        drawn: list[Option | None] = []
        for row, index in zip(rows, indices, strict=True):
            own, sampler, log_probs = options[row], self._samplers[index], candidates.log_probs[row]
            if not len(own.ids):
                drawn.append(None)
                continue
            unseen = 1.0 - float(np.exp(log_probs.astype(np.float64)).sum()) if sampler.weighs_unseen(own, num_unseen) else 0.0
            place = sampler.draw(own, float(log_probs[-1]), unseen, num_unseen)
            if place is None:
                return None
            drawn.append((own.ids.item(place), own.log_probs.item(place), own.values.item(place)))
        return drawn
