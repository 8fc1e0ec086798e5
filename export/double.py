"""The eager model in double precision: the judge where single precision itself is further off than the gate's tolerance.

Scores that nothing divides by √Dh (T5's) can be so large that the softmax magnifies what single precision rounds: eager PyTorch is
then off, too. Such graphs may be as far from double precision as eager single precision is, times a small factor.
"""

import copy

import numpy as np
import torch

from dragoman.export.eager_pass import EagerPass, Floats
from dragoman.model.transformer import Transformer

# How many times eager single precision's own error a graph's may be. The two round at different places; a mistake is far beyond.
MAX_TIMES_OF_ERROR = 4.0
# Positions at the beginning and at the end of a pass from which its own error is told.
NUM_POSITIONS = 16


class DoublePrecision:
    """Passes in double precision, made only when they are asked for."""

    def __init__(self, model: Transformer) -> None:
        """Judge a model in single precision and evaluation mode."""
        self.is_needed = not model.config.is_attention_scaled
        self._single = model
        self._double: Transformer | None = None
        self._last: tuple[EagerPass, EagerPass] | None = None

    def of(self, single: EagerPass) -> EagerPass:
        """Return the pass over the same source and target; the last one made is kept."""
        if self._double is None:
            self._double = copy.deepcopy(self._single).double()
        if self._last is None or self._last[0] is not single:
            self._last = single, EagerPass(self._double, single.source, single.target)
        return self._last[1]

    def allowance(self, single: EagerPass) -> float:
        """Return how far a log-probability of this pass may be from double precision, whatever token's."""
        double, length = self.of(single), len(single.target)
        spans = {(0, min(NUM_POSITIONS, length)), (max(length - NUM_POSITIONS, 0), length)}
        return MAX_TIMES_OF_ERROR * max(_largest_difference(single.log_probs(*span), double.log_probs(*span)) for span in spans)

    def attention_allowance(self, single: EagerPass) -> float:
        """Return the same of an attention weight."""
        return MAX_TIMES_OF_ERROR * float(np.abs(single.attention - self.of(single).attention).max())

    @torch.inference_mode()
    def margin(self, single: EagerPass, position: int, token: int) -> float:
        """Return how far a token's log-probability lies below the best one's at a position."""
        log_probs = self.of(single).log_probs(position, position + 1)[0]
        return float(log_probs.max() - log_probs[token])


def _largest_difference(left: Floats, right: Floats) -> float:
    """Return how far two tables of log-probabilities differ where both are finite; padding may be at -inf in both."""
    with np.errstate(invalid="ignore"):
        differences = np.abs(left - right)
    return float(np.nanmax(differences))
