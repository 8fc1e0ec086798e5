"""Likelihood of a text: log-probability, loss and perplexity. No torch, so that a server's answers can be summed, too."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dragoman.model.errors import InputError


def perplexity_of(loss: float) -> float:
    """Return e to a cross-entropy a token, in nats; infinite where that is more than numbers hold."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Likelihood of a text."""

    log_prob: float  # natural logarithm of its probability, summed over all lines
    num_tokens: int  # tokens, each line's end-of-sequence included
    num_lines: int  # lines

    @classmethod
    def of(cls, lines: Iterable[list[float]]) -> "Likelihood":
        """Sum lines, of each of which the log-probability of every token is given.

        Raises:
            InputError: If there is no token.
        """
        sums = [(math.fsum(line), len(line)) for line in lines]
        num_tokens = sum(number for _, number in sums)
        if not num_tokens:
            raise InputError("there is no text")
        return cls(math.fsum(log_prob for log_prob, _ in sums), num_tokens, len(sums))

    @property
    def loss(self) -> float:
        """Cross-entropy a token, in nats."""
        return -self.log_prob / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Tokens that would be as hard to choose from, were they all as likely: e to the loss."""
        return perplexity_of(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """Return every field and what follows from them, ready for JSON."""
        return asdict(self) | {"loss": self.loss, "perplexity": self.perplexity}

    def __str__(self) -> str:
        """Say it in a line."""
        return f"perplexity {self.perplexity:.4f}  loss {self.loss:.6f}  {self.num_tokens} tokens in {self.num_lines} lines"
