"""The versions of models: which there are, in which part of their lives, what became of their requests, and how changes ended."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OUTCOMES = ("done", "refused", "rolled_back")
SLEEP_CAUSES = ("idle", "memory")
WAKE_OUTCOMES = ("loaded", "failed", "refused")


class VersionReading(NamedTuple):
    """One version, as it is now.

    Attributes:
        model: Name of its model.
        version: What its folder calls it, or what its content gives.
        state: Part of its life.
        cause: Why it is refused, in a word; empty if it is not.
        num_answered: Requests that it has answered.
        num_failed: Requests that failed there.
    """

    model: str
    version: str
    state: str
    cause: str = ""
    num_answered: int = 0
    num_failed: int = 0


class VersionMetrics(Collector):
    """The series.

    Attributes:
        labels: Names of each metric's labels, by its full name.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start without versions.

        Args:
            registry: Where they are collected.
        """
        self._read: Callable[[], Iterable[VersionReading]] = tuple
        self._swaps = Counter(
            "dragoman_version_swaps_total",
            "Changes of a model's versions, by how they ended: done, refused, rolled_back.",
            ["model", "outcome"],
            registry=registry,
        )
        self._sleeps = Counter(
            "dragoman_model_sleeps_total",
            "Times a model was unloaded: because it was idle, or because another needed its memory.",
            ["model", "cause"],
            registry=registry,
        )
        self._wakes = Counter(
            "dragoman_model_wakes_total",
            "Times a model that slept was loaded because a request came, or could not be: for now, or not at all.",
            ["model", "outcome"],
            registry=registry,
        )
        self.labels: dict[str, tuple[str, ...]] = {
            "dragoman_version_swaps_total": ("model", "outcome"),
            "dragoman_model_sleeps_total": ("model", "cause"),
            "dragoman_model_wakes_total": ("model", "outcome"),
            "dragoman_version_state": ("model", "version", "state", "cause"),
            "dragoman_version_requests_total": ("model", "version", "outcome"),
        }
        registry.register(self)

    def watch(self, read: Callable[[], Iterable[VersionReading]]) -> None:
        """Have these versions be shown from now on.

        Args:
            read: Returns them; called by the thread that answers a scrape.
        """
        self._read = read

    def add_model(self, model: str) -> None:
        """Start counting a model's changes at zero."""
        for outcome in OUTCOMES:
            self._swaps.labels(model, outcome)
        for cause in SLEEP_CAUSES:
            self._sleeps.labels(model, cause)
        for outcome in WAKE_OUTCOMES:
            self._wakes.labels(model, outcome)

    def remove_model(self, model: str) -> None:
        """End a model's series."""
        for metric in (self._swaps, self._sleeps, self._wakes):
            metric.remove_by_labels({"model": model})

    def swapped(self, model: str, outcome: str) -> None:
        """Count a change."""
        self._swaps.labels(model, outcome).inc()

    def slept(self, model: str, cause: str) -> None:
        """Count that a model has fallen asleep."""
        self._sleeps.labels(model, cause).inc()

    def woken(self, model: str, outcome: str) -> None:
        """Count how waking a model has ended."""
        self._wakes.labels(model, outcome).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield what there is now."""
        state = GaugeMetricFamily(
            "dragoman_version_state",
            "1 for each version of a model that is known, with the part of its life that it is in and why it is refused.",
            labels=["model", "version", "state", "cause"],
        )
        requests = CounterMetricFamily(
            "dragoman_version_requests_total",
            "Requests that a version has answered, or that failed there through the server's fault.",
            labels=["model", "version", "outcome"],
        )
        counted: dict[tuple[str, str], tuple[int, int]] = {}
        shown: set[tuple[str, ...]] = set()
        for reading in self._read():
            labels = (reading.model, reading.version, reading.state, reading.cause)
            if labels not in shown:  # a folder may have been replaced by another of the same name
                shown.add(labels)
                state.add_metric(labels, 1)
            answered, failed = counted.get(labels[:2], (0, 0))
            counted[labels[:2]] = answered + reading.num_answered, failed + reading.num_failed
        for (model, version), (answered, failed) in counted.items():
            requests.add_metric((model, version, "answered"), answered)
            requests.add_metric((model, version, "failed"), failed)
        yield from (state, requests)
