"""Usage and refusal metrics of the callers in the file of callers, up to `MAX_CALLERS`."""

from dragoman.server.telemetry.families import Families

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
