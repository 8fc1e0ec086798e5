"""Hypotheses of a search, and the dimensions of the target side."""

import math
from dataclasses import dataclass

from msgspec import Struct

from dragoman.server.engine.messages import Answer


@dataclass(frozen=True, slots=True)
class TargetSide:
    """Target side of a model.

    Attributes:
        vocab_size: V of the target.
        decoder_start_id: First input of the decoder.
        max_tokens: Longest target, end-of-sequence included.
        num_choices: Most candidates of a step, fewer than V with a shortlist; 0 becomes V.
    """

    vocab_size: int
    eos_id: int
    decoder_start_id: int
    max_tokens: int
    num_choices: int = 0

    def __post_init__(self) -> None:
        if not self.num_choices:
            object.__setattr__(self, "num_choices", self.vocab_size)


# Tokens compared at once.
BLOCK = 64


class Hypothesis(Struct, frozen=True, gc=False):
    """Immutable token sequence of a search; it contains no reference cycles, hence `gc=False`.

    Attributes:
        token_ids: With the forced prefix, without end-of-sequence.
        log_probs: The model's log-probability of each generated token, end-of-sequence included.
        total: Sum of the log-probabilities after the repetition penalty.
        index: Index of the answer, where answers are independent.
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
