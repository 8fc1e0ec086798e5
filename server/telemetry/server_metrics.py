"""Metrics of model versions, reloaded files, certificates, and the callers in the file of callers."""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dragoman.server.telemetry.families import Families

OUTCOMES = ("done", "refused", "rolled_back")
SLEEP_CAUSES = ("idle", "memory")
WAKE_OUTCOMES = ("loaded", "failed", "refused")
SECONDS_PER_DAY = 86_400.0


class VersionReading(NamedTuple):
    """State of one model version (folder name or manifest version); `cause` of a refusal in one word, failures by server faults."""

    model: str
    version: str
    state: str
    cause: str = ""
    num_answered: int = 0
    num_failed: int = 0


class VersionMetrics:
    """States, requests and changes of versions."""

    def __init__(self, families: Families) -> None:
        self._readings: Callable[[], Iterable[VersionReading]] = tuple
        self._swaps = families.counter(
            "version_swaps_total", "Changes of a model's version, by outcome: done, refused, rolled_back.", "model", "outcome"
        )
        self._sleeps = families.counter(
            "model_sleeps_total", "Unloadings of a model: because it was idle, or to free memory for another.", "model", "cause"
        )
        self._wakes = families.counter(
            "model_wakes_total", "Loadings of an unloaded model on demand, by outcome: loaded, failed, refused.", "model", "outcome"
        )
        families.read(
            "version_state",
            "1 for each known version of a model, labelled with its state and, if refused, the cause.",
            ("model", "version", "state", "cause"),
            lambda: {(each.model, each.version, each.state, each.cause): 1 for each in self._readings()},
        )
        families.read(
            "version_requests_total",
            "Requests that a version has answered, or that failed there through a fault of the server.",
            ("model", "version", "outcome"),
            self._requests,
        )

    def watch(self, read: Callable[[], Iterable[VersionReading]]) -> None:
        """Set the source of versions; called on the scraping thread."""
        self._readings = read

    def add_model(self, model: str) -> None:
        """Initialise the counts of a model to zero."""
        for outcome in OUTCOMES:
            self._swaps.labels(model, outcome)
        for cause in SLEEP_CAUSES:
            self._sleeps.labels(model, cause)
        for outcome in WAKE_OUTCOMES:
            self._wakes.labels(model, outcome)

    def remove_model(self, model: str) -> None:
        """Remove the series of a model."""
        for metric in (self._swaps, self._sleeps, self._wakes):
            metric.remove_by_labels({"model": model})

    def swapped(self, model: str, outcome: str) -> None:
        """Count a version change."""
        self._swaps.labels(model, outcome).inc()

    def slept(self, model: str, cause: str) -> None:
        """Count an unloading."""
        self._sleeps.labels(model, cause).inc()

    def woken(self, model: str, outcome: str) -> None:
        """Count a loading on demand."""
        self._wakes.labels(model, outcome).inc()

    def _requests(self) -> dict[tuple[str, ...], float]:
        counted: dict[tuple[str, ...], float] = {}
        for reading in self._readings():  # several share a name if a folder was replaced
            for outcome, number in (("answered", reading.num_answered), ("failed", reading.num_failed)):
                key = reading.model, reading.version, outcome
                counted[key] = counted.get(key, 0) + number
        return counted


class ReloadMetrics:
    """Metrics of reloaded files and certificates; label values are fixed by the server."""

    def __init__(self, families: Families, clock: Callable[[], float] = time.time) -> None:
        """Declare the metrics; `clock` returns seconds since 1970."""
        self._clock = clock
        self._stale = families.gauge(
            "reload_stale", "1 while a file that has changed cannot be used and its former content stays in use, else 0.", "source"
        )
        self._days = families.gauge(
            "tls_certificate_days_left", "Days until a certificate of the server expires; negative afterwards.", "certificate"
        )

    def set_stale(self, source: str, is_stale: bool) -> None:
        """Set whether the content in use differs from the file."""
        self._stale.labels(source).set(is_stale)

    def set_expiry(self, certificate: str, expiry: float | None) -> None:
        """Set the expiry of a certificate, in seconds since 1970; None if unknown."""
        until = math.nan if expiry is None else expiry
        self._days.labels(certificate).set_function(lambda: (until - self._clock()) / SECONDS_PER_DAY)


# Callers with their own series, about fifteen each; the others share a name that no file can contain.
MAX_CALLERS = 100
OTHERS = "(others)"
LIMITS = ("requests_per_second", "tokens_per_second", "max_requests", "max_waiting", "max_slots", "max_priority", "expires")


class CallerMeter:
    """One caller's series, looked up once."""

    def __init__(self, metrics: "CallerMetrics", label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._is_open = True
        self.requests = metrics.requests.labels(label)
        self.source_tokens = metrics.tokens.labels(label, "source")
        self.generated_tokens = metrics.tokens.labels(label, "generated")
        self.num_running = metrics.num_running.labels(label)
        for limit in LIMITS:  # `increase` misses the first count of a series that begins with it
            metrics.refusals.labels(label, limit)

    def refused(self, limit: str) -> None:
        """Count a refusal by a limit."""
        if self._is_open:
            self._metrics.refusals.labels(self._label, limit).inc()

    def close(self) -> None:
        """Remove the series of a removed caller; its running requests are no longer counted."""
        self._is_open = False
        self._metrics.close(self._label)


class CallerMetrics:
    """Metrics of all callers; names come from the file of callers, so clients cannot add series."""

    def __init__(self, families: Families | None = None) -> None:
        """Declare the metrics; without `families` in an unread registry."""
        families = families or Families()
        self.requests = families.counter(
            "caller_requests_total", "Admitted requests of a caller, streaming calls included.", "caller"
        )
        self.refusals = families.counter(
            "caller_refusals_total", "Requests of a caller that one of its own limits refused.", "caller", "limit"
        )
        self.tokens = families.counter(
            "caller_tokens_total", "Tokens of a caller, read (`source`) and generated.", "caller", "kind"
        )
        self.num_running = families.gauge(
            "caller_requests_running", "Requests of a caller in flight, waiting ones included.", "caller"
        )
        self._names: set[str] = set()

    def open(self, name: str) -> CallerMeter:
        """Return a caller's own series, or the shared ones if there are too many callers."""
        if name not in self._names and len(self._names) >= MAX_CALLERS:
            return CallerMeter(self, OTHERS)
        self._names.add(name)
        return CallerMeter(self, name)

    def close(self, label: str) -> None:
        """Remove the series of a caller; shared series stay."""
        if label not in self._names:
            return
        self._names.discard(label)
        for metric in (self.requests, self.refusals, self.tokens, self.num_running):
            metric.remove_by_labels({"caller": label})
