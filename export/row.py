"""A row: one sequence on its way through the slots in which the gate drives the graphs, and what it was given on it."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dragoman.export.eager_pass import EagerPass, Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EagerStretch:
    """A stretch of a long row: it begins where the eager model has left off, and need not be driven there step by step."""

    start: int  # its first position; what caches hold of those before it is the eager model's
    whole: EagerPass  # the eager model's pass over the whole row


@dataclass(slots=True)
class Row:
    """One sequence on its way through the slots."""

    source: list[int]  # source ids, as the model encodes them, see `Network.prompt`
    inputs: list[int]  # what is fed, what the decoder reads first included; a greedy row grows by what it draws
    num_steps: int  # where it ends at the latest: the position after its last step
    eos_id: int | None = None  # token that ends a greedy row early; None in a teacher-forced row
    stretch: EagerStretch | None = None  # what a row begins with that does not begin at position 0; see `EagerStretch`
    choices: list[int] = field(default_factory=list)  # the first candidate, step by step
    log_probs: list[float] = field(default_factory=list)  # its log-probabilities
    digest: str = ""  # of every candidate and log-probability it was given

    @property
    def position(self) -> int:
        """The position of the token to feed next."""
        return (self.stretch.start if self.stretch is not None else 0) + len(self.log_probs)

    @property
    def is_done(self) -> bool:
        """Whether it leaves its slot."""
        return self.position == self.num_steps or (self.eos_id is not None and self.inputs[-1] == self.eos_id and self.position > 0)

    def again(self) -> "Row":
        """Return a teacher-forced row that has yet to take the same way."""
        return Row(self.source, self.inputs, self.num_steps, stretch=self.stretch)

    def take(self, ids: Ints, log_probs: Floats) -> None:
        """Take one step's candidates, `[K]` each."""
        self.digest = hashlib.sha256(self.digest.encode() + ids.tobytes() + log_probs.tobytes()).hexdigest()
        self.choices.append(int(ids[0]))
        self.log_probs.append(float(log_probs[0]))
        if self.eos_id is not None:
            self.inputs.append(int(ids[0]))
