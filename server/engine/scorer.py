"""What the engine asks of whatever computes scores."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Scorer(Protocol):
    """Whatever computes scores. Used by one thread at a time, except for `interrupt`."""

    @property
    def is_loaded(self) -> bool:
        """Whether it can score."""
        ...

    @property
    def is_on_device(self) -> bool:
        """Whether it works on the engine's device, so that opening it and scoring have their place among the engine's steps."""
        ...

    def check(self) -> None:
        """Compare the files that `open` reads with those the engine runs; raise if they are others, or away."""
        ...

    def open(self) -> None:
        """Load."""
        ...

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None, decoder_start_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Score one pair, end-of-sequence included in both.

        Args:
            source_ids: `[S]`.
            target_ids: `[T]`.
            layer: Decoder layer whose attention is wanted; None for the mean of all.
            decoder_start_id: What the decoder is fed first; None for the model's start token.

        Returns:
            The target tokens' log-probabilities `[T]`, and the attention to the source `[T, S]`, averaged over heads; `[T, 0]` of a
            model that has none.
        """
        ...

    def interrupt(self) -> None:
        """Let a pair that is being scored fail soon; for any thread."""
        ...
