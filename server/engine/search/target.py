"""What searching needs to know of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetSide:
    """The side of a model that answers are on.

    Attributes:
        vocab_size: V, of the target.
        eos_id: End-of-sequence.
        decoder_start_id: What the decoder is fed first.
        max_tokens: Longest target, end-of-sequence included.
        num_choices: Candidates that a step can give at the most: fewer than V where it chooses from a part of the vocabulary; 0,
            as it is given, stands for V.
    """

    vocab_size: int
    eos_id: int
    decoder_start_id: int
    max_tokens: int
    num_choices: int = 0

    def __post_init__(self) -> None:
        if not self.num_choices:
            object.__setattr__(self, "num_choices", self.vocab_size)
