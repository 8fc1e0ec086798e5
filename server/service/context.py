"""Call context, access log and the set of running calls that a drain waits for.

Every call has an id, possibly a span, one log line and one count, and ends in an answer or one `ServiceError`.
"""

import asyncio
import random
import time
from asyncio import Task
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import Struct, field
from structlog.contextvars import bind_contextvars

from dragoman.server.engine.messages import ANYBODY, Share
from dragoman.server.errors import Cancelled, Draining, InvalidRequest, ServiceError, Unavailable, UnexpectedFault
from dragoman.server.service.callers import RETRY_SECONDS, Caller, Callers, Metadata
from dragoman.server.service.in_flight import Window
from dragoman.server.service.requests import check_length
from dragoman.server.telemetry.logs import Sampler
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.trace_context import read_trace_context

if TYPE_CHECKING:  # imports OpenTelemetry
    from dragoman.server.telemetry.tracing import CallSpan, Tracer

REQUEST_ID_KEY = "x-request-id"
# Seeded once by the system: system randomness for each request would cost a system call.
_ids = random.Random()


def new_incident() -> str:
    """Return an id for one failure or request in the log; unlikely to repeat, not secret."""
    return f"{_ids.getrandbits(64):016x}"


def choose_request_id(given: str, metadata: Metadata | None) -> str:
    """Return the request's id, else the metadata's, else a new one; raises as `check_request_id`."""
    if given:
        return check_request_id("request_id", given)
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and value:
            return check_request_id(REQUEST_ID_KEY, value if isinstance(value, str) else value.decode("latin-1"))
    return new_incident()


def check_request_id(field: str, value: str) -> str:
    """Return a caller's request id unchanged; raise `InvalidRequest` if it is too long or not printable ASCII."""
    check_length(field, value)
    if not (value.isascii() and value.isprintable()):
        raise InvalidRequest(field, "only printable ASCII characters are allowed")
    return value


class Call(Struct, eq=False):
    """Context of one call, or of one request of a batch; filled in while it is served.

    Attributes:
        method: Full name, `/package.Service/Method`.
        is_counted: Whether request metrics count the call: it generates or scores.
        has_items: Whether the call is a stream of requests, each with its own context.
        is_awaited: Whether a drain waits for the call.
        caller: None while unknown, and without authentication.
        arrival: `time.monotonic()` at arrival.
        deadline: `time.monotonic()` of the deadline; None for no limit, and while the model is unknown.
        deadline_limit: Name and seconds of the server's limit that set the deadline; empty if the caller set it.
        is_entered: Whether the caller's limits have admitted the call; `leave` releases it.
        not_entered: Refusal by the caller's limits of a request of a batch; raised when it is served.
        max_at_once: Most segments of the call's text that run at once; 0 for no limit of its own.
        count_answer: Counts the answer once it has been sent; None without an answer.
        has_begun_items: Whether a request of the stream or message has been admitted or refused.
        is_item: Whether this is one of several requests of a message or stream.
        is_aligned: Whether the answer has links to its source, for its tags.
        is_cached: Whether the answer, with all of its parts, is from the result cache.
        address: Address of the peer.
        code: Name of the status; empty until the call ends. The answer may still be in transit.
        refusal: Reason of a refusal before any work; see `ServiceError`.
        window: In-flight window, if the call is large or has several requests.
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
    deadline: float | None = None
    deadline_limit: str = ""
    is_entered: bool = False
    not_entered: ServiceError | None = None
    model: str = ""
    max_at_once: int = 0
    source_tokens: int = 0
    generated_tokens: int = 0
    count_answer: Callable[[], None] | None = None
    is_ended_by_server: bool = False
    has_begun_items: bool = False
    is_item: bool = False
    is_aligned: bool = False
    is_cached: bool = False
    address: str = ""
    code: str = ""
    refusal: str = ""
    span: "CallSpan | None" = None
    window: Window | None = None

    @classmethod
    def begin(cls, method: str, *, is_counted: bool = True, has_items: bool = False, is_awaited: bool = True) -> "Call":
        """Return the context of a call served by the current task."""
        task = asyncio.current_task()
        assert task is not None
        return cls(method, task, is_counted, has_items, is_awaited)

    @property
    def owner(self) -> str:
        """Key for in-flight limits: the caller's name or, without authentication, its address."""
        return self.address if self.caller is None else self.caller.name

    def enter(self, caller: Caller, *, is_counted: bool = True, is_background: bool = False) -> None:
        """Admit the call through its caller's limits; raises as `Caller.enter`."""
        self.caller = caller
        if self.has_items:
            caller.enter_stream()
        else:
            caller.enter(is_counted=is_counted, is_background=is_background)
        self.is_entered = True
        self.share = caller.share

    def leave(self) -> None:
        """Release the call in its caller's limits."""
        assert self.caller is not None and self.is_entered
        self.is_entered = False
        if self.has_items:
            self.caller.leave_stream()
        else:
            self.caller.leave(self.generated_tokens)


def _caller_left(error: BaseException) -> str | None:
    """Return the status of an exception that signals the caller's disconnection, for adapters without their own."""
    return Cancelled.code if isinstance(error, asyncio.CancelledError | GeneratorExit) else None


class RunningCalls:
    """Running calls of every protocol, each served within `serving`; `draining` is set once new calls are refused.

    Each ended call, and each request of a batch, has one line in the access log, one count in the metrics and the end of its span.

    Attributes:
        on_begin: Called for each call that generates or scores, before anything else is done for it.
    """

    def __init__(self, metrics: Metrics, tracer: "Tracer | None" = None, callers: Callers | None = None) -> None:
        self.callers = callers
        self._metrics, self._tracer = metrics, tracer
        self._log = structlog.get_logger("access").bind()
        self._sampler = Sampler(
            lambda kind, count: self._log.warning("lines of failed calls not written", kind=kind, suppressed=count)
        )
        self.draining = asyncio.Event()
        self.on_begin: Callable[[], None] = lambda: None
        self._calls: set[Call] = set()
        self._others: set[Call] = set()  # a drain does not wait for these
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Running calls that a drain waits for."""
        return len(self._calls)

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no call runs that a drain waits for; return False on timeout."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def wait_ended(self, seconds: float) -> None:
        """Wait until no call runs at all, or until the timeout."""
        if tasks := {call.task for call in self._calls | self._others} - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=seconds)

    def end_all(self) -> None:
        """End running calls with `UNAVAILABLE`, except those that are sending their answer."""
        for call in self._calls | self._others:
            if not call.code:
                call.is_ended_by_server = True
                call.task.cancel()

    def is_known(self, call: Call, metadata: Metadata | None, names: Callable[[], Iterable[str]] = tuple) -> bool:
        """Identify the caller before reading a call; return whether to read it. `serving` raises the reason otherwise."""
        if self.callers is None:
            return True
        if call.caller is None:
            call.caller = self.callers.find(metadata, names())
        return call.caller is not None and call.caller.may_call

    @contextmanager
    def serving(
        self,
        call: Call,
        metadata: Metadata | None = None,
        request_id: str = "",
        *,
        names: Callable[[], Iterable[str]] = tuple,
        own_ending: Callable[[BaseException], str | None] = _caller_left,
        is_sent_later: bool = False,
        is_open: bool = False,
    ) -> Iterator[None]:
        """Serve a call within the `with`, in its task.

        Args:
            call: Context; the caller may be set already.
            metadata: Pairs of a lower-case key and a value.
            request_id: Id in the request; empty for none.
            names: Returns the names in the verified client certificate.
            own_ending: Returns the status of an adapter's own exception, to be recorded and re-raised; None for others.
            is_sent_later: Whether the answer is sent after the `with`; the call then runs until its task ends.
            is_open: Whether authentication and callers' limits are skipped.

        Raises:
            ServiceError: For the caller, for every other exception; recorded already.
        """
        if call.is_awaited:
            self._calls.add(call)
            self._idle.clear()
        else:
            self._others.add(call)
        if call.is_counted:
            self.on_begin()
        if is_sent_later:
            call.task.add_done_callback(lambda _: self._forget(call))
        self._begin(call, metadata)
        try:
            call.request_id = choose_request_id(request_id, metadata)
            bind_contextvars(request_id=call.request_id)
            if self.draining.is_set():
                raise Draining("the server is shutting down", retry_after_seconds=RETRY_SECONDS)
            if self.callers is not None and not is_open:
                if call.caller is None:
                    call.caller = self.callers.identify(metadata, names())
                bind_contextvars(caller=call.caller.name)
                call.enter(call.caller)
            yield
        except asyncio.CancelledError as error:
            if call.is_ended_by_server:
                call.task.uncancel()
                raise self._fail(call, Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS)) from None
            self.finish(call, own_ending(error) or Cancelled.code)
            raise
        except BaseException as error:
            if (code := own_ending(error)) is not None:
                self.finish(call, code)
                raise
            if not isinstance(error, Exception):
                raise
            raise self._fail(call, self.fault(error)) from None
        else:
            self.finish(call, "OK")
        finally:
            if not is_sent_later:
                self._forget(call)

    def _begin(self, call: Call, metadata: Metadata | None) -> None:
        """Start the span of a traced call; bind its trace, else the caller's, to the log lines."""
        caller = read_trace_context(metadata)
        if self._tracer is not None:
            call.span = self._tracer.start(call.method, call.arrival, caller)
        if (trace := call.span or caller) is not None:
            bind_contextvars(trace_id=trace.trace_id, span_id=trace.span_id)

    def begin_item(self, call: Call, rpc: Call, *, is_part: bool = False) -> None:
        """Start the span of one request of a batch, if the call has one; admit the request through its caller's limits.

        A refusal is raised only when the request is served. The request rate has counted the whole call already, so neither its
        first request nor parts (sentences, texts) of a message are counted.
        """
        call.is_item, call.address = True, rpc.address
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

    @contextmanager
    def part(self, whole: Call) -> Iterator[Call]:
        """Serve a part of a call's text within the `with`, in its own task: with a span and in the metrics, but not in the log.

        Raises `ServiceError` in place of every exception but cancellation.
        """
        part = Call.begin(whole.method)
        part.request_id, part.caller, part.share, part.model = whole.request_id, whole.caller, whole.share, whole.model
        part.deadline, part.deadline_limit = whole.deadline, whole.deadline_limit
        if whole.span is not None:
            part.span = whole.span.start_item(part.arrival)
        code = "OK"
        try:
            yield part
        except asyncio.CancelledError:  # another part has failed, or the whole ends: that counts
            code, part.is_counted = Cancelled.code, False
            raise
        except Exception as error:
            fault = self.fault(error)
            code, part.refusal = fault.code, fault.refusal
            raise fault from None
        finally:
            whole.source_tokens += part.source_tokens
            whole.generated_tokens += part.generated_tokens
            self._record(part, code, time.monotonic())

    def finish(self, call: Call, code: str, event: str = "call") -> None:
        """Log the end of a call (failures sampled, see `log_suppressed`), count its answer or failure, and end its span."""
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
        self._record(call, code, ended)

    def _record(self, call: Call, code: str, ended: float) -> None:
        call.code = code
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
        """Return the error for the caller; log an unforeseen exception under an incident id, sampled."""
        if isinstance(error, ServiceError):
            return error
        incident = new_incident()
        if self._sampler.allows("unexpected exception"):
            self._log.error("unexpected exception", incident=incident, exc_info=error)
        return UnexpectedFault(incident)

    def log_suppressed(self) -> None:
        """Log the number of suppressed lines of failed calls since the last time, one line for each kind."""
        self._sampler.flush()

    def _fail(self, call: Call, error: ServiceError) -> ServiceError:
        call.refusal = error.refusal
        self.finish(call, error.code)
        return error

    def _forget(self, call: Call) -> None:
        self._calls.discard(call)
        self._others.discard(call)
        if not self._calls:
            self._idle.set()
