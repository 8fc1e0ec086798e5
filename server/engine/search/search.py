"""Search interface: hypotheses of one request, extended by the candidates of each step.

A search has no rows and no caches: the engine assigns rows to live hypotheses, and copies them according to the parents.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.messages import Answer, Request, SearchOptions
from dragoman.server.engine.search.constraints import Constraints, Option
from dragoman.server.engine.search.hypothesis import NO_TERMS, Hypothesis, Progress, TargetSide
from dragoman.server.runtime.runner import Candidates

# Growth factor of the number of candidates when there were too few.
WIDENING = 16


class Search(ABC):
    """Search of one request.

    Attributes:
        live: Unfinished hypotheses; the engine feeds the last token of each.
        num_candidates: K that the next `advance` needs.
        wanted: K by index of the live hypotheses that need a top-k refetch before the search can continue.
    """

    def __init__(self, request: Request, target: TargetSide) -> None:
        """Start with one hypothesis, which is fed the forced prefix first."""
        self.options: SearchOptions = request.search
        self.live = [Hypothesis([])]
        self.num_candidates = 1
        self.wanted: dict[int, int] = {}
        self._target = target
        self._max_new_tokens = request.max_new_tokens
        self._constraints = Constraints(request.search, target, request.max_new_tokens)
        if not self.options.forced_prefix:
            self._set_num_candidates()

    def go_on_from(self, hypothesis: Hypothesis) -> None:
        """Start with a hypothesis generated elsewhere, after the forced prefix."""
        self.live = [hypothesis]
        self._set_num_candidates()

    def advance(self, candidates: Candidates) -> list[int] | None:
        """Extend `live` by the candidates of a step, one row for each live hypothesis.

        Returns:
            Index of each new live hypothesis's parent among the previous ones; empty when the search is over. None, with nothing
            changed, if more candidates are `wanted`: pass them to `take_refetched`, then call `resume`.
        """
        prefix = self.options.forced_prefix
        num_fed = len(self.live[0].token_ids)
        if num_fed < len(prefix):
            self.live = [Hypothesis(prefix[: num_fed + 1])]
            if num_fed + 1 == len(prefix):
                self._set_num_candidates()
            return [0]
        self._seen = candidates
        if self._constraints.forces_end(self.live[0]):
            for row in range(len(self.live)):
                self._see(row, candidates.ids[row], candidates.log_probs[row])
        else:
            self._decide_all(candidates)
        if self.wanted:
            self._seen = candidates.kept(self.options.num_top_log_probs)
        return self.resume()

    def take_refetched(self, hypothesis: int, candidates: Candidates) -> None:
        """Process the `[1, K]` candidates of a hypothesis in `wanted`."""
        del self.wanted[hypothesis]
        self._see(hypothesis, candidates.ids[0], candidates.log_probs[0])

    def resume(self) -> list[int] | None:
        """Continue if there are enough candidates; returns as `advance`."""
        if self.wanted:
            return None
        parents = self._choose(self._seen)
        if parents:
            self._set_num_candidates()
        return parents

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Most hypotheses live at once from now on."""

    @property
    @abstractmethod
    def num_generated(self) -> int:
        """Generated tokens of the answers, end-of-sequence included; while running, of the longest hypothesis."""

    @property
    @abstractmethod
    def certain_tokens(self) -> list[int]:
        """Tokens that the first answer is certain to begin with."""

    @property
    @abstractmethod
    def finished(self) -> list[Hypothesis]:
        """Hypotheses that have ended and may be answers."""

    @abstractmethod
    def answers(self) -> list[Answer]:
        """Return the answers, once the search is over."""

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """Options of each hypothesis that the next choice considers."""

    @abstractmethod
    def _decide(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Keep the options of a hypothesis from candidates `[K]`, or request more (`_want_more`)."""

    @abstractmethod
    def _decide_on(self, row: int, option: Option) -> None:
        """Keep the only option of a hypothesis."""

    @abstractmethod
    def _choose(self, candidates: Candidates) -> list[int]:
        """Choose the next tokens from the options kept; returns as `advance`."""

    def _see(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Keep options from candidates `[K]`; where the end is forced, find end-of-sequence."""
        if not self._constraints.forces_end(self.live[row]):
            self._decide(row, ids, log_probs)
        elif (end := self._constraints.end(ids, log_probs)) is None:
            self._want_more(row, len(ids))
        else:
            self._decide_on(row, end)

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.score(self.options.length_penalty, self.options.num_forced)

    def _answer(self, hypothesis: Hypothesis) -> Answer:
        return hypothesis.answer(self.options.length_penalty, self.options.num_forced)

    def _decide_all(self, candidates: Candidates) -> None:
        for row in range(len(self.live)):
            self._decide(row, candidates.ids[row], candidates.log_probs[row])

    def _want_more(self, row: int, num_seen: int, *, is_far: bool = False) -> None:
        """Request more candidates of a hypothesis, or all if most would be needed."""
        num_choices = self._target.num_choices
        assert num_seen < num_choices, "everything was not enough"
        wider = num_seen * WIDENING
        self.wanted[row] = num_choices if is_far or wider * WIDENING // 2 >= num_choices else wider

    def _set_num_candidates(self) -> None:
        if self._constraints.is_idle:  # all need the same
            needed = self._constraints.num_needed(self.live[0], self.num_wanted)
        else:
            needed = max(self._constraints.num_needed(hypothesis, self.num_wanted) for hypothesis in self.live)
        self.num_candidates = min(max(needed, self.options.num_top_log_probs), self._target.num_choices)

    def _extend(
        self, row: int, option: Option, candidates: Candidates | None, index: int = 0, progress: Progress = NO_TERMS
    ) -> Hypothesis:
        """Return a hypothesis extended by an option, with its top tokens if requested."""
        hypothesis = self.live[row]
        token, log_prob, value = option
        is_eos = token == self._target.eos_id
        top_ids, top_log_probs = hypothesis.top_ids, hypothesis.top_log_probs
        if count := self.options.num_top_log_probs:
            assert candidates is not None
            top_ids = [*top_ids, candidates.ids[row, :count].tolist()]
            top_log_probs = [*top_log_probs, candidates.log_probs[row, :count].tolist()]
        return Hypothesis(
            hypothesis.token_ids if is_eos else [*hypothesis.token_ids, token],
            [*hypothesis.log_probs, log_prob],
            hypothesis.total + value,
            index,
            is_eos,
            top_ids,
            top_log_probs,
            row,
            progress=progress,
        )
