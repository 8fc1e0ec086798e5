"""A histogram of times with bins of equal ratio: small, mergeable, and within 0.25 % of every sample whatever their number.

`hdrhistogram` was tried: its bins have equal widths between powers of two, so percentiles differ, and each histogram takes 188 kB.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

# A bin's upper edge over its lower one; its middle is within 0.25 % of all that is in it.
GROWTH = 1.005
_SCALE = 1 / math.log(GROWTH)
# Shorter times than this are counted as this: no clock of ours tells them apart.
SHORTEST_SECONDS = 1e-6

PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)


class Histogram(msgspec.Struct):
    """Samples, as the number in each bin.

    Bin i holds times around `GROWTH ** i` seconds; i may be negative. Exact beside them: number, sum, smallest and largest.
    """

    bins: dict[int, int] = {}  # number of samples by bin; no bin is empty
    num: int = 0  # number of samples
    total: float = 0.0  # their sum, seconds
    smallest: float | None = None  # least of them; infinite where there are none
    largest: float = 0.0  # greatest of them; 0 where there are none

    def add(self, seconds: float) -> None:
        """Count a sample; a negative one, as clocks of two processes may give, is counted as 0."""
        seconds = max(seconds, 0.0)
        index = bin_of(seconds)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.num += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)
        if self.smallest is None or seconds < self.smallest:
            self.smallest = seconds

    def merge(self, other: "Histogram") -> None:
        """Count another's samples too."""
        for index, count in other.bins.items():
            self.bins[index] = self.bins.get(index, 0) + count
        self.num += other.num
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        if other.smallest is not None:
            self.smallest = other.smallest if self.smallest is None else min(self.smallest, other.smallest)

    @property
    def mean(self) -> float | None:
        """Mean of the samples; None where there are none."""
        return self.total / self.num if self.num else None

    def percentile(self, percent: float) -> float | None:
        """Return the time that so many percent of the samples do not exceed; None where there are none."""
        return self.percentiles((percent,))[0]

    def percentiles(self, percents: Sequence[float]) -> list[float | None]:
        """Return `percentile` of each; they must rise."""
        if not self.num:
            return [None] * len(percents)
        found: list[float | None] = []
        seen, rest = 0, iter(sorted(self.bins.items()))
        value = 0.0
        for percent in percents:
            rank = max(1, math.ceil(self.num * percent / 100 - 1e-9))
            while seen < rank:
                index, count = next(rest)
                seen, value = seen + count, self._within(middle_of(index))
            found.append(self.largest if rank == self.num else value)
        return found

    def share_within(self, seconds: float) -> float | None:
        """Return what part of the samples is not above a limit, to the width of a bin; None where there are none."""
        if not self.num:
            return None
        limit = bin_of(seconds)
        return sum(count for index, count in self.bins.items() if index <= limit) / self.num

    def _within(self, value: float) -> float:
        smallest = 0.0 if self.smallest is None else self.smallest
        return min(max(value, smallest), self.largest)


def bin_of(seconds: float) -> int:
    """Return the bin of a time."""
    return round(math.log(max(seconds, SHORTEST_SECONDS)) * _SCALE)


def middle_of(index: int) -> float:
    """Return the time in the middle of a bin, seconds."""
    return math.exp(index / _SCALE)


def of(samples: Iterable[float]) -> Histogram:
    """Return the histogram of samples."""
    histogram = Histogram()
    for seconds in samples:
        histogram.add(seconds)
    return histogram
