"""Sampling that is exact over the whole vocabulary, though only its likeliest part is known.

The unseen part has a smallest and a largest possible weight. A draw is decided if its outcome is the same at both; otherwise the
caller repeats it with the same random number and more candidates, in the end the whole vocabulary.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.messages import Sampling
from dragoman.server.engine.search.constraints import Options

# Candidates requested without `top_k`.
NUM_CANDIDATES = 64
# An undecided draw is far if it would need more than this many times the candidates.
FAR = 16
# Upper bound of the error of a sum of float32 probabilities: 1e-6 of 5,000 and 1e-5 of 250,000 are usual.
_ROUNDING, _ROUNDING_PER_TOKEN = 5e-6, 2e-10
# Upper bound of the relative error of a sum of float64 weights.
_SUM_ROUNDING = 1e-9


class Sampler:
    """Draws the tokens of one answer, one random number for each token.

    Random numbers come from Philox (Salmon et al., 2011), keyed by the seed and the answer's index alone. `is_far` is whether an
    undecided draw would need many more candidates.
    """

    def __init__(self, sampling: Sampling, index: int) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, index], np.uint64)))
        self._number: float | None = None
        self.is_far = False

    def weighs_unseen(self, options: Options, num_unseen: int) -> bool:
        """Return whether `draw` needs the probability of unseen tokens."""
        if not num_unseen or self._is_model_itself(options):
            return False
        are_all_in_place = options.values is options.log_probs
        return not (are_all_in_place and 0 < self._sampling.top_k <= len(options.ids))

    def draw(self, options: Options, smallest: float, unseen_probability: float, num_unseen: int) -> int | None:
        """Draw from the likeliest options after the rules; return an index, or None if the outcome depends on unseen tokens.

        The random number stays the same until `accept`.

        Args:
            options: At least one.
            smallest: Largest possible log-probability of an unseen token.
            unseen_probability: Total probability of unseen tokens by the model; used only if `weighs_unseen`.
            num_unseen: Number of unseen tokens.
        """
        sampling = self._sampling
        self.is_far = False
        top_k = sampling.top_k or len(options.ids) + num_unseen
        count = len(options.ids)
        if num_unseen:
            count = _num_in_place(options, smallest)
            if not count:
                return None
        if top_k <= count:
            count, num_unseen = top_k, 0
        highest = float(options.values[0])
        weights = options.values[:top_k] - highest
        weights = np.exp(weights / sampling.temperature if sampling.temperature != 1 else weights)
        if self._number is None:
            self._number = self._random.random()
        cumulative = weights[:count].cumsum()
        if self._is_model_itself(options):
            low = high = math.exp(-highest)  # the sum of all weights is 1
        else:
            low = high = float(cumulative[-1])
            if num_unseen:
                least, most = self._weight_beyond(options, weights[count:], smallest, unseen_probability, num_unseen)
                low, high = (low + least) * (1 - _SUM_ROUNDING), (high + most) * (1 + _SUM_ROUNDING)
        place = _find(cumulative, (low, high), sampling.top_p, self._number, num_unseen)
        if place is None:
            within_reach = float(cumulative[-1]) + FAR * count * float(weights[count - 1])
            self.is_far = self._number * sampling.top_p * high > within_reach
        return place

    def accept(self) -> None:
        self._number = None

    def _is_model_itself(self, options: Options) -> bool:
        return options.is_untouched and not self._sampling.top_k and self._sampling.temperature == 1

    def _weight_beyond(
        self, options: Options, out_of_place: NDArray[np.float64], smallest: float, unseen_probability: float, num_unseen: int
    ) -> tuple[float, float]:
        """Return bounds of the weight beyond the options in place: of those out of place, and of unseen tokens."""
        temperature, highest = self._sampling.temperature, float(options.values[0])
        least = most = float(out_of_place.sum())
        bounds = self._unseen_weight(smallest - highest, unseen_probability, num_unseen, highest)
        if options.is_untouched and not self._sampling.top_k:  # else unseen tokens may lack the model's weight
            least += bounds[0]
        most += bounds[1]
        if options.num_lifted:
            most += options.num_lifted * math.exp((options.ceiling(smallest) - highest) / temperature)
        return least, most

    def _unseen_weight(self, smallest: float, probability: float, count: int, highest: float) -> tuple[float, float]:
        """Return bounds of the weight of unseen tokens, relative to that of the likeliest option, as `smallest` is."""
        # A token of probability p weighs p^(1/temperature), at most as much as the least likely one seen. Up to temperature 1
        # (convex) a total weighs least if all tokens are equal and most if few have it all; above 1 the opposite holds.
        if smallest == -np.inf:
            return 0.0, 0.0
        temperature, log_count = self._sampling.temperature, float(np.log(count))
        bounds: list[float] = []
        rounding = _ROUNDING + _ROUNDING_PER_TOKEN * count
        for total in (probability - rounding, probability + rounding):
            if total <= 0:
                bounds.append(0.0)
                continue
            log_total = float(np.log(total)) - highest
            spread = log_count + (log_total - log_count) / temperature
            packed = log_total - smallest + smallest / temperature
            is_lower = not bounds
            exponent = min(spread, packed) if is_lower else min(max(spread, packed), log_count + smallest / temperature)
            bounds.append(float(np.exp(exponent)))
        return bounds[0], bounds[1]


def _num_in_place(options: Options, smallest: float) -> int:
    """Return how many options rank before every unseen token: a penalty may lower options, or lift unseen tokens."""
    if options.values is options.log_probs:
        return len(options.ids)
    if options.num_lifted:
        is_out_of_place = options.values <= options.ceiling(smallest)
    else:
        is_out_of_place = (options.values <= smallest) & (options.values < options.log_probs)
    return int(np.argmax(is_out_of_place)) if is_out_of_place.any() else len(options.ids)


def _find(cumulative: NDArray[np.float64], totals: tuple[float, float], top_p: float, number: float, num_unseen: int) -> int | None:
    """Return the index at `number`, in [0, 1), of the total weight cut to the nucleus; None if unseen or uncertain."""
    last_place = len(cumulative) - 1
    low, high = totals
    is_complete = not num_unseen
    if top_p < 1:
        first, last = (int(cumulative.searchsorted(top_p * total)) for total in (low, high))
        if is_complete:
            first, last = min(first, last_place), min(last, last_place)
        if first == last <= last_place:
            low = high = float(cumulative[last])
            last_place, is_complete = last, True
        else:
            low, high = _nucleus(cumulative, (low, high), top_p, first, num_unseen)
    last = int(cumulative.searchsorted(number * high, side="right"))
    if is_complete:
        return last if last <= last_place else 0  # a rounding error past the last option: take the likeliest
    is_certain = last <= last_place and (low == high or int(cumulative.searchsorted(number * low, side="right")) == last)
    return last if is_certain else None


def _nucleus(
    cumulative: NDArray[np.float64], totals: tuple[float, float], top_p: float, first: int, num_unseen: int
) -> tuple[float, float]:
    """Return bounds of the weight of a nucleus that ends at or after option `first`."""
    # It is at least `top_p` of the total, up to rounding, and exceeds that by its last token at most.
    low, high = totals
    place = min(first, len(cumulative) - 1)
    largest = float(cumulative[place] - (cumulative[place - 1] if place else 0.0))
    rounding = _ROUNDING + _ROUNDING_PER_TOKEN * num_unseen
    low = min(top_p, 1 - rounding) * low
    return low * (1 - _SUM_ROUNDING), (top_p * high + largest) * (1 + _SUM_ROUNDING)
