"""Drawing tokens at random, exactly as from the whole vocabulary though only its likeliest part is seen.

The part not seen has a known smallest and largest possible weight. A draw is decided when it comes out the same at both; otherwise
the caller asks again with more of the vocabulary, in the end all of it, and the same random number is used.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.messages import Sampling
from dragoman.server.engine.search.constraints import Options

NUM_CANDIDATES = 64
"""Candidates asked for where `top_k` does not say how many can be drawn."""

FAR = 16
"""How many times as many candidates must be thought to decide a draw for it not to be far."""

_ROUNDING, _ROUNDING_PER_TOKEN = 5e-6, 2e-10
"""More than the sum of a row's float32 probabilities is off 1: 1e-6 of 5,000 and 1e-5 of 250,000 are usual."""

_SUM_ROUNDING = 1e-9
"""More than the relative rounding of a sum of float64 weights."""


class Sampler:
    """Draws the tokens of one answer, one random number a token.

    Numbers come from Philox (Salmon et al., 2011) keyed by the seed and the answer's index, so they depend on nothing else.

    Attributes:
        is_far: Of a draw that was not decided: whether seeing a little more would hardly decide it.
    """

    def __init__(self, sampling: Sampling, index: int) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, index], np.uint64)))
        self._number: float | None = None
        self.is_far = False

    def weighs_unseen(self, options: Options, num_unseen: int) -> bool:
        """Tell whether `draw` goes by the unseen tokens' probability."""
        if not num_unseen or self._is_model_itself(options):
            return False
        are_all_in_place = options.values is options.log_probs
        return not (are_all_in_place and 0 < self._sampling.top_k <= len(options.ids))

    def draw(self, options: Options, smallest: float, unseen_probability: float, num_unseen: int) -> int | None:
        """Draw one of the options.

        Args:
            options: The likeliest, after the rules; at least one.
            smallest: Log-probability that no unseen token exceeds.
            unseen_probability: Of all unseen tokens together, by the model; looked at only if `weighs_unseen`.
            num_unseen: How many there are; 0 where the options are all there is.

        Returns:
            Its place among the options; None if that depends on unseen tokens. The next call draws with the same random number,
            until `accept`.
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
            low = high = math.exp(-highest)  # all together weigh 1
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
        """Go on to the next random number."""
        self._number = None

    def _is_model_itself(self, options: Options) -> bool:
        """Tell whether draws are from the model's own distribution."""
        return options.is_untouched and not self._sampling.top_k and self._sampling.temperature == 1

    def _weight_beyond(
        self, options: Options, out_of_place: NDArray[np.float64], smallest: float, unseen_probability: float, num_unseen: int
    ) -> tuple[float, float]:
        """Return bounds of what weighs beyond the options in place: the weights of those out of place, and the unseen tokens'."""
        temperature, highest = self._sampling.temperature, float(options.values[0])
        least = most = float(out_of_place.sum())
        bounds = self._unseen_weight(smallest - highest, unseen_probability, num_unseen, highest)
        if options.is_untouched and not self._sampling.top_k:  # only then do all unseen tokens weigh what the model says
            least += bounds[0]
        most += bounds[1]
        if options.num_lifted:
            most += options.num_lifted * math.exp((options.ceiling(smallest) - highest) / temperature)
        return least, most

    def _unseen_weight(self, smallest: float, probability: float, count: int, highest: float) -> tuple[float, float]:
        """Return bounds of the unseen tokens' weight, in units of the likeliest option's.

        A token of probability p weighs p^(1/temperature), at most what the least one seen weighs (`smallest` is its log-probability
        relative to the likeliest's). What a given probability weighs depends on how it is spread: up to a temperature of 1, where
        the weight is convex in p, it weighs least when all tokens have the same and most when as few as can be have it all; above
        1 it is the other way round.
        """
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
    """Return how many of the options no unseen token can come before: a penalty pushes some down among those, or lifts some."""
    if options.values is options.log_probs:
        return len(options.ids)
    if options.num_lifted:
        is_out_of_place = options.values <= options.ceiling(smallest)
    else:
        is_out_of_place = (options.values <= smallest) & (options.values < options.log_probs)
    return int(np.argmax(is_out_of_place)) if is_out_of_place.any() else len(options.ids)


def _find(cumulative: NDArray[np.float64], totals: tuple[float, float], top_p: float, number: float, num_unseen: int) -> int | None:
    """Return where `number` of the total weight lies, cut to the nucleus; None where that is not seen or not certain.

    Args:
        cumulative: Weights of the options, summed up.
        totals: Bounds of the weight of all that can be drawn.
        top_p: See `Sampling`.
        number: In [0, 1).
        num_unseen: 0 if the options are all that can be drawn; rounding must not put anything beyond them then.
    """
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
        return last if last <= last_place else 0  # what rounding leaves beyond the last option is the likeliest one's
    is_certain = last <= last_place and (low == high or int(cumulative.searchsorted(number * low, side="right")) == last)
    return last if is_certain else None


def _nucleus(
    cumulative: NDArray[np.float64], totals: tuple[float, float], top_p: float, first: int, num_unseen: int
) -> tuple[float, float]:
    """Return bounds of the weight of a nucleus whose end is not known.

    It weighs at least `top_p` of the total, unless rounding leaves it short of that, and beyond that at most what its last token
    weighs, which is none before the `first` that may be it, and no option weighs less than a token after it.
    """
    low, high = totals
    place = min(first, len(cumulative) - 1)
    largest = float(cumulative[place] - (cumulative[place - 1] if place else 0.0))
    rounding = _ROUNDING + _ROUNDING_PER_TOKEN * num_unseen
    low = min(top_p, 1 - rounding) * low
    return low * (1 - _SUM_ROUNDING), (top_p * high + largest) * (1 + _SUM_ROUNDING)
