"""What happens around every RPC: its id, its record, its status, and the drain.

A stream of requests (GenerateBatch) is one RPC here; what becomes of each request on it is `server/api/batch.py`'s business.

Health RPCs pass untouched: probes must be answered while the server drains, and would fill the log.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import lru_cache, partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from structlog.contextvars import bind_contextvars

from dragoman.server.api import errors
from dragoman.server.api.calls import Call, current_call
from dragoman.server.api.records import Records
from dragoman.server.api.validation import check_request_id
from dragoman.server.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, ServiceError, Unavailable

HEALTH_PREFIX = "/grpc.health.v1.Health/"
REQUEST_ID_KEY = "x-request-id"
# More than there are methods; names that callers make up push each other out.
MAX_KEPT_HANDLERS = 64
RETRY_SECONDS = 1.0
# A deadline and the cancellation it causes are seen through two clocks.
CLOCK_TOLERANCE_SECONDS = 0.005

# As strings: these classes take parameters in their stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"

# What the RPC at hand came with; see `current_call`.
_metadata: ContextVar[Any] = ContextVar("metadata")


class Unreadable:
    """Stands for a request message that cannot be parsed."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Accompanies every RPC but health from its arrival to its end, and knows which are running."""

    def __init__(self, records: Records, draining: asyncio.Event) -> None:
        """Start with nothing running.

        Args:
            records: What writes the record of each call.
            draining: Set once no new call is to be served.
        """
        self._records = records
        self._draining = draining
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._accompany = lru_cache(MAX_KEPT_HANDLERS)(self._make_handler)

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
        _metadata.set(handler_call_details.invocation_metadata)
        return self._accompany(handler_call_details.method, handler)

    def _make_handler(self, method: str, handler: Handler) -> Handler:
        """Return a handler with everything around it, for every RPC of this method."""
        return _wrap(handler, partial(self._run, method))

    async def _run(self, method: str, inner: Behaviour, request: Any, context: Context) -> Any:
        """Serve one RPC."""
        task = asyncio.current_task()
        assert task is not None
        call = Call(method, task)
        current_call.set(call)
        self._calls.add(call)
        self._idle.clear()
        # Not at the end of this function: gRPC still has to send what it returns.
        task.add_done_callback(lambda _: self._forget(call))
        metadata = _metadata.get()
        self._records.begin(call, metadata)
        try:
            call.request_id = _request_id(metadata, request)
            bind_contextvars(request_id=call.request_id)
            if self._draining.is_set():
                raise Draining("the server is shutting down", retry_after_seconds=RETRY_SECONDS)
            if isinstance(request, Unreadable):
                raise InvalidRequest("request", "cannot be parsed; is every string UTF-8?")
            response = await inner(request, context)
        except asyncio.CancelledError:
            if call.is_ended_by_server:
                task.uncancel()
                await self._fail(call, context, Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS))
            self._records.finish(call, cancellation_code(context))
            raise
        except grpc.aio.AbortError:
            self._records.finish(call, _code_name(context))
            raise
        except grpc.aio.InternalError:
            # gRPC could not write: the caller is gone, and gRPC knows.
            self._records.finish(call, Cancelled.code)
            raise
        except Exception as error:
            await self._fail(call, context, self._records.fault(error))
        else:
            self._records.finish(call, "OK")
            return response

    async def _fail(self, call: Call, context: Context, error: ServiceError) -> NoReturn:
        """Log and count, then tell the caller."""
        call.refusal = error.refusal
        self._records.finish(call, error.code)
        await context.abort_with_status(errors.to_status(error, call.request_id))

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


def cancellation_code(context: Context) -> str:
    """Return the name of the status that an RPC cancelled by gRPC ends with: that of its deadline, if that has passed."""
    remaining: float | None = context.time_remaining()
    is_late = remaining is not None and remaining <= CLOCK_TOLERANCE_SECONDS
    return DeadlineExceeded.code if is_late else Cancelled.code


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
