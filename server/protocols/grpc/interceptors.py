"""Interceptors around every RPC: authentication, request context, status mapping."""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias
from weakref import WeakValueDictionary

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
    Unauthenticated,
)
from dragoman.server.protocols.bulk import BulkEnvelope
from dragoman.server.protocols.grpc.reading import Refused, bulk_parser, large_bytes_read, reader
from dragoman.server.protocols.v1.messages import to_message
from dragoman.server.service.callers import NO_DEADLINES, Caller, Callers, Deadlines
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.in_flight import InFlight, MessageRate, Receiving, StreamLimit
from dragoman.v1 import generation_pb2


def to_status(error: ServiceError, request_id: str = "") -> grpc.Status:
    """Return the gRPC status of an error, with what `to_message` has in its details."""
    result: grpc.Status = rpc_status.to_status(to_message(error, request_id))
    return result


Read: TypeAlias = Callable[[bytes], Any]
# Makes what reads a message of what gRPC would read it with, and of what says how many characters of a text a model could use.
MakeRead: TypeAlias = Callable[[Read, Callable[[], int]], Read]


@dataclass(frozen=True, slots=True)
class Method:
    """How the calls of an RPC are treated.

    Attributes:
        is_probe: Whether they are neither recorded nor refused, and need no caller: probes must be answered while the server
            drains, and would fill the log.
        is_awaited: Whether a drain waits for them: for requests, and for what is asked about models. Whatever else is open is no
            work of anybody's.
        is_counted: Whether the metrics know of them: they generate or score.
        reader: Makes what reads their messages.
    """

    is_probe: bool = False
    is_awaited: bool = False
    is_counted: bool = False
    reader: MakeRead = reader


Methods: TypeAlias = Mapping[str, Method]

OTHER = Method()
PROBE = Method(is_probe=True)
QUESTION = Method(is_awaited=True)
REQUEST = Method(is_awaited=True, is_counted=True)


def declared(service: ServiceDescriptor, usual: Method, **others: Method) -> dict[str, Method]:
    """Return how the RPCs of a service are treated, by their full names.

    Args:
        service: What has them.
        usual: How most of them are.
        others: How the others are, by their names.
    """
    names = [method.name for method in service.methods]
    assert others.keys() <= set(names)
    return {f"/{service.full_name}/{name}": others.get(name, usual) for name in names}


def _read_bulk(_: Read, max_characters: Callable[[], int]) -> Read:
    return bulk_parser(reader(generation_pb2.GenerateRequest.FromString, max_characters))


GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
# What is not among them is as `OTHER`.
OWN_METHODS: Methods = {
    **declared(
        GENERATION,
        QUESTION,
        Generate=REQUEST,
        GenerateStream=REQUEST,
        GenerateBatch=REQUEST,
        GenerateBulk=Method(is_awaited=True, is_counted=True, reader=_read_bulk),
        Score=REQUEST,
    ),
    **declared(HEALTH, PROBE),
}


# A caller that is gone has no message to come either; if that is why, gRPC cancels the RPC within this time.
GONE_SECONDS = 0.1
# More than there are methods; names that callers make up push each other out.
MAX_KEPT_HANDLERS = 64
# A caller gives up when its time is over, and that is before ours is: our clock starts when the call has come, and gRPC writes
# timeouts of more than a second with two or three digits, rounded up.
TRANSPORT_SECONDS = 0.05
TIMEOUT_ROUNDING = 0.01

# As strings: these classes take parameters in their stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
# Each stream of requests may have a large message half sent.
MAX_STREAMS_PER_CONNECTION = 64
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"

# Set for each RPC in its own task, so it is as private as an argument; gRPC leaves no other way from interceptor to servicer.
current_call: ContextVar[Call] = ContextVar("current_call")
# Whose it is, where that was found out before its message was read.
current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)
# What the RPC at hand came with.
_metadata: ContextVar[Any] = ContextVar("metadata")


def _no_names(_: Context) -> Sequence[str]:
    return ()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Accompanies every RPC from its arrival to its end; probes are spared what `_run_probe` leaves out."""

    def __init__(
        self,
        calls: RunningCalls,
        max_characters: Callable[[], int] = lambda: sys.maxsize,
        peer_names: "Callable[[Context], Sequence[str]]" = _no_names,
        rate: MessageRate | None = None,
        deadlines: Callable[[Call], Deadlines] = lambda _: NO_DEADLINES,
        methods: Methods = OWN_METHODS,
        in_flight: InFlight | None = None,
    ) -> None:
        """Put every RPC among these calls.

        Args:
            calls: Those that run.
            max_characters: Says how many characters of a text a model could use; of a large request no more are kept.
            peer_names: Returns the names in the client's certificate.
            rate: Limits the messages of a connection; None for any rate.
            deadlines: Says how long a call may take, whose message may never come.
            methods: How calls of RPCs are treated.
            in_flight: What large calls, and those of several requests, share.
        """
        self._calls = calls
        self._max_characters = max_characters
        self._peer_names = peer_names
        self._rate = rate
        self._deadlines = deadlines
        self._methods = methods
        self._in_flight = in_flight or InFlight(lambda: 1)
        self._streams = StreamLimit("max_batch_streams_per_connection", math.inf, MAX_STREAMS_PER_CONNECTION)
        self._receiving: WeakValueDictionary[str, Receiving] = WeakValueDictionary()  # of connections
        self._accompany = lru_cache(MAX_KEPT_HANDLERS)(self._make_handler)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler with everything around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        _metadata.set(handler_call_details.invocation_metadata)
        return self._accompany(handler_call_details.method, handler)

    def _make_handler(self, method: str, handler: Handler) -> Handler:
        """Return a handler with everything around it, for every RPC of this method."""
        has_items = bool(handler.request_streaming and handler.response_streaming)
        treated = self._methods.get(method, OTHER)
        run = self._run_probe if treated.is_probe else partial(self._run, method, treated, has_items)
        reads = None
        if handler.request_deserializer is not None:
            reads = treated.reader(handler.request_deserializer, self._max_characters)
        return _wrap(handler, run, reads)

    async def _read(self, context: Context) -> Any:
        """Return the message of an RPC that has one; `Refused` if there is none to come, or it takes too long."""
        peer = context.peer()
        receiving = self._receiving.get(peer)
        if receiving is None:
            receiving = self._receiving[peer] = Receiving()
        try:
            message = await receiving.receive(context.read)
        except QueueFull as error:
            return Refused(error)
        if message is not grpc.aio.EOF:
            return message
        await asyncio.sleep(GONE_SECONDS)
        return Refused(InvalidRequest("request", "is missing"))

    async def _run_probe(self, inner: Behaviour, request: Any, context: Context) -> Any:
        """Serve one RPC without a record of it."""
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
            await context.abort_with_status(to_status(self._calls.records.fault(error)))

    async def _run(self, method: str, treated: Method, has_items: bool, inner: Behaviour, request: Any, context: Context) -> Any:
        """Serve one RPC; gRPC still has to send what this returns."""
        call = Call.begin(method, is_counted=treated.is_counted, has_items=has_items, is_awaited=treated.is_awaited)
        call.caller = current_caller.get()
        current_call.set(call)
        ending = partial(own_ending, context, call.arrival)
        names = partial(self._peer_names, context)
        is_paced = False
        if request is None and self._calls.is_known(call, _metadata.get(), names):
            try:
                request = await self._read_in_time(call, context)
            except asyncio.CancelledError:  # gone before its message came
                self._calls.records.finish(call, cancellation_code(context, call.arrival))
                raise
        num_more = num_requests(request) - 1
        if num_more > 0:
            call.has_items = True
        try:
            with self._calls.serving(
                call,
                _metadata.get(),
                getattr(request, "request_id", ""),
                names=names,
                own_ending=ending,
                is_sent_later=True,
            ):
                if self._rate is not None:
                    peer, is_paced = context.peer(), True
                    await self._rate.wait(peer)
                    if num_more > 0:
                        self._rate.count(peer, num_more)
                    request = self._rate.read(request, peer, num_requests) if has_items else request
                _check_readable(request)
                num_bytes = large_bytes_read.get()
                if not num_bytes and not call.has_items:
                    return await inner(request, context)
                with ExitStack() as stack:
                    if has_items and treated.is_counted:
                        stack.enter_context(self._streams.stream(context.peer()))
                    address = context.peer().rpartition(":")[0]
                    call.window = stack.enter_context(self._in_flight.window(call.caller_or(address), num_bytes))
                    return await inner(request, context)
        except ServiceError as error:
            # Refused before it was counted: so that refusals of a connection come no faster than answers. Not during the end.
            if self._rate is not None and not is_paced and not self._calls.draining.is_set():
                with suppress(ConnectionLimit):
                    await self._rate.wait(context.peer())
            await context.abort_with_status(to_status(error, call.request_id))

    async def _read_in_time(self, call: Call, context: Context) -> Any:
        """Return the message of an RPC that has one, or `Refused` if it has not come when the server's deadline has passed."""
        deadlines = self._deadlines(call)
        if deadlines == NO_DEADLINES:
            return await self._read(context)
        seconds, limit = deadlines.time_left(call.arrival, context.time_remaining())
        try:
            async with asyncio.timeout(seconds if limit else None):  # of a deadline of the caller's gRPC itself takes care
                return await self._read(context)
        except TimeoutError:
            return Refused(DeadlineExceeded(f"the server's deadline ({limit} seconds) passed before the request came"))


def num_requests(message: Any) -> int:
    """Return the number of requests in a message."""
    return len(message) if isinstance(message, BulkEnvelope) else 1


def _check_readable(request: Any) -> None:
    """Refuse a message that was refused as it was read.

    Raises:
        ServiceError: If it is one.
    """
    if isinstance(request, Refused):
        raise request.error


def own_ending(context: Context, arrival: float, error: BaseException) -> str | None:
    """Return the name of the status that an exception of gRPC's stands for; None for every other exception."""
    match error:
        case asyncio.CancelledError():
            return cancellation_code(context, arrival)
        case grpc.aio.AbortError():
            return _code_name(context)
        case grpc.aio.InternalError():  # gRPC could not write: the caller is gone, and gRPC knows
            return Cancelled.code
        case _:
            return None


def cancellation_code(context: Context, arrival: float) -> str:
    """Return the name of the status that an RPC cancelled by gRPC ends with for its caller: that of its deadline, if that is over.

    Args:
        context: Of the RPC.
        arrival: When it came, by `time.monotonic()`.
    """
    remaining: float | None = context.time_remaining()
    if remaining is None:
        return Cancelled.code
    timeout = time.monotonic() - arrival + remaining
    tolerance = min(TRANSPORT_SECONDS + TIMEOUT_ROUNDING * timeout, timeout / 2)
    return DeadlineExceeded.code if remaining <= tolerance else Cancelled.code


def _code_name(context: Context) -> str:
    """Return the name of the status an RPC was aborted with."""
    number: Any = context.code()
    return next((code.name for code in grpc.StatusCode if code is number or code.value[0] == number), "UNKNOWN")


def _wrap(
    handler: Handler, around: Callable[[Behaviour, Any, Context], Awaitable[Any]], reads: Callable[[bytes], Any] | None
) -> Handler:
    """Return a handler of the same kind that runs `around` the given one; streams are written by it, never yielded."""
    # For gRPC each takes a stream of messages, of which one is read where there is one: gRPC calls the handler of a message when
    # that is there, and where the caller is gone by then not at all, so that nobody would count the call.
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    if handler.request_streaming:
        inner: Any = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
    behaviour = _as_writer(inner) if isasyncgenfunction(inner) else inner
    has_one = not handler.request_streaming

    async def wrapped(requests: Any, context: Context) -> Any:
        return await around(behaviour, None if has_one else requests, context)

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


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every RPC of nobody who is known, unknown methods too, before its message is read; probes need no caller.

    Certificates are not told here: where one would do, an RPC without a token is let through to where they are, which is still
    before its message is read.
    """

    def __init__(self, callers: Callers, methods: Methods = OWN_METHODS) -> None:
        """Let these call.

        Args:
            callers: Who may; may change.
            methods: How calls of RPCs are treated.
        """
        self._callers = callers
        self._methods = methods
        # A stream on both sides fits every kind of RPC: it takes no message before it answers.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
        self._unknown: Handler = grpc.stream_stream_rpc_method_handler(_say_unknown)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler, or one that refuses."""
        if self._methods.get(handler_call_details.method, OTHER).is_probe:
            return await continuation(handler_call_details)
        caller = self._callers.by_token(handler_call_details.invocation_metadata)
        if caller is None and not self._callers.has_certificates:
            return self._refusal
        current_caller.set(caller)
        handler = await continuation(handler_call_details)
        return self._unknown if handler is None and caller is None else handler


async def _refuse(_: Any, context: Context) -> NoReturn:
    raise Unauthenticated("authorization: a bearer token that this server knows is needed")


async def _say_unknown(_: Any, context: Context) -> NoReturn:
    """Say what gRPC itself would of a method that is not there, to somebody who turned out to be known."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
