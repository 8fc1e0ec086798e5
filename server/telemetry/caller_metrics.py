"""Metrics of callers: the use and the refusals of each caller that the file of callers names, up to `MAX_CALLERS`."""

from dragoman.server.telemetry.families import Families

# Callers with series of their own, about fifteen each; the others share a name that no file can contain.
MAX_CALLERS = 100
OTHERS = "(others)"
LIMITS = ("requests_per_second", "tokens_per_second", "max_requests", "max_waiting", "max_slots", "max_priority", "expires")


class CallerMeter:
    """One caller's series, looked up once.

    Attributes:
        requests: Admitted requests.
        source_tokens: Tokens read.
        generated_tokens: Tokens generated.
        num_running: Requests in flight.
    """

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
        """Count a refusal by the limit of this name."""
        if self._is_open:
            self._metrics.refusals.labels(self._label, limit).inc()

    def close(self) -> None:
        """End the series of a caller that is gone; requests still in flight are no longer counted."""
        self._is_open = False
        self._metrics.close(self._label)


class CallerMetrics:
    """Declares the series and hands them out; names come from the file of callers, so no client can add series."""

    def __init__(self, families: Families | None = None) -> None:
        """Start without callers.

        Args:
            families: Where the metrics are declared; None to count for nobody.
        """
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
        """Return a caller's series: its own, or the shared ones where there are too many callers already."""
        if name not in self._names and len(self._names) >= MAX_CALLERS:
            return CallerMeter(self, OTHERS)
        self._names.add(name)
        return CallerMeter(self, name)

    def close(self, label: str) -> None:
        """End the series of a caller; shared ones stay."""
        if label not in self._names:
            return
        self._names.discard(label)
        for metric in (self.requests, self.refusals, self.tokens, self.num_running):
            metric.remove_by_labels({"caller": label})
