"""Sums of metrics over frontend workers, added to the metrics of the scraped process.

Counters, histograms and `SUMMED_GAUGES` are summed; other gauges belong to one process. Counts of ended workers stay in the sums,
since a counter must not fall. (prometheus_client's multi-process mode needs environment variables and files, and locks each
increment.)
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

SUMMED_TYPES = ("counter", "histogram")
SUMMED_GAUGES = (
    *("dragoman_caller_requests_running", "dragoman_result_cache_bytes", "dragoman_batch_lines_left"),
    *("process_resident_memory_bytes", "process_open_fds", "process_max_fds"),
)

# By metric name: its samples' names, labels and values.
Series = dict[str, list[tuple[str, dict[str, str], float]]]
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def take_series(registry: CollectorRegistry) -> Series:
    """Return a worker's series that are summed."""
    return {
        metric.name: [(sample.name, sample.labels, sample.value) for sample in metric.samples]
        for metric in registry.collect()
        if metric.type in SUMMED_TYPES or metric.name in SUMMED_GAUGES
    }


def without_gauges(series: Series) -> Series:
    """Return a worker's series that remain after its end."""
    return {name: samples for name, samples in series.items() if name not in SUMMED_GAUGES}


def add_up(several: Iterable[Series]) -> Series:
    """Return the sums of several workers' series."""
    return {
        metric: [(name, dict(labels), value) for (name, labels), value in values.items()]
        for metric, values in _totals(several).items()
    }


class SummedRegistry(CollectorRegistry):
    """A registry's metrics plus other processes' series; not thread-safe."""

    def __init__(self, registry: CollectorRegistry, ask: Callable[[], Iterable[Series]], names: Iterable[str] = ()) -> None:
        """Collect nothing yet; this process's `registry` has every metric, `ask` returns others' series, `names` filters."""
        super().__init__()
        self._registry, self._ask, self._names = registry, ask, frozenset(names)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        totals = _totals(self._ask())
        for metric in self._registry.collect():
            left = totals.get(metric.name, {})
            samples = [s._replace(value=s.value + left.pop((s.name, tuple(s.labels.items())), 0.0)) for s in metric.samples]
            samples += [Sample(name, dict(labels), value) for (name, labels), value in left.items()]
            metric.samples = [sample for sample in samples if not self._names or sample.name in self._names]
            if metric.samples or not self._names:
                yield metric

    def restricted_registry(self, names: Iterable[str]) -> "SummedRegistry":  # type: ignore[override]
        """Return a registry restricted to some samples."""
        return SummedRegistry(self._registry, self._ask, names)


def _totals(several: Iterable[Series]) -> dict[str, Values]:
    totals: dict[str, Values] = {}
    for series in several:
        for metric, samples in series.items():
            values = totals.setdefault(metric, {})
            for name, labels, value in samples:
                key = name, tuple(labels.items())
                values[key] = values.get(key, 0.0) + value
    return totals
