"""Two runs against each other: differences of their figures, and whether they are beyond noise.

Confidence intervals are by bootstrap: of each run blocks of neighbouring slices of its timeline are drawn with replacement, as many
as it has, and the figure is computed anew; blocks because neighbours share their queue (Künsch, 1989). That is the noise within a
run. What differs from run to run, a machine that is warmer or busier, only more runs of the same can show.
"""

import math

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
        if not counted_slices(result):
            raise InputError(f"the {('first', 'second')[number]} run is too short: no second of it counts as a whole")
        samples.append(_figures(result, num_draws, np.random.default_rng([seed, number])))
    one, other = samples
    names = [name for name in one if name in other and (name != "goodput" or first.slos or second.slos)]
    flags = sorted({*first.settings, *second.settings})
    settings = [(flag, first.settings.get(flag, ""), second.settings.get(flag, "")) for flag in flags]
    differences = [_difference(name, one[name], other[name]) for name in names]
    return Comparison(differences, _warnings(first, second), [row for row in settings if row[1] != row[2]])


def counted_slices(result: Result) -> list[Slice]:
    """Return the slices that lie within the time that counts."""
    width = result.timeline.width
    return [
        piece
        for number, piece in enumerate(result.timeline.slices)
        if number * width >= result.warmup_seconds - 1e-9 and (number + 1) * width <= result.seconds + 1e-9
    ]


def _figures(result: Result, num_draws: int, generator: np.random.Generator) -> dict[str, Floats]:
    """Return each figure of a run, then the same of each draw, not a number where that has no samples."""
    slices = counted_slices(result)
    weights = _block_weights(len(slices), num_draws, generator)
    seconds = len(slices) * result.timeline.width
    figures = {name: weights @ [getattr(piece, field) for piece in slices] / seconds for name, field in RATES.items()}
    for measure in ("e2e", "ttft"):
        histograms: list[Histogram] = [getattr(piece, measure) for piece in slices]
        indices = sorted(set().union(*(histogram.bins for histogram in histograms)))
        if not indices:
            continue
        counts = np.array([[histogram.bins.get(index, 0) for index in indices] for histogram in histograms], dtype=np.float64)
        cumulated = np.cumsum(weights @ counts, axis=1)
        middles = np.array([middle_of(index) for index in indices])
        for percent in PERCENTILES:
            ranks = np.maximum(1, np.ceil(cumulated[:, -1] * percent / 100 - 1e-9))
            values = middles[np.minimum((cumulated < ranks[:, None]).sum(axis=1), len(indices) - 1)]
            figures[f"{measure} p{percent:g}"] = np.where(cumulated[:, -1] > 0, values, np.nan)
    return figures


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


def _difference(name: str, firsts: Floats, seconds: Floats) -> Difference:
    first, second = float(firsts[0]), float(seconds[0])
    drawn = (seconds - firsts)[1:]
    drawn = drawn[~np.isnan(drawn)]
    tail = 50 * (1 - CONFIDENCE)
    low, high = (float(value) for value in np.percentile(drawn, (tail, 100 - tail))) if len(drawn) else (-math.inf, math.inf)
    is_more_better = name in RATES and name != "errors/s"
    return Difference(
        name=name,
        first=first,
        second=second,
        low=low,
        high=high,
        is_beyond_noise=low > 0 or high < 0,
        is_better=(second > first) == is_more_better,
    )


def _warnings(first: Result, second: Result) -> list[str]:
    texts = []
    for name, result in (("first", first), ("second", second)):
        if (num := len(counted_slices(result))) < FEWEST_SLICES:
            texts.append(
                f"the {name} run has {num} slices that count; with fewer than {FEWEST_SLICES} the intervals are too narrow"
            )
        texts += [f"the {name} run: {warning}" for warning in result.warnings]
    for name, field in (("limits of a good answer", "slos"), ("models", "models"), ("senders", "versions")):
        if getattr(first, field) != getattr(second, field):
            texts.append(f"the two runs have different {name}")
    return texts
