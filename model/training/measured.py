"""What a validation gave, and by what models are ranked. No torch."""

import math
from dataclasses import dataclass

from dragoman.model.likelihood import perplexity_of


@dataclass(frozen=True, slots=True)
class Measured:
    """What a validation gave."""

    loss: float  # cross-entropy a token, in nats, without smoothing
    bleu: float | None = None  # of greedy translations, cased; None of a model that translates nothing
    chrf: float | None = None  # the same

    @property
    def rank(self) -> float:
        """The higher, the better the model: BLEU, or the loss turned round."""
        return -self.loss if self.bleu is None else self.bleu

    def __str__(self) -> str:
        """Name the loss and what counts."""
        return f"loss {self.loss:.3f}, {described(self.rank)}"


def described(rank: float) -> str:
    """Name the figure that a rank was made of: BLEU, which is not negative, or perplexity; a loss of 0 makes -0."""
    return f"perplexity {perplexity_of(-rank):.2f}" if math.copysign(1.0, rank) < 0 else f"BLEU {rank:.2f}"
