"""Two runs against each other: differences of their figures, and whether they are beyond noise.

Confidence intervals are by bootstrap: of each run blocks of neighbouring slices of its timeline are drawn with replacement, as many
as it has, and the figure is computed anew; blocks because neighbours share their queue (Künsch, 1989). That is the noise within a
run. What differs from run to run, a machine that is warmer or busier, only more runs of the same can show.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from dragoman.load.histogram import Histogram, middle_of
from dragoman.load.result import Result
from dragoman.load.tally import Slice
from dragoman.model.errors import InputError

NUM_DRAWS = 2000
CONFIDENCE = 0.95
FEWEST_SLICES = 10
# Higher is better for these; for times lower is.
RATES = {"throughput": "num_done", "goodput": "num_good", "tokens/s": "tokens", "errors/s": "num_failed"}
PERCENTILES = (50.0, 95.0, 99.0)

Floats = NDArray[np.float64]


class Difference(msgspec.Struct, frozen=True):
    """A figure of two runs."""

    name: str  # name of the figure
    first: float  # its value in the first run; seconds for times
    second: float  # its value in the second
    low: float  # lower end of the confidence interval of second − first
    high: float  # upper end
    is_beyond_noise: bool  # whether that interval leaves zero out
    is_better: bool  # whether the second run is the better one, if it is beyond noise

    @property
    def change(self) -> float | None:
        """Difference as a part of the first; None where that is zero."""
        return (self.second - self.first) / self.first if self.first else None

    @property
    def verdict(self) -> str:
        """`within noise`, or whether the second run is `better` or `worse`."""
        if not self.is_beyond_noise:
            return "within noise"
        return "better" if self.is_better else "worse"

    @property
    def is_time(self) -> bool:
        """Whether it is one in seconds, not a rate."""
        return self.name not in RATES


class Comparison(msgspec.Struct, frozen=True):
    """Two runs."""

    differences: list[Difference]  # in the order they are shown
    warnings: list[str]  # reasons for doubt
    unlike: list[tuple[str, str, str]]  # settings that differ: flag, in the first, in the second


def compare(first: Result, second: Result, num_draws: int = NUM_DRAWS, seed: int = 0) -> Comparison:
    """Compare two runs.

    Raises:
        InputError: If one has nothing that counts.
    """
    samples = []
    for number, result in enumerate((first, second)):
        slices = counted_slices(result)
        if not slices:
            raise InputError(f"the {('first', 'second')[number]} run is too short: no second of it counts as a whole")
        samples.append(_Sample(slices, result.timeline.width, num_draws, np.random.default_rng([seed, number])))
    one, other = samples
    differences = [_rate(name, one, other) for name, field in RATES.items() if field != "num_good" or first.slos or second.slos]
    for measure in ("e2e", "ttft"):
        if one.has(measure) and other.has(measure):
            names = [f"{measure} p{percent:g}" for percent in PERCENTILES]
            pairs = zip(one.percentiles(measure), other.percentiles(measure), strict=True)
            differences += [_difference(name, *a, *b, False) for name, (a, b) in zip(names, pairs, strict=True)]
    flags = sorted({*first.settings, *second.settings})
    unlike = [(flag, first.settings.get(flag, ""), second.settings.get(flag, "")) for flag in flags]
    unlike = [row for row in unlike if row[1] != row[2]]
    return Comparison(differences, _warnings(first, second, [one.num, other.num]), unlike)


def counted_slices(result: Result) -> list[Slice]:
    """Return the slices that lie within the time that counts."""
    width = result.timeline.width
    return [
        piece
        for number, piece in enumerate(result.timeline.slices)
        if number * width >= result.warmup_seconds - 1e-9 and (number + 1) * width <= result.seconds + 1e-9
    ]


class _Sample:
    """One run's slices and how often each of them comes in each draw; the first draw is the run itself."""

    def __init__(self, slices: list[Slice], width: int, num_draws: int, generator: np.random.Generator) -> None:
        self.num = len(slices)
        self._slices = slices
        self._width = width
        self._weights = _block_weights(self.num, num_draws, generator)

    def has(self, measure: str) -> bool:
        """Tell whether there are samples of a measure."""
        return any(getattr(piece, measure).num for piece in self._slices)

    def rates(self, field: str) -> tuple[float, Floats]:
        """Return a count a second, and the same of each draw."""
        counts = np.array([getattr(piece, field) for piece in self._slices], dtype=np.float64)
        drawn = self._weights @ counts / (self.num * self._width)
        return float(drawn[0]), drawn[1:]

    def percentiles(self, measure: str) -> list[tuple[float, Floats]]:
        """Return each of `PERCENTILES`, and the same of each draw."""
        histograms: list[Histogram] = [getattr(piece, measure) for piece in self._slices]
        indices = sorted(set().union(*(histogram.bins for histogram in histograms)))
        column = {index: place for place, index in enumerate(indices)}
        counts = np.zeros((self.num, len(indices)))
        for row, histogram in enumerate(histograms):
            for index, count in histogram.bins.items():
                counts[row, column[index]] = count
        cumulated = np.cumsum(self._weights @ counts, axis=1)
        middles = np.array([middle_of(index) for index in indices])
        found = []
        for percent in PERCENTILES:
            ranks = np.maximum(1, np.ceil(cumulated[:, -1] * percent / 100 - 1e-9))
            values = middles[np.minimum((cumulated < ranks[:, None]).sum(axis=1), len(indices) - 1)]
            found.append((float(values[0]), values[1:][cumulated[1:, -1] > 0]))
        return found


def _block_weights(num_slices: int, num_draws: int, generator: np.random.Generator) -> Floats:
    """Return how often each slice is drawn, in blocks that wrap around; the first row has each once."""
    length = max(1, round(num_slices ** (1 / 3)))
    num_blocks = math.ceil(num_slices / length)
    starts = generator.integers(0, num_slices, size=(num_draws, num_blocks))
    drawn = (starts[:, :, None] + np.arange(length)).reshape(num_draws, -1)[:, :num_slices] % num_slices
    weights = np.zeros((num_draws + 1, num_slices))
    weights[0] = 1
    np.add.at(weights, (np.arange(1, num_draws + 1)[:, None], drawn), 1)
    return weights


def _rate(name: str, one: _Sample, other: _Sample) -> Difference:
    field = RATES[name]
    return _difference(name, *one.rates(field), *other.rates(field), name != "errors/s")


def _difference(name: str, first: float, firsts: Floats, second: float, seconds: Floats, is_more_better: bool) -> Difference:
    num = min(len(firsts), len(seconds))
    tail = 50 * (1 - CONFIDENCE)
    drawn = seconds[:num] - firsts[:num]
    low, high = (float(value) for value in np.percentile(drawn, (tail, 100 - tail))) if num else (-math.inf, math.inf)
    return Difference(
        name=name,
        first=first,
        second=second,
        low=low,
        high=high,
        is_beyond_noise=low > 0 or high < 0,
        is_better=(second > first) == is_more_better,
    )


def _warnings(first: Result, second: Result, nums: list[int]) -> list[str]:
    texts = []
    for name, result, num in zip(("first", "second"), (first, second), nums, strict=True):
        if num < FEWEST_SLICES:
            texts.append(
                f"the {name} run has {num} slices that count; with fewer than {FEWEST_SLICES} the intervals are too narrow"
            )
        texts += [f"the {name} run: {warning}" for warning in result.warnings]
    tests: tuple[tuple[str, Callable[[Result], object]], ...] = (
        ("limits of a good answer", lambda result: result.slos),
        ("models", lambda result: result.models),
        ("senders", lambda result: result.versions),
    )
    texts += [f"the two runs have different {name}" for name, value in tests if value(first) != value(second)]
    return texts
