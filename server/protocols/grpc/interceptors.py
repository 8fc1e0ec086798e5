"""Interceptor of every RPC: authentication, call record, limits and final status; `streams.py` records the requests of a stream."""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from dragoman.server.errors import (
    Cancelled,
    ConnectionLimit,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    ServiceError,
)
from dragoman.server.protocols.bulk import num_requests
from dragoman.server.protocols.grpc.reading import Refused, bulk_parser, large_bytes_read, parser
from dragoman.server.protocols.tls import printable
from dragoman.server.protocols.v1.messages import to_message
from dragoman.server.service.callers import NO_DEADLINES
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.generate import Generation
from dragoman.server.service.in_flight import InFlight, MessageRate, Receiving, StreamLimit
from dragoman.v1 import generation_pb2

# gRPC cancels the RPC of a disconnected caller within this time after EOF.
GONE_SECONDS = 0.1
# More than there are methods; unknown names evict each other.
MAX_KEPT_HANDLERS = 64
# A caller's deadline passes before ours: our clock starts on arrival, and gRPC rounds timeouts up to two or three digits.
TRANSPORT_SECONDS = 0.05
TIMEOUT_ROUNDING = 0.01
# Each stream of requests may hold a large, partly received message.
MAX_STREAMS_PER_CONNECTION = 64

# Strings, as these classes are generic only in their stubs.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"
Parse: TypeAlias = Callable[[bytes], Any]
# Takes gRPC's parser and a function that returns the most characters a model could use.
MakeParser: TypeAlias = Callable[[Parse, Callable[[], int]], Parse]

# Set in each RPC's task; gRPC has no other way to pass values from interceptor to servicer.
current_call: ContextVar[Call] = ContextVar("current_call")
_metadata: ContextVar[Any] = ContextVar("metadata")


@dataclass(frozen=True, slots=True)
class Method:
    """Handling of an RPC method's calls."""

    is_probe: bool = False  # not authenticated, recorded or refused: must be answered while draining
    is_awaited: bool = False  # a drain waits for the call
    is_counted: bool = False  # in the request metrics
    parser: MakeParser = parser


Methods: TypeAlias = Mapping[str, Method]

OTHER = Method()
PROBE = Method(is_probe=True)
QUESTION = Method(is_awaited=True)
REQUEST = Method(is_awaited=True, is_counted=True)


def declared(service: ServiceDescriptor, usual: Method, **others: Method) -> dict[str, Method]:
    """Return the handling of a service's RPCs by full name: `others` by name, `usual` for the rest."""
    names = [method.name for method in service.methods]
    assert others.keys() <= set(names)
    return {f"/{service.full_name}/{name}": others.get(name, usual) for name in names}


def _bulk(_: Parse, max_characters: Callable[[], int]) -> Parse:
    return bulk_parser(parser(generation_pb2.GenerateRequest.FromString, max_characters))


GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
BULK = Method(is_awaited=True, is_counted=True, parser=_bulk)
# Methods that are not listed are `OTHER`.
OWN_METHODS: Methods = {
    **declared(
        GENERATION, QUESTION, Generate=REQUEST, GenerateStream=REQUEST, GenerateBatch=REQUEST, GenerateBulk=BULK, Score=REQUEST
    ),
    **declared(HEALTH, PROBE),
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates each caller before its message is read, then limits and records the call; probes are only rate-limited."""

    def __init__(
        self,
        calls: RunningCalls,
        methods: Methods = OWN_METHODS,
        generation: Generation | None = None,  # None if the RPCs do not generate
        in_flight: InFlight | None = None,
        messages_per_second: float = 0.0,  # per connection; 0 for no limit
    ) -> None:
        self._calls = calls
        self._methods = methods
        self._generation = generation
        self._max_characters = (lambda: sys.maxsize) if generation is None else generation.max_characters
        self._rate = MessageRate(messages_per_second) if messages_per_second else None
        self._in_flight = in_flight or InFlight(lambda: 1)
        self._streams = StreamLimit("streams of requests", math.inf, MAX_STREAMS_PER_CONNECTION)
        self._receiving = Receiving()
        # Suits every kind of RPC: can answer before it reads a message.
        self._unknown: Handler = grpc.stream_stream_rpc_method_handler(_refuse_unknown)
        self._wrapped = lru_cache(MAX_KEPT_HANDLERS)(self._wrap)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler, wrapped; an unknown method is refused after authentication."""
        handler = await continuation(handler_call_details)
        if handler is None:
            if self._calls.callers is None:
                return None
            handler = self._unknown
        _metadata.set(handler_call_details.invocation_metadata)
        return self._wrapped(handler_call_details.method, handler)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        """Return a wrapped handler for every RPC of a method."""
        treated = self._methods.get(method, OTHER)
        is_stream = bool(handler.request_streaming and handler.response_streaming)
        around = self._run_probe if treated.is_probe else partial(self._run, method, treated, is_stream)
        if handler.request_streaming:
            inner: Any = handler.stream_stream if handler.response_streaming else handler.stream_unary
        else:
            inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        behaviour = _as_writer(inner) if isasyncgenfunction(inner) else inner
        # Always a stream of requests: gRPC skips a unary handler if the caller has left, and the call would not be counted.
        has_one = not handler.request_streaming

        async def wrapped(requests: Any, context: Context) -> Any:
            return await around(behaviour, None if has_one else requests, context)

        parse, serialise = handler.request_deserializer, handler.response_serializer
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        return make(
            wrapped,
            None if parse is None else treated.parser(parse, self._max_characters),
            None if serialise is None else lambda response: response if isinstance(response, bytes) else serialise(response),
        )

    async def _read(self, context: Context) -> Any:
        """Return a unary request's message, or `Refused` if it is missing or refused while received."""
        try:
            message = await self._receiving.receive(context.peer(), context.read)
        except QueueFull as error:
            return Refused(error)
        if message is not grpc.aio.EOF:
            return message
        await asyncio.sleep(GONE_SECONDS)
        return Refused(InvalidRequest("request", "is missing"))

    async def _read_in_time(self, call: Call, context: Context) -> Any:
        """Return a unary request's message, or `Refused` once the server's deadline passes."""
        deadlines = NO_DEADLINES if self._generation is None else self._generation.deadlines(call)
        if deadlines == NO_DEADLINES:
            return await self._read(context)
        seconds, limit = deadlines.time_left(call.arrival, context.time_remaining())
        try:
            async with asyncio.timeout(seconds if limit else None):  # gRPC itself ends calls at their own deadlines
                return await self._read(context)
        except TimeoutError:
            return Refused(DeadlineExceeded(f"the server's deadline ({limit} seconds) passed before the request came"))

    async def _run_probe(self, inner: Behaviour, request: Any, context: Context) -> Any:
        arrival = time.monotonic()
        try:
            message = await self._read(context) if request is None else request
            if self._rate is not None:
                await self._rate.wait(context.peer())
            _check_readable(message)
            return await inner(message, context)
        except Exception as error:
            if own_ending(context, arrival, error) is not None:
                raise
            await context.abort_with_status(to_status(self._calls.fault(error)))

    async def _run(self, method: str, treated: Method, is_stream: bool, inner: Behaviour, request: Any, context: Context) -> Any:
        """Serve one RPC; gRPC sends the returned response afterwards."""
        call = Call.begin(method, is_counted=treated.is_counted, has_items=is_stream, is_awaited=treated.is_awaited)
        call.address = context.peer().rpartition(":")[0]
        current_call.set(call)
        metadata, names = _metadata.get(), partial(peer_names, context)
        if self._calls.callers is not None:
            call.caller = self._calls.callers.by_token(metadata)
        if request is None and self._calls.is_known(call, metadata, names):
            try:
                request = await self._read_in_time(call, context)
            except asyncio.CancelledError:  # the caller left before its message arrived
                self._calls.finish(call, cancellation_code(context, call.arrival))
                raise
        call.has_items = is_stream or num_requests(request) > 1
        ending, is_counted = partial(own_ending, context, call.arrival), False
        request_id = getattr(request, "request_id", "")
        try:
            with self._calls.serving(call, metadata, request_id, names=names, own_ending=ending, is_sent_later=True):
                if self._rate is not None:
                    is_counted = True
                    request = await self._at_rate(self._rate, request, is_stream, context.peer())
                _check_readable(request)
                num_bytes = large_bytes_read.get()
                if not num_bytes and not call.has_items:
                    return await inner(request, context)
                with ExitStack() as stack:
                    if is_stream and treated.is_counted:
                        stack.enter_context(self._streams.stream(context.peer()))
                    call.window = stack.enter_context(self._in_flight.window(call.owner, num_bytes))
                    return await inner(request, context)
        except ServiceError as error:
            # Refusals are rate-limited like answers, except while the server drains.
            if self._rate is not None and not is_counted and not self._calls.draining.is_set():
                with suppress(ConnectionLimit):
                    await self._rate.wait(context.peer())
            await context.abort_with_status(to_status(error, call.request_id))

    async def _at_rate(self, rate: MessageRate, request: Any, is_stream: bool, peer: str) -> Any:
        """Return a message, or a stream of messages, at the rate allowed to its connection."""
        await rate.wait(peer)
        if is_stream:
            return rate.read(request, peer, num_requests)
        if (num_more := num_requests(request) - 1) > 0:
            rate.count(peer, num_more)
        return request


async def _refuse_unknown(_: Any, context: Context) -> NoReturn:
    """Refuse an unknown method as gRPC does, but after authentication."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


# gRPC's keys of names that identify a client; an IP address does not.
_NAMES = ("peer_dns", "peer_uri", "peer_email")
_ALL_ALTERNATIVES = "x509_subject_alternative_name"
_COMMON_NAME = "x509_common_name"


def peer_names(context: Context) -> tuple[str, ...]:
    """Return the printable names in the client's verified certificate: DNS names, URIs, then e-mail addresses."""
    shown = context.auth_context()
    # The common name counts only without alternative names of any kind, addresses included.
    keys = _NAMES if _ALL_ALTERNATIVES in shown else (_COMMON_NAME,)
    names = (value.decode(errors="replace") for key in keys for value in shown.get(key, ()))
    return printable(names)


def to_status(error: ServiceError, request_id: str = "") -> grpc.Status:
    """Return an error's gRPC status with the details of `to_message`."""
    result: grpc.Status = rpc_status.to_status(to_message(error, request_id))
    return result


def own_ending(context: Context, arrival: float, error: BaseException) -> str | None:
    """Return the status code name of an exception of gRPC's own; None for every other exception."""
    match error:
        case asyncio.CancelledError():
            return cancellation_code(context, arrival)
        case grpc.aio.AbortError():
            number: Any = context.code()
            return next((code.name for code in grpc.StatusCode if code is number or code.value[0] == number), "UNKNOWN")
        case grpc.aio.InternalError():  # a write failed: the caller has left
            return Cancelled.code
        case _:
            return None


def cancellation_code(context: Context, arrival: float) -> str:
    """Return the status code name of an RPC cancelled by gRPC: `DEADLINE_EXCEEDED` if its deadline has passed, else `CANCELLED`."""
    remaining: float | None = context.time_remaining()
    if remaining is None:
        return Cancelled.code
    timeout = time.monotonic() - arrival + remaining
    tolerance = min(TRANSPORT_SECONDS + TIMEOUT_ROUNDING * timeout, timeout / 2)
    return DeadlineExceeded.code if remaining <= tolerance else Cancelled.code


def _check_readable(request: Any) -> None:
    if isinstance(request, Refused):
        raise request.error


def _as_writer(generate: Callable[[Any, Context], Any]) -> Behaviour:
    """Convert a generator of responses to a coroutine that writes them."""

    async def write(request: Any, context: Context) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write
