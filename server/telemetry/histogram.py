"""Histograms of the event loop's thread: prometheus_client's guard each value with a lock, and search the buckets one by one.

A scrape, on its thread, may see an observation in the buckets and not in the sum yet, as it may there.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

INFINITY = "+Inf"


class Observed:
    """What was observed of one model."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start with nothing; the bounds rise."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not exceed."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram(Collector):
    """One metric, with the label `model`."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        """Declare it.

        Args:
            name: Of the metric.
            text: What it says.
            bounds: Upper bounds of the buckets, rising; one for everything above comes after them.
            registry: Where it is collected.
        """
        self._name, self._text, self._bounds = name, text, tuple(map(float, bounds))
        self._edges = [*map(floatToGoString, self._bounds), INFINITY]
        self._observed: dict[str, Observed] = {}
        registry.register(self)

    def labels(self, model: str) -> Observed:
        """Return what counts for a model."""
        found = self._observed.get(model)
        if found is None:
            found = self._observed[model] = Observed(self._bounds)
        return found

    def remove(self, model: str) -> None:
        """End the series of a model, if it has any."""
        self._observed.pop(model, None)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric without its series."""
        yield HistogramMetricFamily(self._name, self._text, labels=["model"])

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model"])
        for model, observed in list(self._observed.items()):
            counts = list(zip(self._edges, map(float, accumulate(observed.counts)), strict=True))
            family.add_metric([model], counts, observed.total)
        yield family
