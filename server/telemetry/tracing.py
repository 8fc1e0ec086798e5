"""Spans of calls with engine phases as children, exported by OpenTelemetry.

Only this file imports OpenTelemetry (extra `tracing`), if a collector is set. A thread exports spans from a queue that drops
excess spans, so that a slow or dead collector delays no request. Spans contain no user's text.

Attributes follow https://opentelemetry.io/docs/specs/semconv/ (`rpc.*`, `http.*`, `gen_ai.*`); others start with `dragoman.`.
"""

import threading
import time

from google.rpc.code_pb2 import Code
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as SpanMaker
from opentelemetry.util.types import AttributeValue

from dragoman.server.engine import messages
from dragoman.server.telemetry.trace_context import TraceContext

# Requests of one stream with spans; a stream may have a million requests.
MAX_ITEMS = 1000
# Time for the last export to end after its cancellation.
CALL_OFF_SECONDS = 0.5
# Statuses that are server faults.
SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class Tracer:
    """Creation and export of spans."""

    def __init__(self, endpoint: str, sample_ratio: float, version: str) -> None:
        """Start the export thread, which connects later.

        `endpoint` is OTLP over gRPC, `http(s)://host:port`; headers, certificates and timeouts come from `OTEL_EXPORTER_OTLP_*`,
        queue sizes from `OTEL_BSP_*`. `sample_ratio` applies to calls whose caller has not decided.
        """
        named = OTELResourceDetector().detect().attributes
        resource = Resource.create({"service.name": "dragoman", "service.version": version, **named})
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._spans = provider.get_tracer("dragoman", version)

    def start(self, method: str, arrival: float, caller: TraceContext | None) -> "CallSpan | None":
        """Start the span of a call that arrived at `time.monotonic()` `arrival`; None if it is not sampled.

        `method` is `/package.Service/Method`, or `POST /path` for HTTP.
        """
        name = method.lstrip("/")
        clock = _Clock()
        span = self._spans.start_span(
            name,
            Context() if caller is None else set_span_in_context(_span_of(caller), Context()),
            SpanKind.SERVER,
            _named(name),
            start_time=clock.wall(arrival),
        )
        return CallSpan(self._spans, span, clock, arrival) if span.is_recording() else None

    def close(self, seconds: float) -> bool:
        """Export the remaining spans and return whether that succeeded in time. Blocks; no span may end afterwards."""
        flushing = threading.Thread(target=self._processor.shutdown, name="flush-spans", daemon=True)
        flushing.start()
        flushing.join(seconds)
        is_flushed = not flushing.is_alive()
        if not is_flushed:
            self._exporter.shutdown()  # a thread that hangs in an export must not outlive the interpreter
            flushing.join(CALL_OFF_SECONDS)
        return is_flushed


class CallSpan:
    """Span of a call, or of a request of a stream, until `end`; ids are hexadecimal."""

    __slots__ = ("_arrival", "_clock", "_num_items", "_span", "_spans", "span_id", "trace_id")

    def __init__(self, spans: SpanMaker, span: Span, clock: "_Clock", arrival: float) -> None:
        self._spans, self._span, self._clock, self._arrival = spans, span, clock, arrival
        self._num_items = 0
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id)
        self.span_id = format_span_id(context.span_id)

    def start_item(self, arrival: float) -> "CallSpan | None":
        """Start the child span of a request of a stream; None beyond `MAX_ITEMS`."""
        self._num_items += 1
        if self._num_items > MAX_ITEMS:
            return None
        return CallSpan(self._spans, self._start_child("request", arrival), self._clock, arrival)

    def describe(self, version: str, request: messages.Request) -> None:
        """Set the attributes of an engine request."""
        search = request.search
        self._span.set_attributes(
            {
                "dragoman.model.version": version,
                "dragoman.num_beams": search.num_beams,
                "dragoman.priority": request.priority,
                "gen_ai.request.max_tokens": request.max_new_tokens,
                "gen_ai.request.choice.count": search.num_answers,
            }
        )
        if (sampling := search.sampling) is not None:
            self._span.set_attributes(
                {
                    "gen_ai.request.temperature": sampling.temperature,
                    "gen_ai.request.top_k": sampling.top_k,
                    "gen_ai.request.top_p": sampling.top_p,
                }
            )

    def add_languages(self, source: str, target: str) -> None:
        """Set the languages by the model's codes; empty for none."""
        named = {"dragoman.source_language": source, "dragoman.target_language": target}
        self._span.set_attributes({name: code for name, code in named.items() if code})

    def add_phases(self, finished: messages.Finished) -> None:
        """Add the consecutive spans of the engine's phases; a request that ended early lacks later ones.

        `queue` is from arrival to admission, `prefill` the encoder pass of the batch, `decode` the rest, with an event at the first
        token.
        """
        if finished.answers:
            self._span.set_attribute("gen_ai.response.finish_reasons", [answer.reason for answer in finished.answers])
        else:
            self._fail(finished.reason, finished.incident)
        if finished.admitted is None:
            self._add("queue", self._arrival, finished.ended)
            return
        self._add("queue", self._arrival, finished.admitted)
        if not finished.prefill_seconds:  # ended before the encoder pass did
            self._add("prefill", finished.admitted, finished.ended)
            return
        decoding = min(finished.admitted + finished.prefill_seconds, finished.ended)
        self._add("prefill", finished.admitted, decoding)
        self._add("decode", decoding, finished.ended, finished.first_token)

    def add_scoring(self, version: str, scored: messages.Scored) -> None:
        """Add the span `score`, from arrival to scores, including waiting."""
        self._span.set_attribute("dragoman.model.version", version)
        if scored.reason != "eos":
            self._fail(scored.reason, scored.incident)
        self._add("score", self._arrival, scored.ended)

    def end(
        self, code: str, *, request_id: str, model: str, source_tokens: int, generated_tokens: int, refusal: str, ended: float
    ) -> None:
        """End the span with the gRPC status `code`; `refusal` is the reason of a rejection before any work, `ended` monotonic."""
        attributes: dict[str, AttributeValue] = {
            "rpc.grpc.status_code": Code.Value(code),
            "dragoman.request_id": request_id,
            "gen_ai.usage.input_tokens": source_tokens,
            "gen_ai.usage.output_tokens": generated_tokens,
        }
        if model:
            attributes["gen_ai.request.model"] = model
        if refusal:
            attributes["dragoman.rejected_reason"] = refusal
        if self._num_items:
            attributes["dragoman.batch.num_requests"] = self._num_items
        if code != "OK":
            attributes["error.type"] = code
        if code in SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR, code))
        self._span.set_attributes(attributes)
        self._span.end(self._clock.wall(ended))

    def _fail(self, reason: str, incident: str) -> None:
        """Set the reason of an end without an answer."""
        self._span.set_attribute("dragoman.finish_reason", reason)
        if incident:
            self._span.set_attribute("dragoman.incident", incident)

    def _add(self, name: str, started: float, ended: float, first_token: float | None = None) -> None:
        span = self._start_child(name, started)
        if first_token is not None:
            span.add_event("first_token", timestamp=self._clock.wall(first_token))
        span.end(self._clock.wall(max(started, ended)))

    def _start_child(self, name: str, started: float) -> Span:
        context = set_span_in_context(self._span, Context())
        return self._spans.start_span(name, context, start_time=self._clock.wall(started))


class _Clock:
    """Conversion of `time.monotonic()` to time of day, with one offset for a whole call."""

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def wall(self, monotonic: float) -> int:
        """Return nanoseconds since 1970."""
        return round(monotonic * 1e9) + self._offset


def _named(method: str) -> dict[str, AttributeValue]:
    """Return the attributes for a call's method, in its protocol's convention."""
    verb, blank, route = method.partition(" ")
    if blank:
        return {"http.request.method": verb, "http.route": route}
    service, _, name = method.rpartition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}


def _span_of(caller: TraceContext) -> Span:
    flags = TraceFlags(TraceFlags.SAMPLED if caller.is_sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([caller.state]) if caller.state else None
    return NonRecordingSpan(SpanContext(int(caller.trace_id, 16), int(caller.span_id, 16), True, flags, state))
