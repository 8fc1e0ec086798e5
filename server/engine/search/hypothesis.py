"""One way an answer may go: its tokens so far and what they cost."""

import math

from msgspec import Struct

from dragoman.server.engine.messages import Answer

BLOCK = 64
"""Tokens that two sequences are compared by."""


class Hypothesis(Struct, frozen=True, gc=False):
    """A sequence of tokens that grows by making a longer one of it; nothing in it can lead back to it.

    Attributes:
        token_ids: Tokens, those of the forced prefix included, end-of-sequence not.
        log_probs: The model's log-probability of each generated token, end-of-sequence included.
        total: Their sum as the search sees them: with the repetition penalty.
        index: Place of the answer among its request's, where answers have places from the start.
        is_eos: Whether the model ended it.
        top_ids: For each generated token the likeliest at its position, if they were asked for.
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
        """Tokens generated, end-of-sequence included, the forced prefix not."""
        return len(self.log_probs)

    def score(self, length_penalty: float, num_forced: int = 0) -> float:
        """Return total / length^length_penalty; 0 where nothing was generated.

        Args:
            length_penalty: Exponent.
            num_forced: Tokens of the forced prefix that count in the length, too.
        """
        return self.total / math.pow(self.num_generated + num_forced, length_penalty) if self.log_probs else 0.0

    def answer(self, length_penalty: float, num_forced: int = 0) -> Answer:
        """Describe it to the front end."""
        return Answer(
            self.token_ids,
            self.log_probs,
            self.score(length_penalty, num_forced),
            "eos" if self.is_eos else "length",
            self.top_ids,
            self.top_log_probs,
        )


def num_common_tokens(a: list[int], b: list[int]) -> int:
    """Return the length of two sequences' longest common beginning."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, BLOCK):  # lists are compared much faster than their tokens one by one
        stop = start + BLOCK
        if a[start:stop] != b[start:stop]:
            for i, (x, y) in enumerate(zip(a[start:stop], b[start:stop], strict=False), start):
                if x != y:
                    return i
    return shorter
