"""What callers use and are refused, counted for each: of those that the file of callers names, and of no more than some."""

from prometheus_client import CollectorRegistry, Counter, Gauge

# Callers with series of their own, each of which is about fifteen; the others share a name that no file can give.
MAX_CALLERS = 100
OTHERS = "(others)"
LIMITS = ("requests_per_second", "tokens_per_second", "max_requests", "max_waiting", "max_slots", "max_priority", "expires")


class CallerMeter:
    """One caller's series, looked up once.

    Attributes:
        requests: Requests that were let in.
        source_tokens: Tokens read.
        generated_tokens: Tokens generated.
        num_running: Requests under way.
    """

    def __init__(self, metrics: "CallerMetrics", label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._is_open = True
        self.requests = metrics.requests.labels(label)
        self.source_tokens = metrics.tokens.labels(label, "source")
        self.generated_tokens = metrics.tokens.labels(label, "generated")
        self.num_running = metrics.num_running.labels(label)
        for limit in LIMITS:  # a series that begins with its first refusal hides that one from Prometheus
            metrics.refusals.labels(label, limit)

    def refused(self, limit: str) -> None:
        """Count a refusal.

        Args:
            limit: Name of the limit.
        """
        if self._is_open:
            self._metrics.refusals.labels(self._label, limit).inc()

    def close(self) -> None:
        """End the series: the caller is gone, and its label is free for another. What it has under way is not counted any more."""
        self._is_open = False
        self._metrics.close(self._label)


class CallerMetrics:
    """Declares the series and gives callers theirs; their names come from a file, so that nobody who calls can add any.

    Attributes:
        labels: Names of each metric's labels, by its full name.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start without callers.

        Args:
            registry: Where they are collected.
        """
        self.labels: dict[str, tuple[str, ...]] = {}

        def declare(name: str, *labels: str) -> tuple[str, tuple[str, ...]]:
            full = f"dragoman_caller_{name}"
            self.labels[full] = ("caller", *labels)
            return full, self.labels[full]

        def counter(name: str, text: str, *labels: str) -> Counter:
            full, all_labels = declare(name, *labels)
            return Counter(full, text, all_labels, registry=registry)

        self.requests = counter("requests_total", "Requests of a caller that its limits let in, streams of requests among them.")
        self.refusals = counter("refusals_total", "Requests of a caller that a limit of its own kept out.", "limit")
        self.tokens = counter(
            "tokens_total", "Tokens of a caller: those read (sources, targets of pairs) and those generated.", "kind"
        )
        name, labels = declare("requests_running")
        self.num_running = Gauge(name, "Requests of a caller under way, waiting ones among them.", labels, registry=registry)
        self._names: set[str] = set()

    def open(self, name: str) -> CallerMeter:
        """Return what counts for a caller, by its name if there are not too many already."""
        if name not in self._names and len(self._names) >= MAX_CALLERS:
            return CallerMeter(self, OTHERS)
        self._names.add(name)
        return CallerMeter(self, name)

    def close(self, label: str) -> None:
        """End the series of a caller; those that several share stay."""
        if label not in self._names:
            return
        self._names.discard(label)
        for metric in (self.requests, self.refusals, self.tokens, self.num_running):
            metric.remove_by_labels({"caller": label})
