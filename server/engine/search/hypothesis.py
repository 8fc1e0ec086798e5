"""Hypotheses of a search, and the dimensions of the target side."""

import math
from dataclasses import dataclass

from msgspec import Struct

from dragoman.server.engine.messages import Answer


@dataclass(frozen=True, slots=True)
class TargetSide:
    """The target side of a model.

    Attributes:
        vocab_size: V, of the target.
        eos_id: End-of-sequence.
        decoder_start_id: First input of the decoder.
        max_tokens: Longest target, end-of-sequence included.
        num_choices: Most candidates of a step, fewer than V with a shortlist; V if 0 is given.
    """

    vocab_size: int
    eos_id: int
    decoder_start_id: int
    max_tokens: int
    num_choices: int = 0

    def __post_init__(self) -> None:
        if not self.num_choices:
            object.__setattr__(self, "num_choices", self.vocab_size)


# Tokens of sequences that are compared at once.
BLOCK = 64


class Hypothesis(Struct, frozen=True, gc=False):
    """A sequence of tokens; a longer one is made to extend it. It contains no reference cycles, hence `gc=False`.

    Attributes:
        token_ids: Tokens, those of the forced prefix included, end-of-sequence not.
        log_probs: The model's log-probability of each generated token, end-of-sequence included.
        total: Their sum after the repetition penalty.
        index: Of the answer, where answers are independent.
        is_eos: Whether it ended with end-of-sequence.
        top_ids: For each generated token the likeliest at its position, if requested.
        top_log_probs: Their log-probabilities.
    """

    token_ids: list[int]
    log_probs: list[float] = []
    total: float = 0.0
    index: int = 0
    is_eos: bool = False
    top_ids: list[list[int]] = []
    top_log_probs: list[list[float]] = []

    @property
    def num_generated(self) -> int:
        """Generated tokens, end-of-sequence included, without the forced prefix."""
        return len(self.log_probs)

    def score(self, length_penalty: float, num_forced: int = 0) -> float:
        """Return total / (num_generated + num_forced)^length_penalty; 0 where nothing was generated."""
        return self.total / math.pow(self.num_generated + num_forced, length_penalty) if self.log_probs else 0.0

    def answer(self, length_penalty: float, num_forced: int = 0) -> Answer:
        """Return the answer."""
        return Answer(
            self.token_ids,
            self.log_probs,
            self.score(length_penalty, num_forced),
            "eos" if self.is_eos else "length",
            self.top_ids,
            self.top_log_probs,
        )


def num_common_tokens(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, BLOCK):  # lists are compared much faster than their tokens one by one
        stop = start + BLOCK
        if a[start:stop] != b[start:stop]:
            for i, (x, y) in enumerate(zip(a[start:stop], b[start:stop], strict=False), start):
                if x != y:
                    return i
    return shorter
