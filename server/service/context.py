"""Request context: the running call, its access log line, metrics and span."""

import asyncio
import time
from asyncio import Task
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from structlog.contextvars import bind_contextvars

from dragoman.server.engine.messages import ANYBODY, Share
from dragoman.server.errors import ServiceError, UnexpectedFault
from dragoman.server.service.callers import Caller
from dragoman.server.service.ids import new_incident
from dragoman.server.service.in_flight import Window
from dragoman.server.telemetry.logs import Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.trace_context import read_trace_context

if TYPE_CHECKING:
    from dragoman.server.telemetry.tracing import CallSpan, Tracer


@dataclass(slots=True, eq=False)
class Call:
    """One call of whichever face, or one request of a batch; filled in on its way.

    Attributes:
        method: Full name, `/package.Service/Method`.
        task: The asyncio task that serves it.
        is_counted: Whether the metrics know of it: it is there to generate or to score.
        has_items: Whether it is a stream of requests, each of which has a record of its own.
        is_awaited: Whether a drain waits for it.
        request_id: The caller's or ours; empty until it is known.
        caller: Whose it is; None while nobody is known, or nobody asks.
        share: Whose it is, as engines are told.
        arrival: `time.monotonic()` when it came.
        is_entered: Whether its caller's limits have let it in, and are to be told when it ends.
        not_entered: Why they have not; for a request of a batch, which is told so when it is looked at.
        deadline_limit: Name and seconds of the server's limit that its deadline comes from; empty if the caller set it.
        model: Name of the model, once that is known to be loaded.
        source_tokens: Tokens of its source.
        generated_tokens: Tokens generated for it.
        count_answer: Counts its answer once that is sure to be given; None while there is none.
        is_ended_by_server: Whether the server cancelled it to shut down.
        has_begun_items: Whether a request of its stream or message has been let in or refused.
        code: Name of the status it ended with; empty until then. Its answer may still be on the way.
        refusal: Why it was turned away before any work; see `ServiceError`.
        span: What traces it; None if nothing does.
        window: Its in-flight window, if it is large or has several requests.
    """

    method: str
    task: Task[Any]
    is_counted: bool = True
    has_items: bool = False
    is_awaited: bool = True
    request_id: str = ""
    caller: Caller | None = None
    share: Share = ANYBODY
    arrival: float = field(default_factory=time.monotonic)
    is_entered: bool = False
    not_entered: ServiceError | None = None
    deadline_limit: str = ""
    model: str = ""
    source_tokens: int = 0
    generated_tokens: int = 0
    count_answer: Callable[[], None] | None = None
    is_ended_by_server: bool = False
    has_begun_items: bool = False
    code: str = ""
    refusal: str = ""
    span: "CallSpan | None" = None
    window: Window | None = None

    @classmethod
    def begin(cls, method: str, *, is_counted: bool = True, has_items: bool = False, is_awaited: bool = True) -> "Call":
        """Return the record of a call that comes now and is served by the task that runs."""
        task = asyncio.current_task()
        assert task is not None
        return cls(method, task, is_counted, has_items, is_awaited)

    def caller_or(self, address: str) -> str:
        """Return the name of its caller or, where callers are not known, an address."""
        return address if self.caller is None else self.caller.name

    def enter(self, caller: Caller, *, is_counted: bool = True) -> None:
        """Have its caller's limits let it in; see `Caller.enter`.

        Raises:
            LimitReached: If one does not.
            Unauthenticated: If the caller may not call any more.
        """
        self.caller = caller
        if self.has_items:
            caller.enter_stream()
        else:
            caller.enter(is_counted=is_counted)
        self.is_entered = True
        self.share = caller.share

    def leave(self) -> None:
        """Tell its caller's limits, which have let it in, that it has ended."""
        assert self.caller is not None and self.is_entered
        self.is_entered = False
        if self.has_items:
            self.caller.leave_stream()
        else:
            self.caller.leave(self.generated_tokens)


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
