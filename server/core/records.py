"""What a call leaves when it has ended: one line in the access log, one count, and its span if it is traced."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog
from structlog.contextvars import bind_contextvars

from dragoman.server.core.calls import Call
from dragoman.server.core.ids import new_incident
from dragoman.server.errors import ServiceError, UnexpectedFault
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.sampling import Sampler
from dragoman.server.telemetry.trace_context import read_trace_context

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import Tracer


class Records:
    """Writes them; the calls of all faces share one."""

    def __init__(self, metrics: Metrics, tracer: "Tracer | None" = None) -> None:
        """Start without any.

        Args:
            metrics: Where calls are counted.
            tracer: What makes spans; None for none.
        """
        self._metrics = metrics
        self._tracer = tracer
        self._log = structlog.get_logger("access").bind()
        self._sampler = Sampler(self._tell_suppressed)

    def begin(self, call: Call, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Start the span of a call that is to be traced; put its trace, or else its caller's, on its log lines."""
        caller = read_trace_context(metadata)
        if self._tracer is not None:
            call.span = self._tracer.start(call.method, call.arrival, caller)
        if (trace := call.span or caller) is not None:
            bind_contextvars(trace_id=trace.trace_id, span_id=trace.span_id)

    def begin_item(self, call: Call, rpc: Call, *, is_part: bool = False) -> None:
        """Start the span of one request of a batch, if the whole call has one; have its caller's limits let it in.

        A refusal is kept for when the request is looked at. The caller's rate of requests has counted the whole call, so it counts
        neither the first request of the call nor parts (sentences, texts) of a message.
        """
        if rpc.span is not None:
            call.span = rpc.span.start_item(call.arrival)
        if call.span is not None:
            bind_contextvars(span_id=call.span.span_id)
        if rpc.caller is not None:
            try:
                is_counted, rpc.has_begun_items = not is_part and rpc.has_begun_items, True
                call.enter(rpc.caller, is_counted=is_counted)
            except ServiceError as error:
                call.not_entered = error

    def finish(self, call: Call, code: str, event: str = "call") -> None:
        """Write the access line of a call that ended with this status; count its answer or its failure; end its span.

        Of those that failed some lines of each kind are written; how many were not, `tell_suppressed` says.
        """
        call.code = code
        ended = time.monotonic()
        if call.is_entered:
            call.leave()
        if code == "OK" or self._sampler.allows(call.refusal or code):
            self._log.info(
                event,
                method=call.method,
                code=code,
                seconds=round(ended - call.arrival, 6),
                source_tokens=call.source_tokens,
                generated_tokens=call.generated_tokens,
            )
        if code != "OK" and call.is_counted:
            self._metrics.observe_failure(call.model, code, call.refusal)
        elif code == "OK" and call.count_answer is not None:
            call.count_answer()
        if call.span is not None:
            call.span.end(
                code,
                request_id=call.request_id,
                model=call.model,
                source_tokens=call.source_tokens,
                generated_tokens=call.generated_tokens,
                refusal=call.refusal,
                ended=ended,
            )

    def fault(self, error: Exception) -> ServiceError:
        """Return what the caller may know of an exception; one nobody foresaw goes into the log under an incident id.

        Of very many, only some do: then an id that is quoted may not be there.
        """
        if isinstance(error, ServiceError):
            return error
        incident = new_incident()
        if self._sampler.allows("unexpected exception"):
            self._log.error("unexpected exception", incident=incident, exc_info=error)
        return UnexpectedFault(incident)

    def tell_suppressed(self) -> None:
        """Write how many lines of failed calls were not written and not told yet, a line for each kind."""
        self._sampler.tell()

    def _tell_suppressed(self, kind: str, count: int) -> None:
        self._log.warning("lines of failed calls not written", kind=kind, suppressed=count)
