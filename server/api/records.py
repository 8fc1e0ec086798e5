"""What a call leaves when it has ended: one line in the access log and, if it failed, one count."""

import time

import structlog

from server.api import errors
from server.api.calls import Call
from server.errors import ServiceError
from server.telemetry.metrics import Metrics


class Records:
    """Writes them; the calls of all services share one."""

    def __init__(self, metrics: Metrics, counted_methods: frozenset[str]) -> None:
        """Start without any.

        Args:
            metrics: Where failures are counted.
            counted_methods: Full names of the methods whose failures count.
        """
        self._metrics = metrics
        self._counted_methods = counted_methods
        self._log = structlog.get_logger("access").bind()

    def finish(self, call: Call, code: str, event: str = "call") -> None:
        """Write the access line of a call that ended with this status; count a failure."""
        call.code = code
        self._log.info(
            event,
            method=call.method,
            code=code,
            seconds=round(time.monotonic() - call.arrival, 6),
            source_tokens=call.source_tokens,
            generated_tokens=call.generated_tokens,
        )
        if code != "OK" and call.method in self._counted_methods:
            self._metrics.observe_failure(call.model, code)

    def fault(self, error: Exception) -> ServiceError:
        """Return what the caller may know of an exception; one nobody foresaw goes into the log under an incident id."""
        if isinstance(error, ServiceError):
            return error
        incident = errors.new_incident()
        self._log.error("unexpected exception", incident=incident, exc_info=error)
        return errors.UnexpectedFault(incident)
