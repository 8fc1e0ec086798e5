"""The eager model in double precision: the judge where single precision itself is further off than the gate's tolerance.

Deep networks, and those whose scores nothing divides by √Dh (T5's), can magnify what single precision rounds: eager PyTorch is then
off, too. Such graphs may be as far from double precision as eager single precision is, times a small factor.
"""

import copy
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from dragoman.export.eager_pass import EagerPass, Floats
from dragoman.model.networks.network import Network

# How many times eager single precision's own error a graph's may be. The two round at different places; a mistake is far beyond.
MAX_TIMES_OF_ERROR = 4.0
# Passes whose errors count for all others, too: in one alone, the softmax may have had nothing to magnify.
NUM_SAMPLES = 8
# Positions at the beginning and at the end of a pass from which its own error is told.
NUM_POSITIONS = 16


class Allowance(NamedTuple):
    """How far results may be from double precision."""

    log_prob: float  # of a token's log-probability
    attention: float  # of an attention weight


class DoublePrecision:
    """Passes in double precision, made only when they are asked for."""

    def __init__(self, model: Network) -> None:
        """Judge a model in single precision and evaluation mode."""
        self._single = model
        self._double: Network | None = None
        self._passes: dict[EagerPass, EagerPass] = {}
        self._errors: dict[EagerPass, Allowance] = {}

    def of(self, single: EagerPass) -> EagerPass:
        """Return the pass over the same source and target."""
        if self._double is None:
            self._double = copy.deepcopy(self._single).double()
        if single not in self._passes:
            self._passes[single] = EagerPass(self._double, single.source, single.target, first=single.first)
        return self._passes[single]

    def allowance(self, single: EagerPass, samples: Iterable[EagerPass]) -> Allowance:
        """Return how far a graph may be from double precision: as far as eager single precision is, times a small factor.

        Args:
            single: The pass that results are compared with.
            samples: Others, of which the first are looked at, too.
        """
        for whole in (*islice(samples, NUM_SAMPLES), single):
            if whole not in self._errors:
                self._errors[whole] = self._error(whole)
        return Allowance(*(MAX_TIMES_OF_ERROR * max(errors) for errors in zip(*self._errors.values(), strict=True)))

    def _error(self, single: EagerPass) -> Allowance:
        """Return how far eager single precision is off."""
        double, length = self.of(single), len(single.target)
        spans = {(0, min(NUM_POSITIONS, length)), (max(length - NUM_POSITIONS, 0), length)}
        log_prob = max(_largest_difference(single.log_probs(*span), double.log_probs(*span)) for span in spans)
        return Allowance(log_prob, float(np.abs(single.attention - double.attention).max(initial=0)))

    def margin(self, single: EagerPass, position: int, token: int) -> float:
        """Return how far a token's log-probability lies below the best one's at a position."""
        log_probs = self.of(single).log_probs(position, position + 1)[0]
        return float(log_probs.max() - log_probs[token])


def _largest_difference(left: Floats, right: Floats) -> float:
    """Return how far two tables of log-probabilities differ; where both are at -inf, as padding may be, they agree."""
    with np.errstate(invalid="ignore"):
        differences = np.abs(left - right)
    return float(np.nanmax(differences))
