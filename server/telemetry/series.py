"""What several processes count, as one: the series of front ends, added to those of the process that Prometheus asks.

Counters and histograms are sums, and so are gauges of what is under way at a front end; everything else one process alone can say.
What a front end had counted that ended stays in the sums, for a counter must not fall.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SUMMED_TYPES = ("counter", "histogram")
# What is under way, at whichever front end.
SUMMED_GAUGES = ("dragoman_caller_requests_running",)

# By the name of a metric: its samples' names, labels and values.
Series = dict[str, list[tuple[str, dict[str, str], float]]]


def take_series(registry: CollectorRegistry) -> Series:
    """Return what of a front end's registry is added to that of the others."""
    return {
        metric.name: [(sample.name, sample.labels, sample.value) for sample in metric.samples]
        for metric in registry.collect()
        if metric.type in SUMMED_TYPES or metric.name in SUMMED_GAUGES
    }


def num_requests(series: Series) -> float:
    """Return the requests that have ended, with an answer or without."""
    return sum(
        value
        for metric in ("dragoman_request_success", "dragoman_requests_failed")
        for name, _, value in series.get(metric, ())
        if name == f"{metric}_total"
    )


def without_gauges(series: Series) -> Series:
    """Return what is left of them when a front end has ended."""
    return {name: samples for name, samples in series.items() if name not in SUMMED_GAUGES}


class Totals:
    """Values by what they are of, added up.

    Attributes:
        values: By the names of metrics, then by the samples' names and labels.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}

    def add(self, series: Series) -> None:
        """Add what one has counted."""
        for metric, samples in series.items():
            values = self.values.setdefault(metric, {})
            for name, labels, value in samples:
                key = name, frozenset(labels.items())
                values[key] = values.get(key, 0.0) + value

    def take(self) -> Series:
        """Return the sums."""
        return {
            metric: [(name, dict(labels), value) for (name, labels), value in values.items()]
            for metric, values in self.values.items()
        }


class SummedRegistry(Collector):
    """A registry's metrics, with what others have counted added to them; for one scrape at a time."""

    def __init__(self, registry: CollectorRegistry, ask: Callable[[], Iterable[Series]], names: Iterable[str] = ()) -> None:
        """Collect nothing yet.

        Args:
            registry: Of this process; it has every metric, if not every series.
            ask: Returns what others have counted.
            names: Of the samples that are wanted; none for all.
        """
        self._registry, self._ask, self._names = registry, ask, frozenset(names)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        totals = Totals()
        for series in self._ask():
            totals.add(series)
        for metric in self._registry.collect():
            whole = _add(metric, totals.values.get(metric.name, {}))
            if self._names:
                whole.samples = [sample for sample in whole.samples if sample.name in self._names]
            if whole.samples or not self._names:
                yield whole

    def restricted_registry(self, names: Iterable[str]) -> "SummedRegistry":
        """Return one that has some samples alone, by their names, as Prometheus' libraries do."""
        return SummedRegistry(self._registry, self._ask, names)


def _add(metric: Metric, values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> Metric:
    """Return a metric with the sums of its samples; those that it does not have come last, in the order in which they came."""
    left = dict(values)
    samples = [
        sample._replace(value=sample.value + left.pop((sample.name, frozenset(sample.labels.items())), 0.0))
        for sample in metric.samples
    ]
    samples.extend(Sample(name, dict(labels), value) for (name, labels), value in left.items())
    whole = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    whole.samples = samples
    return whole
