"""Metric declarations, with two kinds that prometheus_client lacks: lock-free histograms, and values read at each scrape."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Read = Callable[[], Mapping[tuple[str, ...], float]]


class Families(Collector):
    """Metrics declared in a registry with the prefix `dragoman_`; `labels` are the label names by full metric name."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Start without metrics; None creates an unread registry."""
        self.registry = registry or CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}
        self._read: list[tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str, Read]] = []
        self.registry.register(self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Declare a counter."""
        return Counter(self.declare(name, *labels), text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Declare a gauge."""
        return Gauge(self.declare(name, *labels), text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> "Histogram":
        """Declare a histogram with the label `model` and ascending upper `bounds` of its buckets."""
        return Histogram(self.declare(name, "model"), text, bounds, self.registry)

    def read(self, name: str, text: str, labels: Sequence[str], read: Read) -> None:
        """Declare a metric whose values by labels are read at each scrape, on the scraping thread."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        self._read.append((kind, self.declare(name, *labels), text, read))

    def declare(self, name: str, *labels: str) -> str:
        """Record the labels of a metric and return its full name."""
        full = f"dragoman_{name}"
        self.labels[full] = labels
        return full

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics read at each scrape."""
        for kind, name, text, read in self._read:
            family = kind(name, text, labels=self.labels[name])
            for labels, value in read().items():
                family.add_metric(labels, value)
            yield family


class Observed:
    """Histogram values of one model."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is at least the value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histogram(Collector):
    """Histogram with the label `model`, observed on one thread.

    Faster than prometheus_client's, which locks each value and searches buckets linearly. As there, a scrape may find an
    observation in the buckets that is not in the sum yet.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, tuple(map(float, bounds))
        self._edges = [*map(floatToGoString, self._bounds), "+Inf"]
        self._observed: dict[str, Observed] = {}
        registry.register(self)

    def labels(self, model: str) -> Observed:
        """Return the histogram values of a model."""
        found = self._observed.get(model)
        if found is None:
            found = self._observed[model] = Observed(self._bounds)
        return found

    def remove(self, model: str) -> None:
        """Remove the series of a model, if any."""
        self._observed.pop(model, None)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model"])
        for model, observed in list(self._observed.items()):
            counts = list(zip(self._edges, map(float, accumulate(observed.counts)), strict=True))
            family.add_metric([model], counts, observed.total)
        yield family
