"""Hypotheses of a search, and the dimensions of the target side."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from dragoman.server.engine.messages import Answer


@dataclass(frozen=True, slots=True)
class TargetSide:
    """Target side of a model."""

    vocab_size: int  # V of the target
    eos_id: int
    decoder_start_id: int  # first input of the decoder
    max_tokens: int  # longest target, end-of-sequence included
    num_choices: int = 0  # most candidates of a step, fewer than V with a shortlist; 0 becomes V

    def __post_init__(self) -> None:
        if not self.num_choices:
            object.__setattr__(self, "num_choices", self.vocab_size)


class Progress(NamedTuple):
    """Terms of a hypothesis."""

    missing: int = 0  # set of the terms that it misses, bit by bit
    node: int = 0  # its last tokens that begin one of them, see `search/terms.py`; 0 for none


NO_TERMS = Progress()
# Tokens compared at once.
BLOCK = 64


class Hypothesis(Struct, frozen=True, gc=False):
    """Immutable token sequence of a search; it contains no reference cycles, hence `gc=False`."""

    token_ids: list[int]  # with the forced prefix, without end-of-sequence
    log_probs: list[float] = []  # the model's log-probability of each generated token, end-of-sequence included
    total: float = 0.0  # sum of the log-probabilities after the repetition penalty
    index: int = 0  # index of the answer, where answers are independent
    is_eos: bool = False  # whether it ended with end-of-sequence
    top_ids: list[list[int]] = []  # for each generated token the likeliest at its position, if requested
    top_log_probs: list[list[float]] = []  # their log-probabilities
    parent: int = 0  # index among the live hypotheses of the step before
    alignment: list[int] = []  # see `Answer`; set once it is finished, if requested
    progress: Progress = NO_TERMS

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, with end-of-sequence, without the forced prefix."""
        return len(self.log_probs)

    def score(self, length_penalty: float, num_forced: int = 0) -> float:
        """Return total / (num_generated + num_forced)^length_penalty; 0 if nothing was generated."""
        return self.total / math.pow(self.num_generated + num_forced, length_penalty) if self.log_probs else 0.0

    def answer(self, length_penalty: float, num_forced: int = 0) -> Answer:
        return Answer(
            self.token_ids,
            self.log_probs,
            self.score(length_penalty, num_forced),
            "eos" if self.is_eos else "length",
            self.top_ids,
            self.top_log_probs,
            self.alignment,
        )


def num_common_tokens(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, BLOCK):  # comparing lists is much faster than comparing tokens
        stop = start + BLOCK
        if a[start:stop] != b[start:stop]:
            for i, (x, y) in enumerate(zip(a[start:stop], b[start:stop], strict=False), start):
                if x != y:
                    return i
    return shorter
