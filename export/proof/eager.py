"""Eager PyTorch, the reference that the graphs are compared with: full-sequence passes in single and in double precision.

Single precision itself may be off by more than the tolerance: deep networks, and those whose scores are not divided by √Dh (T5),
magnify rounding errors. Double precision decides then, and graphs may be off by a small multiple of eager single precision's error.
"""

import copy
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.model.networks.network import Network

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Given = list[Floats]
"""A row's part of each cache, in the shape of its row."""
# Positions whose log-probabilities are computed together, since each product reads the whole vocabulary; and numbers in a product.
MAX_PRODUCT_POSITIONS, MAX_PRODUCT_SIZE = 256, 2**24
# Largest error of a graph as a multiple of eager single precision's: the two round at different places, and a fault is far larger.
MAX_TIMES_OF_ERROR = 4.0
# Passes whose errors count for all others, too: a single one may have a harmless softmax.
NUM_SAMPLES = 8
# Positions at the beginning and at the end of a pass from which its error is measured.
NUM_POSITIONS = 16


class EagerPass:
    """Pass of the eager model over one source and target.

    Attributes:
        source: Its ids, as the model encodes them.
        target: Its ids, end-of-sequence included.
        first: The decoder's first input.
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
            first: The decoder's first input; None for the model's start token.
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
        """Return the caches of a decode step after the positions before `stop`, see `Observation.caches`."""
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
        """Return the log-probabilities of the target's tokens `[T]`; those that `log_probs` has computed are kept."""
        missing = self._target_log_probs.isnan().nonzero()[:, 0].tolist()
        step = product_positions(self._decoder.output_weight.shape[0])
        for start in range(missing[0], missing[-1] + 1, step) if missing else ():
            self.log_probs(start, min(start + step, missing[-1] + 1))
        found: Floats = self._target_log_probs.numpy()
        return found


def product_positions(vocab_size: int) -> int:
    """Return for how many positions log-probabilities over a vocabulary are computed together."""
    return max(1, min(MAX_PRODUCT_POSITIONS, MAX_PRODUCT_SIZE // vocab_size))


class Allowance(NamedTuple):
    """Largest accepted differences from double precision."""

    log_prob: float  # of a token's log-probability
    attention: float  # of an attention weight


class DoublePrecision:
    """Passes in double precision, made on demand."""

    def __init__(self, model: Network) -> None:
        """Take a model in single precision and evaluation mode."""
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
        """Return the difference from double precision allowed to a graph: that of eager single precision, times a small factor.

        Args:
            single: The pass that results are compared with.
            samples: Other passes; the errors of the first count, too.
        """
        for whole in (*islice(samples, NUM_SAMPLES), single):
            if whole not in self._errors:
                self._errors[whole] = self._error(whole)
        return Allowance(*(MAX_TIMES_OF_ERROR * max(errors) for errors in zip(*self._errors.values(), strict=True)))

    def _error(self, single: EagerPass) -> Allowance:
        """Return the error of eager single precision."""
        double, length = self.of(single), len(single.target)
        spans = {(0, min(NUM_POSITIONS, length)), (max(length - NUM_POSITIONS, 0), length)}
        log_prob = max(_largest_difference(single.log_probs(*span), double.log_probs(*span)) for span in spans)
        return Allowance(log_prob, float(np.abs(single.attention - double.attention).max(initial=0)))

    def margin(self, single: EagerPass, position: int, token: int) -> float:
        """Return the distance of a token's log-probability from the best at a position."""
        log_probs = self.of(single).log_probs(position, position + 1)[0]
        return float(log_probs.max() - log_probs[token])


def _largest_difference(left: Floats, right: Floats) -> float:
    """Return the largest difference of two tables of log-probabilities; two of -inf, as padding may have, agree."""
    with np.errstate(invalid="ignore"):
        differences = np.abs(left - right)
    return float(np.nanmax(differences))
