"""What became of files that changed while the server ran, and how long its certificate lasts."""

import math
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

SECONDS_PER_DAY = 86_400.0


class ReloadMetrics:
    """The series; the label `source` has the few names that the server itself gives.

    Attributes:
        labels: Names of each metric's labels, by its full name.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        """Start without sources.

        Args:
            registry: Where they are collected.
            clock: Seconds since 1970.
        """
        self._clock = clock
        self._reloads = Counter(
            "dragoman_reloads_total",
            "Times a file that had changed was read again, by whether it could be used.",
            ["source", "result"],
            registry=registry,
        )
        self._stale = Gauge(
            "dragoman_reload_stale",
            "1 while a file cannot be used as it is now and what was read before stays in use, else 0.",
            ["source"],
            registry=registry,
        )
        self._days = Gauge(
            "dragoman_tls_certificate_days_left",
            "Days until a certificate of the server's expires, that of gRPC or of the metrics port; negative after that.",
            ["certificate"],
            registry=registry,
        )
        self.labels: dict[str, tuple[str, ...]] = {
            "dragoman_reloads_total": ("source", "result"),
            "dragoman_reload_stale": ("source",),
            "dragoman_tls_certificate_days_left": ("certificate",),
        }

    def add(self, source: str) -> None:
        """Start the series of a source at zero."""
        for result in ("used", "failed"):
            self._reloads.labels(source, result)
        self._stale.labels(source).set(0)

    def reloaded(self, source: str) -> None:
        """Count a change that is in use now."""
        self._reloads.labels(source, "used").inc()
        self.set_stale(source, False)

    def failed(self, source: str) -> None:
        """Count a change that cannot be used."""
        self._reloads.labels(source, "failed").inc()
        self.set_stale(source, True)

    def set_stale(self, source: str, is_stale: bool) -> None:
        """Say whether something else is in use than what is there."""
        self._stale.labels(source).set(is_stale)

    def set_expiry(self, certificate: str, expiry: float | None) -> None:
        """Say when a certificate expires.

        Args:
            certificate: What to call it.
            expiry: Seconds since 1970; None if that is not known.
        """
        until = math.nan if expiry is None else expiry
        self._days.labels(certificate).set_function(lambda: (until - self._clock()) / SECONDS_PER_DAY)
