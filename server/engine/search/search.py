"""How a request's answers are found: a search keeps hypotheses, sees their candidates and says how they go on.

It knows no rows and no caches. The engine gives each live hypothesis a row and moves caches as the search's parents say.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from dragoman.server.engine.messages import Answer, Request, SearchOptions
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.constraints import Constraints, Option
from dragoman.server.engine.search.hypothesis import Hypothesis


@dataclass(frozen=True, slots=True)
class TargetSide:
    """What searching needs to know of a model.

    Attributes:
        vocab_size: V, of the target.
        eos_id: End-of-sequence.
        decoder_start_id: What the decoder is fed first.
        max_tokens: Longest target, end-of-sequence included.
    """

    vocab_size: int
    eos_id: int
    decoder_start_id: int
    max_tokens: int


class Search(ABC):
    """One request's search.

    Attributes:
        live: Hypotheses that grow; the engine feeds each one's last token.
        num_candidates: K that the next `advance` needs.
    """

    def __init__(self, request: Request, target: TargetSide) -> None:
        """Start with one hypothesis, to which the forced prefix is fed first."""
        self.options: SearchOptions = request.search
        self.live = [Hypothesis([])]
        self.num_candidates = 1
        self._target = target
        self._max_new_tokens = request.max_new_tokens
        self._constraints = Constraints(request.search, target.eos_id, target.vocab_size)
        if not self.options.forced_prefix:
            self._set_num_candidates()

    def advance(self, candidates: Candidates) -> list[int] | None:
        """Take the candidates of a step, a row a live hypothesis, and go on with `live`.

        Returns:
            For each hypothesis that is live now the index of the one it continues, among those that were live; none when the search
            is over. None where the step has to be seen again with the whole vocabulary; nothing has changed then.
        """
        prefix = self.options.forced_prefix
        num_fed = len(self.live[0].token_ids)
        if num_fed < len(prefix):
            self.live = [Hypothesis(prefix[: num_fed + 1])]
            parents: list[int] | None = [0]
        else:
            parents = self._choose(candidates)
        if parents and len(self.live[0].token_ids) >= len(prefix):
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
    def _choose(self, candidates: Candidates) -> list[int] | None:
        """Take one generated token; see `advance`."""

    def _set_num_candidates(self) -> None:
        """Ask for what the next choice needs, whatever the rules take away."""
        needed = max(self._constraints.num_needed(hypothesis, self._num_wanted) for hypothesis in self.live)
        self.num_candidates = min(max(needed, self.options.num_top_log_probs), self._target.vocab_size)

    def _best(self, candidates: Candidates, row: int, num_wanted: int) -> list[Option]:
        """Return the best of what a hypothesis may go on with."""
        return self._constraints.best(self.live[row], candidates.ids[row], candidates.log_probs[row], num_wanted)

    def _extend(self, row: int, option: Option, candidates: Candidates, index: int = 0) -> Hypothesis:
        """Return a hypothesis made longer by one of its options."""
        hypothesis = self.live[row]
        token, log_prob, value = option
        is_eos = token == self._target.eos_id
        top_ids, top_log_probs = hypothesis.top_ids, hypothesis.top_log_probs
        if count := self.options.num_top_log_probs:
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
