"""What happens around every request over HTTP that the core serves, as the core has it for all faces."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

from aiohttp import web

from dragoman.server.errors import Cancelled, ServiceError
from dragoman.server.protocols.bulk import BulkEnvelope
from dragoman.server.protocols.http.requests import Bodies, Endpoint, Exchange, Manner, owner_of, peer_names, timeout_of
from dragoman.server.service.callers import NO_DEADLINES
from dragoman.server.service.context import Call
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.running import RunningCalls
from dragoman.server.service.service import Core

ID_KEY = "X-Request-Id"

Metadata = list[tuple[str, str | bytes]]


def own_ending(error: BaseException) -> str | None:
    """Name the status that stands for a caller who left: aiohttp cancels what answers it, or finds out when it writes."""
    is_gone = isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError)
    return Cancelled.code if is_gone else None


class Around:
    """Accompanies requests from their arrival to their end."""

    def __init__(self, core: Core, bodies: Bodies, operators: RunningCalls | None = None, *, is_for_all: bool = True) -> None:
        """Put every request among the core's calls, or those of operators among theirs.

        Args:
            core: What answers.
            bodies: What reads them.
            operators: Their calls, where the endpoints are for them; None where an operator is nobody in particular.
            is_for_all: Whether the endpoints are for others, too.
        """
        self._core, self._bodies = core, bodies
        self._operators, self._is_for_all = operators, is_for_all

    async def serve(self, endpoint: Endpoint, manner: Manner, request: web.Request) -> web.StreamResponse:
        """Answer one request; aiohttp still has to send what this returns.

        Args:
            endpoint: What it is for.
            manner: How its protocol says what went wrong.
            request: It.
        """
        call = Call.begin(
            f"{endpoint.method} {endpoint.path}",
            is_counted=endpoint.is_counted,
            has_items=endpoint.has_items,
            is_awaited=endpoint.is_awaited,
        )
        exchange = Exchange(request, call, None)
        exchange.is_operator = self._is_operators(request)
        with ExitStack() as around:
            response = await self._serve(endpoint, manner, exchange, around)
        if self._core.is_draining:
            response.force_close()
        if not response.prepared:
            response.headers[ID_KEY] = call.request_id
        return response

    async def _serve(self, endpoint: Endpoint, manner: Manner, exchange: Exchange, around: ExitStack) -> web.StreamResponse:
        """Read a request and answer it; `around` keeps its room until it has its answer."""
        call, request = exchange.call, exchange.http
        calls = self._calls(exchange)
        metadata, names = _metadata(request), partial(peer_names, request)
        problem: ServiceError | None = None
        is_open = endpoint.is_open
        if _is_read(endpoint, calls, call, metadata, names):
            try:
                await self._read(endpoint, exchange, around)
                metadata += _key_in(endpoint, exchange)
            except ServiceError as error:
                problem = error
                # Whose it is stands in what could not be read; that it could not is what helps whoever sent it.
                is_open = is_open or (endpoint.key_of is not None and call.caller is None)
            except (asyncio.CancelledError, ConnectionError):  # gone before all of it came
                calls.records.finish(call, Cancelled.code)
                raise
        if isinstance(exchange.message, BulkEnvelope) and len(exchange.message) > 1:
            call.has_items = True
        if call.has_items and call.window is None:
            call.window = around.enter_context(self._core.in_flight.window(owner_of(call, request)))
        try:
            with calls.serving(
                call,
                metadata,
                getattr(exchange.message, "request_id", ""),
                names=names,
                own_ending=own_ending,
                is_sent_later=True,
                is_open=is_open,
            ):
                if problem is not None:
                    raise problem
                return await endpoint.answer(exchange)
        except ServiceError as error:
            return await _tell(manner, exchange, error)

    def _is_operators(self, request: web.Request) -> bool:
        """Return whether a request is an operator's, as far as that makes a difference to its endpoint."""
        if self._operators is None or self._operators.callers is None:
            return False
        return not self._is_for_all or self._operators.callers.find(_metadata(request), peer_names(request)) is not None

    def _calls(self, exchange: Exchange) -> RunningCalls:
        """Return the calls that a request is one of."""
        return self._operators if exchange.is_operator and self._operators is not None else self._core.calls

    async def _read(self, endpoint: Endpoint, exchange: Exchange, around: ExitStack) -> None:
        """Read what a request says.

        Raises:
            ServiceError: If it cannot be read.
        """
        call, request = exchange.call, exchange.http
        exchange.timeout_seconds = timeout_of(request)
        if endpoint.read is None:
            return
        if (num_bytes := self._bodies.size(request)) > LARGE_BYTES:
            call.window = around.enter_context(self._core.in_flight.window(owner_of(call, request), num_bytes))
        deadlines = self._core.generation.deadlines(call)
        seconds, limit = exchange.remaining_seconds, ""
        if deadlines != NO_DEADLINES:
            seconds, limit = deadlines.time_left(call.arrival, seconds)
        exchange.message = await endpoint.read(request, await self._bodies.read(request, seconds, limit))


def _metadata(request: web.Request) -> Metadata:
    return [(key.lower(), value) for key, value in request.headers.items()]


def _is_read(endpoint: Endpoint, calls: RunningCalls, call: Call, metadata: Metadata, names: Callable[[], Iterable[str]]) -> bool:
    """Return whether a request is to be read, which it is by whoever is known, or may become known by it."""
    if endpoint.key_of is not None and all(key != "authorization" for key, _ in metadata):
        return True
    if calls.is_known(call, metadata, names):
        return True
    if endpoint.is_open:
        call.caller = None
    return endpoint.is_open


def _key_in(endpoint: Endpoint, exchange: Exchange) -> Metadata:
    """Return the token that a request's body says, as a header would have it; nothing where it is known whose the request is."""
    key = "" if endpoint.key_of is None or exchange.call.caller is not None else endpoint.key_of(exchange.message)
    return [("authorization", f"Bearer {key}")] if key else []


async def _tell(manner: Manner, exchange: Exchange, error: ServiceError) -> web.StreamResponse:
    """Say what went wrong: in an answer of its own, or as the last event of a stream that has begun."""
    request_id = exchange.call.request_id
    if exchange.events is None or exchange.events.response is None:
        return manner.refuse(error, request_id)
    name, data = manner.error_event(error, request_id)
    return await exchange.events.send(data, name)
