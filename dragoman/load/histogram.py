"""Counts that add up, and a histogram of times with bins of equal ratio, within 0.25 % of every sample.

`hdrhistogram` was tried: its bins have equal widths between powers of two, so percentiles differ, and each histogram takes 188 kB.
"""

import math
from bisect import bisect_left
from itertools import accumulate
from typing import Self

import msgspec

# A bin's upper edge over its lower one; its middle is within 0.25 % of all that is in it.
GROWTH = 1.005
_SCALE = 1 / math.log(GROWTH)
# Shorter times are counted as this: no clock of ours tells them apart.
SHORTEST_SECONDS = 1e-6

PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)


class Counts(msgspec.Struct):
    """Numbers, numbers by key, and further counts, which `merge` adds up field by field."""

    def merge(self, other: Self) -> None:
        """Add another's counts."""
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counts):
                mine.merge(others)
            elif not isinstance(mine, dict):
                setattr(self, name, mine + others)
            else:
                for key, value in others.items():
                    if isinstance(value, Counts):
                        mine.setdefault(key, type(value)()).merge(value)
                    else:
                        mine[key] = mine.get(key, 0) + value


class Histogram(Counts):
    """Samples, as the number in each bin.

    Bin i holds times around `GROWTH ** i` seconds; i may be negative. Exact beside them: number, sum, smallest and largest.
    """

    bins: dict[int, int] = {}  # number of samples by bin; no bin is empty
    num: int = 0  # number of samples
    total: float = 0.0  # their sum, seconds
    smallest: float | None = None  # None where there are none
    largest: float = 0.0  # 0 where there are none

    def add(self, seconds: float) -> None:
        """Count a sample; a negative one, as clocks of two processes may give, is counted as 0."""
        seconds = max(seconds, 0.0)
        index = bin_of(seconds)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.num += 1
        self.total += seconds
        self._widen(seconds, seconds)

    def merge(self, other: Self) -> None:
        """Count another's samples too."""
        for index, count in other.bins.items():
            self.bins[index] = self.bins.get(index, 0) + count
        self.num += other.num
        self.total += other.total
        if other.smallest is not None:
            self._widen(other.smallest, other.largest)

    @property
    def mean(self) -> float | None:
        """Mean of the samples; None where there are none."""
        return self.total / self.num if self.num else None

    def percentile(self, percent: float) -> float | None:
        """Return the time that so many percent of the samples do not exceed; None where there are none."""
        if not self.num or self.smallest is None:
            return None
        rank = max(1, math.ceil(self.num * percent / 100 - 1e-9))
        if rank == self.num:
            return self.largest
        indices = sorted(self.bins)
        place = bisect_left(list(accumulate(self.bins[index] for index in indices)), rank)
        return min(max(middle_of(indices[place]), self.smallest), self.largest)

    def share_within(self, seconds: float) -> float | None:
        """Return what part of the samples is not above a limit, to the width of a bin; None where there are none."""
        limit = bin_of(seconds)
        return sum(count for index, count in self.bins.items() if index <= limit) / self.num if self.num else None

    def _widen(self, smallest: float, largest: float) -> None:
        self.smallest = smallest if self.smallest is None else min(self.smallest, smallest)
        self.largest = max(self.largest, largest)


def bin_of(seconds: float) -> int:
    """Return the bin of a time."""
    return round(math.log(max(seconds, SHORTEST_SECONDS)) * _SCALE)


def middle_of(index: int) -> float:
    """Return the time in the middle of a bin, seconds."""
    return math.exp(index / _SCALE)
