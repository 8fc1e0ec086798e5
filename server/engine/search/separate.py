"""Answers that grow independently of each other: greedy search with options, samples, and alternatives after a prefix."""

import numpy as np

from server.engine.messages import Answer, Request
from server.engine.search.candidates import Candidates
from server.engine.search.constraints import Options
from server.engine.search.hypothesis import Hypothesis
from server.engine.search.sampler import NUM_CANDIDATES, Sampler
from server.engine.search.search import Search, TargetSide


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
        rows = [(row, self._apply_rules(hypothesis, candidates, row)) for row, hypothesis in enumerate(self.live)]
        if not self._has_branched:
            rows *= self.options.num_answers
        indices = [hypothesis.index for hypothesis in self.live] if self._has_branched else range(len(rows))
        places = [self._place(index, options, candidates, row) for index, (row, options) in zip(indices, rows, strict=True)]
        if None in places:
            return None
        live: list[Hypothesis] = []
        parents: list[int] = []
        for index, (row, options), place in zip(indices, rows, places, strict=True):
            assert place is not None
            if place >= len(options.ids):  # fewer alternatives than asked for, or rules that leave nothing to go on with
                if self._has_branched or index == 0:
                    self._finished.append(self.live[row])
                continue
            hypothesis = self._extend(self.live[row], options, place, candidates, row, index)
            if hypothesis.is_eos or hypothesis.num_generated >= self._max_new_tokens:
                self._finished.append(hypothesis)
            else:
                live.append(hypothesis)
                parents.append(row)
        for sampler in self._samplers:
            sampler.accept()
        self.live, self._has_branched = live, True
        return parents

    def _place(self, index: int, options: Options, candidates: Candidates, row: int) -> int | None:
        """Return which of its options an answer takes; None if more have to be seen."""
        if not len(options.ids):
            return 0
        if self.options.has_alternatives and not self._has_branched:
            return index
        if not self._samplers:
            return 0
        log_probs = candidates.log_probs[row]
        unseen_probability = 1.0 - float(np.exp(log_probs.astype(np.float64)).sum())
        num_unseen = self._target.vocab_size - len(log_probs)
        return self._samplers[index].draw(options, float(log_probs[-1]), unseen_probability, num_unseen)
