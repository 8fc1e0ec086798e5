"""How a request's answers are found: a search keeps hypotheses, sees their candidates and says how they go on.

It knows no rows and no caches. The engine gives each live hypothesis a row and moves caches as the search's parents say.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.messages import Answer, Request, SearchOptions
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.constraints import Constraints, Option
from dragoman.server.engine.search.hypothesis import Hypothesis
from dragoman.server.engine.search.target import TargetSide

WIDENING = 16
"""How many times as many candidates a search sees of a hypothesis for which those it saw were not enough."""


class Search(ABC):
    """One request's search.

    Attributes:
        live: Hypotheses that grow; the engine feeds each one's last token.
        num_candidates: K that the next `advance` needs.
        wanted: Live hypotheses of which more has to be seen before the search can go on: their indices, and the K of each.
    """

    def __init__(self, request: Request, target: TargetSide) -> None:
        """Start with one hypothesis, to which the forced prefix is fed first."""
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
        """Begin with what has been generated elsewhere, after all of the forced prefix."""
        self.live = [hypothesis]
        self._set_num_candidates()

    def advance(self, candidates: Candidates) -> list[int] | None:
        """Take the candidates of a step, a row a live hypothesis, and go on with `live`.

        Returns:
            For each hypothesis that is live now the index of the one it continues, among those that were live; none when the search
            is over. None where more has to be seen, as `wanted` says: `look` takes it, then `resume` goes on. Nothing changes
            before.
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

    def look(self, hypothesis: int, candidates: Candidates) -> None:
        """Take more candidates of a hypothesis in `wanted`: `[1, K]` of the same step, with the K told there."""
        del self.wanted[hypothesis]
        self._see(hypothesis, candidates.ids[0], candidates.log_probs[0])

    def resume(self) -> list[int] | None:
        """Go on if enough has been seen; see `advance`."""
        if self.wanted:
            return None
        parents = self._choose(self._seen)
        if parents:
            self._set_num_candidates()
        return parents

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Hypotheses that can be live at once from now on."""

    @property
    @abstractmethod
    def num_generated(self) -> int:
        """Tokens generated for its answers, end-of-sequence included; while it runs, those of its longest hypothesis."""

    @property
    @abstractmethod
    def certain_tokens(self) -> list[int]:
        """Tokens that the first answer is sure to begin with."""

    @abstractmethod
    def answers(self) -> list[Answer]:
        """Return the answers, once the search is over."""

    @property
    @abstractmethod
    def _num_wanted(self) -> int:
        """Best options that the next choice looks at, for each hypothesis."""

    @abstractmethod
    def _decide(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Keep what a hypothesis may go on with, or ask for more (`_want_more`); it sees candidates `[K]`."""

    @abstractmethod
    def _decide_on(self, row: int, option: Option) -> None:
        """Keep the one option that a hypothesis has."""

    @abstractmethod
    def _choose(self, candidates: Candidates) -> list[int]:
        """Take one generated token, by what was decided of each hypothesis; see `advance`."""

    def _see(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Decide by a hypothesis's candidates `[K]`; where its end is forced, end-of-sequence only has to be found."""
        if not self._constraints.forces_end(self.live[row]):
            self._decide(row, ids, log_probs)
        elif (end := self._constraints.end(ids, log_probs)) is None:
            self._want_more(row, len(ids))
        else:
            self._decide_on(row, end)

    def _score(self, hypothesis: Hypothesis) -> float:
        """Return what a hypothesis is ranked by."""
        return hypothesis.score(self.options.length_penalty, self.options.num_forced)

    def _answer(self, hypothesis: Hypothesis) -> Answer:
        """Describe one to the front end."""
        return hypothesis.answer(self.options.length_penalty, self.options.num_forced)

    def _decide_all(self, candidates: Candidates) -> None:
        for row in range(len(self.live)):
            self._decide(row, candidates.ids[row], candidates.log_probs[row])

    def _want_more(self, row: int, num_seen: int, *, is_far: bool = False) -> None:
        """Ask to see more of a hypothesis: everything, if most of it would have to be seen anyhow."""
        num_choices = self._target.num_choices
        assert num_seen < num_choices, "everything was not enough"
        wider = num_seen * WIDENING
        self.wanted[row] = num_choices if is_far or wider * WIDENING // 2 >= num_choices else wider

    def _set_num_candidates(self) -> None:
        """Ask for what the next choice needs, whatever the rules take away."""
        if self._constraints.is_idle:  # one needs what the others do
            needed = self._constraints.num_needed(self.live[0], self._num_wanted)
        else:
            needed = max(self._constraints.num_needed(hypothesis, self._num_wanted) for hypothesis in self.live)
        self.num_candidates = min(max(needed, self.options.num_top_log_probs), self._target.num_choices)

    def _extend(self, row: int, option: Option, candidates: Candidates | None, index: int = 0) -> Hypothesis:
        """Return a hypothesis made longer by one of its options; of candidates its likeliest tokens are told, if asked for."""
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
        )
