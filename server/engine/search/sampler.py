"""Drawing tokens at random, exactly as from the whole vocabulary though only its likeliest part is seen.

The part not seen has a known largest possible weight. A draw is decided when it comes out the same whether that part weighs nothing
or as much as it can; otherwise the caller asks again with the whole vocabulary, and the same random number is used.
"""

import numpy as np
from numpy.typing import NDArray

from server.engine.messages import Sampling
from server.engine.search.constraints import Options

NUM_CANDIDATES = 64
"""Candidates asked for where `top_k` does not say how many can be drawn."""

_ROUNDING = 1e-4
"""More than the sum of a row's float32 probabilities is off 1: 1e-6 of 5,000 and 1e-5 of 250,000 are usual."""

_SUM_ROUNDING = 1e-9
"""More than the relative rounding of a sum of float64 weights."""


class Sampler:
    """Draws the tokens of one answer, one random number a token.

    Numbers come from Philox (Salmon et al., 2011) keyed by the seed and the answer's index, so they depend on nothing else.
    """

    def __init__(self, sampling: Sampling, index: int) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, index], np.uint64)))
        self._number: float | None = None

    def draw(self, options: Options, smallest: float, unseen_probability: float, num_unseen: int) -> int | None:
        """Draw one of the options.

        Args:
            options: The likeliest, after the rules; at least one.
            smallest: Log-probability that no unseen token exceeds.
            unseen_probability: Of all unseen tokens together, by the model.
            num_unseen: How many there are; 0 where the options are all there is.

        Returns:
            Its place among the options; None if that depends on unseen tokens. The next call draws with the same random number,
            until `accept`.
        """
        sampling = self._sampling
        top_k = sampling.top_k or len(options.ids) + num_unseen
        if top_k <= len(options.ids):
            num_unseen = 0
        count = _num_in_place(options, smallest) if num_unseen else min(top_k, len(options.ids))
        if not count:
            return None
        highest = float(options.values[0])
        weights = np.exp((options.values[:top_k] - highest) / sampling.temperature)
        unseen = 0.0
        if num_unseen:
            unseen = float(weights[count:].sum())
            unseen += self._largest_unseen_weight(smallest - highest, unseen_probability, num_unseen, highest)
        if self._number is None:
            self._number = float(self._random.random())
        return _find(np.cumsum(weights[:count]), unseen, sampling.top_p, self._number, is_complete=not num_unseen)

    def accept(self) -> None:
        """Go on to the next random number."""
        self._number = None

    def _largest_unseen_weight(self, smallest: float, probability: float, count: int, highest: float) -> float:
        """Return an upper bound of the unseen tokens' weight, in units of the likeliest option's.

        `smallest` is relative to the likeliest. Each token weighs at most exp(smallest / temperature); and up to a temperature of 1
        the weight for a probability falls with the probability, so that all together weigh at most what they would if all of it
        were in tokens of the largest size.
        """
        if smallest == -np.inf:
            return 0.0
        temperature = self._sampling.temperature
        exponent = float(np.log(count)) + smallest / temperature
        if temperature <= 1:
            share = float(np.log(max(probability, 0.0) + _ROUNDING)) - highest
            exponent = min(exponent, smallest / temperature - smallest + share)
        return float(np.exp(exponent))


def _num_in_place(options: Options, smallest: float) -> int:
    """Return how many of the options no unseen token can come before: a penalty can push one down among those."""
    is_out_of_place = (options.values <= smallest) & (options.values < options.log_probs)
    return int(np.argmax(is_out_of_place)) if is_out_of_place.any() else len(options.ids)


def _find(cumulative: NDArray[np.float64], unseen: float, top_p: float, number: float, *, is_complete: bool) -> int | None:
    """Return where `number` of the whole weight lies, cut to the nucleus; None where the unseen weight could change it."""
    low = float(cumulative[-1])
    high = low if is_complete else (low + unseen) * (1 + _SUM_ROUNDING)
    if top_p < 1:
        first, last = (int(np.searchsorted(cumulative, top_p * total)) for total in (low, high))
        if is_complete:
            first = last = min(last, len(cumulative) - 1)  # rounding can put the whole weight beyond its own sum
        if first != last or last >= len(cumulative):
            return None
        cumulative = cumulative[: last + 1]
        low = high = float(cumulative[-1])
        is_complete = True
    first, last = (int(np.searchsorted(cumulative, number * total, side="right")) for total in (low, high))
    if is_complete:
        return min(last, len(cumulative) - 1)
    return last if first == last < len(cumulative) else None
