"""What happens around every RPC: its id, its one log line, its one failure count, its status, and the drain.

Health RPCs pass untouched: probes must be answered while the server drains, and would fill the log.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from structlog.contextvars import bind_contextvars

from server.api import errors
from server.api.calls import Call, current_call
from server.api.validation import check_request_id
from server.errors import Cancelled, DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from server.telemetry.metrics import Metrics

HEALTH_PREFIX = "/grpc.health.v1.Health/"
REQUEST_ID_KEY = "x-request-id"
RETRY_SECONDS = 1.0
# A deadline and the cancellation it causes are seen through two clocks.
CLOCK_TOLERANCE_SECONDS = 0.005

# As strings: these classes take parameters in their stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"


class Unreadable:
    """Stands for a request message that cannot be parsed."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Accompanies every RPC but health from its arrival to its end, and knows which are running."""

    def __init__(self, metrics: Metrics, counted_methods: frozenset[str]) -> None:
        """Start with nothing running.

        Args:
            metrics: Where failures are counted.
            counted_methods: Full names of the methods whose failures count.
        """
        self._metrics = metrics
        self._counted_methods = counted_methods
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = structlog.get_logger("access").bind()
        self.is_draining = False

    @property
    def num_running(self) -> int:
        """RPCs that have come and not ended."""
        return len(self._calls)

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing runs, at most so long; return whether that was so."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """End what still runs with `UNAVAILABLE`; what has its answer and is sending it is left alone."""
        for call in self._calls:
            if not call.code:
                call.is_ended_by_server = True
                call.task.cancel()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler with everything around it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        metadata = handler_call_details.invocation_metadata
        return _wrap(
            handler, lambda inner, request, context: self._run(handler_call_details.method, metadata, inner, request, context)
        )

    async def _run(self, method: str, metadata: Any, inner: Behaviour, request: Any, context: Context) -> Any:
        """Serve one RPC."""
        task = asyncio.current_task()
        assert task is not None
        call = Call(method, task)
        current_call.set(call)
        self._calls.add(call)
        self._idle.clear()
        # Not at the end of this function: gRPC still has to send what it returns.
        task.add_done_callback(lambda _: self._forget(call))
        try:
            call.request_id = _request_id(metadata, request)
            bind_contextvars(request_id=call.request_id)
            if self.is_draining:
                raise Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS)
            if isinstance(request, Unreadable):
                raise InvalidRequest("request", "cannot be parsed; is every string UTF-8?")
            response = await inner(request, context)
        except asyncio.CancelledError:
            if call.is_ended_by_server:
                task.uncancel()
                await self._fail(call, context, Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS))
            self._finish(call, DeadlineExceeded.code if _is_late(context) else Cancelled.code)
            raise
        except grpc.aio.AbortError:
            self._finish(call, _code_name(context))
            raise
        except grpc.aio.InternalError:
            # gRPC could not write: the caller is gone, and gRPC knows.
            self._finish(call, Cancelled.code)
            raise
        except Exception as error:
            await self._fail(call, context, error if isinstance(error, ServiceError) else self._unexpected(error))
        else:
            self._finish(call, "OK")
            return response

    async def _fail(self, call: Call, context: Context, error: ServiceError) -> NoReturn:
        """Tell the caller, then log and count."""
        self._finish(call, error.code)
        await context.abort_with_status(errors.to_status(error, call.request_id))

    def _unexpected(self, error: Exception) -> ServiceError:
        """Log an exception nobody foresaw and return what the caller may know."""
        incident = errors.new_incident()
        self._log.error("unexpected exception", incident=incident, exc_info=error)
        return errors.UnexpectedFault(incident)

    def _finish(self, call: Call, code: str) -> None:
        """Write the access line; count a failure."""
        call.code = code
        self._log.info(
            "call",
            method=call.method,
            code=code,
            seconds=round(time.monotonic() - call.arrival, 6),
            source_tokens=call.source_tokens,
            generated_tokens=call.generated_tokens,
        )
        if code != "OK" and call.method in self._counted_methods:
            self._metrics.observe_failure(call.model, code)

    def _forget(self, call: Call) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()


def _request_id(metadata: Any, request: Any) -> str:
    """Return the id in the message, else the one in the metadata, else a new one.

    Raises:
        InvalidRequest: If the caller's is not one to log.
    """
    if value := getattr(request, "request_id", ""):
        return check_request_id("request_id", value)
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and value:
            return check_request_id(REQUEST_ID_KEY, value)
    return errors.new_incident()


def _is_late(context: Context) -> bool:
    """Return whether an RPC's deadline has passed."""
    remaining: float | None = context.time_remaining()
    return remaining is not None and remaining <= CLOCK_TOLERANCE_SECONDS


def _code_name(context: Context) -> str:
    """Return the name of the status an RPC was aborted with."""
    number: Any = context.code()
    return next((code.name for code in grpc.StatusCode if code is number or code.value[0] == number), "UNKNOWN")


def _wrap(handler: Handler, around: Callable[[Behaviour, Any, Context], Awaitable[Any]]) -> Handler:
    """Return a handler of the same kind that runs `around` the given one; streams are written by it, never yielded."""
    if handler.request_streaming:
        inner: Any = handler.stream_stream if handler.response_streaming else handler.stream_unary
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    else:
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    behaviour = _as_writer(inner) if isasyncgenfunction(inner) else inner

    async def wrapped(request: Any, context: Context) -> Any:
        return await around(behaviour, request, context)

    return make(wrapped, _forgiving(handler.request_deserializer), handler.response_serializer)


def _as_writer(generate: Callable[[Any, Context], Any]) -> Behaviour:
    """Turn a generator of responses into a coroutine that writes them."""

    async def write(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write


def _forgiving(deserialise: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Let a message that cannot be parsed through as `Unreadable`: gRPC itself would answer `UNKNOWN` to it, without a reason."""
    if deserialise is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError:
            return Unreadable()

    return read
