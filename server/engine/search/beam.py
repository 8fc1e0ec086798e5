"""Beam search: the likeliest prefixes side by side, as Transformers' `generate` does it."""

from dragoman.server.engine.messages import Answer, Request
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.hypothesis import Hypothesis, num_common_tokens
from dragoman.server.engine.search.search import Search, TargetSide


class BeamSearch(Search):
    """Up to `num_beams` live prefixes and the best `num_beams` finished ones.

    Each step ranks the live prefixes' continuations by their totals and looks at the best 2·`num_beams`: those that draw
    end-of-sequence while among the best `num_beams` are finished, the best `num_beams` others live on. The search is over when
    `num_beams` hypotheses are finished and the best live prefix, scored at its present length, is no better than the worst of them
    (with early stopping: without looking at the live ones). What is live when `max_new_tokens` are generated competes as it stands.
    """

    def __init__(self, request: Request, target: TargetSide) -> None:
        self._finished: list[Hypothesis] = []
        super().__init__(request, target)

    @property
    def max_rows(self) -> int:
        """See `Search`."""
        return self.options.num_beams

    @property
    def num_generated(self) -> int:
        """See `Search`."""
        if self.live:
            return self.live[0].num_generated
        return sum(hypothesis.num_generated for hypothesis in self._finished[: self.options.num_answers])

    @property
    def certain_tokens(self) -> list[int]:
        """See `Search`: what all hypotheses that can still win have in common."""
        hypotheses = self.live + self._finished
        first = hypotheses[0].token_ids
        if not self.live:
            return first
        return first[: min(num_common_tokens(first, other.token_ids) for other in hypotheses)]

    def answers(self) -> list[Answer]:
        """See `Search`: by falling score."""
        return [hypothesis.answer(self.options.length_penalty) for hypothesis in self._finished[: self.options.num_answers]]

    @property
    def _num_wanted(self) -> int:
        return 2 * self.options.num_beams

    def _choose(self, candidates: Candidates) -> list[int] | None:
        width, eos_id = self.options.num_beams, self._target.eos_id
        best = [self._best(candidates, row, 2 * width) for row in range(len(self.live))]
        extensions = [
            (-(hypothesis.total + value), row, place)
            for row, hypothesis in enumerate(self.live)
            for place, (_, _, value) in enumerate(best[row])
        ]
        extensions.sort()  # of equals the better hypothesis and the lower token id first
        live: list[Hypothesis] = []
        parents: list[int] = []
        finished: list[Hypothesis] = []
        for rank, (_, row, place) in enumerate(extensions[: 2 * width]):
            option = best[row][place]
            is_eos = option[0] == eos_id
            if is_eos and rank < width:
                finished.append(self._extend(row, option, candidates))
            elif not is_eos and len(live) < width:
                live.append(self._extend(row, option, candidates))
                parents.append(row)
        self._keep_best(finished)
        if not self._is_over(live):
            self.live = live
            return parents
        if not self._finished:  # the rules leave nothing to go on with
            self._keep_best(self.live)
        self.live = []
        return []

    def _is_over(self, live: list[Hypothesis]) -> bool:
        """Tell whether the search ends here, whatever would be live; what competes as it stands is finished then."""
        if not live:
            return True
        if live[0].num_generated >= self._max_new_tokens:
            self._keep_best(live)
            return True
        if len(self._finished) < self.options.num_beams:
            return False
        penalty = self.options.length_penalty
        return self.options.is_stopped_early or live[0].score(penalty) <= self._finished[-1].score(penalty)

    def _keep_best(self, hypotheses: list[Hypothesis]) -> None:
        """Let hypotheses compete for the places of finished ones; those that were there first win a tie."""
        penalty = self.options.length_penalty
        ranked = sorted(self._finished + hypotheses, key=lambda hypothesis: -hypothesis.score(penalty))
        self._finished = ranked[: self.options.num_beams]
