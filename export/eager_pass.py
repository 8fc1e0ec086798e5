"""One pass of the eager model over a whole source and target: what the gate compares both the decode step and the scorer with.

Which rows are compared, and how closely, is not here: see `parity` and `scorer_parity`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.model.networks.network import Network

Floats = NDArray[np.float32]
Given = list[Floats]
"""What a row's caches hold: one array for each cache, in the shape of its row."""
# Positions whose log-probabilities are worked out together, for each product reads the whole vocabulary; and numbers they may be.
MAX_PRODUCT_POSITIONS, MAX_PRODUCT_SIZE = 256, 2**24


class EagerPass:
    """What the eager model makes of one source and target.

    Attributes:
        source: Its ids, as the model encodes them.
        target: Its ids, end-of-sequence included.
        first: What the decoder reads before them.
        hidden: Hidden states `[T, d_model]`.
        attention: The decoder's attention to the source, the heads' mean, `[L, T, S]`.
    """

    @torch.inference_mode()
    def __init__(
        self, model: Network, source: Sequence[int], target: Sequence[int], keeps_caches: bool = False, first: int | None = None
    ) -> None:
        """Run a model in evaluation mode.

        Args:
            model: The model.
            source: As the model encodes it, see `Network.prompt`.
            target: End-of-sequence included.
            keeps_caches: Whether `kept` can be asked for.
            first: What the decoder reads before the target; None for the model's start token.
        """
        self.source, self.target = source, target
        self.first = model.config.decoder_start_id if first is None else first
        seen = model.observe(source, [self.first, *target[:-1]])
        self.hidden: Tensor = seen.hidden
        self.attention: Floats = seen.attention.numpy()
        self._caches = seen.caches if keeps_caches else None
        self._decoder = model.decoder
        self._target = torch.tensor(target)
        self._target_log_probs = torch.full((len(target),), torch.nan, dtype=self.hidden.dtype)

    def kept(self, stop: int) -> Given:
        """Return what a decode step keeps of the positions before `stop`, see `Observation.caches`."""
        assert self._caches is not None, "it was not kept"
        return [part.numpy() for part in self._caches(stop)]

    @torch.inference_mode()
    def log_probs(self, start: int, stop: int) -> Floats:
        """Return the next token's log-probabilities after some positions, `[stop - start, V]`, padding as the model has it."""
        log_probs = self._decoder.log_probs(self.hidden[start:stop])
        self._target_log_probs[start:stop] = log_probs.gather(1, self._target[start:stop, None])[:, 0]
        table: Floats = log_probs.numpy()
        return table

    def target_log_probs(self) -> Floats:
        """Return the log-probabilities of the target's tokens `[T]`; those that `log_probs` has seen need no further product."""
        missing = self._target_log_probs.isnan().nonzero()[:, 0].tolist()
        step = product_positions(self._decoder.output_weight.shape[0])
        for start in range(missing[0], missing[-1] + 1, step) if missing else ():
            self.log_probs(start, min(start + step, missing[-1] + 1))
        found: Floats = self._target_log_probs.numpy()
        return found


def product_positions(vocab_size: int) -> int:
    """Return how many positions' log-probabilities over a vocabulary are worked out together."""
    return max(1, min(MAX_PRODUCT_POSITIONS, MAX_PRODUCT_SIZE // vocab_size))
