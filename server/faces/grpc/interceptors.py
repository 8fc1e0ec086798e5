"""What happens around every RPC, as the core has it for all faces, and the statuses that RPCs end with.

A stream of requests (GenerateBatch) is one RPC here; what becomes of each request on it is the business of `batch.py`.

Health RPCs pass untouched: probes must be answered while the server drains, and would fill the log.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import lru_cache, partial
from inspect import isasyncgenfunction
from typing import Any, TypeAlias

import grpc

from dragoman.server.core.calls import Call
from dragoman.server.core.running import RunningCalls
from dragoman.server.errors import Cancelled, DeadlineExceeded, ServiceError
from dragoman.server.faces.grpc import errors
from dragoman.server.faces.grpc.reading import LargeRequests, Refused, large_bytes_read, reader

HEALTH_PREFIX = "/grpc.health.v1.Health/"
# RPCs that generate or score; what becomes of the others is no matter for the metrics.
COUNTED_METHODS = frozenset(f"/dragoman.v1.Generation/{name}" for name in ("Generate", "GenerateStream", "GenerateBatch", "Score"))
# More than there are methods; names that callers make up push each other out.
MAX_KEPT_HANDLERS = 64
# A deadline and the cancellation it causes are seen through two clocks.
CLOCK_TOLERANCE_SECONDS = 0.005

# As strings: these classes take parameters in their stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"

# Set for each RPC in its own task, so it is as private as an argument; gRPC leaves no other way from interceptor to servicer.
current_call: ContextVar[Call] = ContextVar("current_call")
# What the RPC at hand came with.
_metadata: ContextVar[Any] = ContextVar("metadata")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Accompanies every RPC but health from its arrival to its end."""

    def __init__(self, calls: RunningCalls, max_characters: Callable[[], int] = lambda: sys.maxsize) -> None:
        """Put every RPC among these calls.

        Args:
            calls: Those that run.
            max_characters: Says how many characters of a text a model could use; of a large request no more are kept.
        """
        self._calls = calls
        self._max_characters = max_characters
        self._large = LargeRequests()
        self._accompany = lru_cache(MAX_KEPT_HANDLERS)(self._make_handler)

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
        return _wrap(handler, partial(self._run, method), self._max_characters)

    async def _run(self, method: str, inner: Behaviour, request: Any, context: Context) -> Any:
        """Serve one RPC; gRPC still has to send what this returns."""
        call = Call.begin(method, is_counted=method in COUNTED_METHODS)
        current_call.set(call)
        ending = partial(_own_ending, context)
        try:
            with self._calls.serving(
                call, _metadata.get(), getattr(request, "request_id", ""), own_ending=ending, is_sent_later=True
            ):
                if isinstance(request, Refused):
                    raise request.error
                if not (num_bytes := large_bytes_read.get()):
                    return await inner(request, context)
                with self._large.one_more(num_bytes):
                    return await inner(request, context)
        except ServiceError as error:
            await context.abort_with_status(errors.to_status(error, call.request_id))


def _own_ending(context: Context, error: BaseException) -> str | None:
    """Return the name of the status that an exception of gRPC's stands for."""
    match error:
        case asyncio.CancelledError():
            return cancellation_code(context)
        case grpc.aio.AbortError():
            return _code_name(context)
        case grpc.aio.InternalError():  # gRPC could not write: the caller is gone, and gRPC knows
            return Cancelled.code
        case _:
            return None


def cancellation_code(context: Context) -> str:
    """Return the name of the status that an RPC cancelled by gRPC ends with: that of its deadline, if that has passed."""
    remaining: float | None = context.time_remaining()
    is_late = remaining is not None and remaining <= CLOCK_TOLERANCE_SECONDS
    return DeadlineExceeded.code if is_late else Cancelled.code


def _code_name(context: Context) -> str:
    """Return the name of the status an RPC was aborted with."""
    number: Any = context.code()
    return next((code.name for code in grpc.StatusCode if code is number or code.value[0] == number), "UNKNOWN")


def _wrap(
    handler: Handler, around: Callable[[Behaviour, Any, Context], Awaitable[Any]], max_characters: Callable[[], int]
) -> Handler:
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

    deserialise = handler.request_deserializer
    reads = None if deserialise is None else reader(deserialise, max_characters)
    return make(wrapped, reads, _passing_bytes(handler.response_serializer))


def _passing_bytes(serialise: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """Let through what is serialised already."""
    if serialise is None:
        return None
    return lambda response: response if isinstance(response, bytes) else serialise(response)


def _as_writer(generate: Callable[[Any, Context], Any]) -> Behaviour:
    """Turn a generator of responses into a coroutine that writes them."""

    async def write(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write
