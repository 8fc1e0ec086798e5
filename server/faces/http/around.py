"""What happens around every request over HTTP that the core serves, as the core has it for all faces."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

from aiohttp import web

from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.core.deadlines import NO_DEADLINES
from dragoman.server.errors import Cancelled, ServiceError
from dragoman.server.faces.counted import Counted
from dragoman.server.faces.http.exchange import Endpoint, Exchange, Manner
from dragoman.server.faces.http.peers import owner_of, peer_names
from dragoman.server.faces.http.reading import Bodies, timeout_of

ID_KEY = "X-Request-Id"

Metadata = list[tuple[str, str | bytes]]


def own_ending(error: BaseException) -> str | None:
    """Name the status that stands for a caller who left: aiohttp cancels what answers it, or finds out when it writes."""
    is_gone = isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError)
    return Cancelled.code if is_gone else None


class Around:
    """Accompanies requests from their arrival to their end."""

    def __init__(self, core: Core, bodies: Bodies) -> None:
        """Put every request among the core's calls.

        Args:
            core: What answers.
            bodies: What reads them.
        """
        self._core, self._calls, self._bodies = core, core.calls, bodies

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
        metadata: Metadata = [(key.lower(), value) for key, value in request.headers.items()]
        names = partial(peer_names, request)
        problem: ServiceError | None = None
        is_open = endpoint.is_open
        if self._is_read(endpoint, call, metadata, names):
            try:
                await self._read(endpoint, exchange, around)
                metadata += _key_in(endpoint, exchange)
            except ServiceError as error:
                problem = error
                # Whose it is stands in what could not be read; that it could not is what helps whoever sent it.
                is_open = is_open or (endpoint.key_of is not None and call.caller is None)
            except (asyncio.CancelledError, ConnectionError):  # gone before all of it came
                self._calls.records.finish(call, Cancelled.code)
                raise
        if isinstance(exchange.message, Counted) and len(exchange.message) > 1:
            call.has_items = True
        try:
            with self._calls.serving(
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

    def _is_read(self, endpoint: Endpoint, call: Call, metadata: Metadata, names: Callable[[], Iterable[str]]) -> bool:
        """Return whether a request is to be read, which it is by whoever is known, or may become known by it."""
        if endpoint.key_of is not None and all(key != "authorization" for key, _ in metadata):
            return True
        if self._calls.is_known(call, metadata, names):
            return True
        if endpoint.is_open:
            call.caller = None
        return endpoint.is_open

    async def _read(self, endpoint: Endpoint, exchange: Exchange, around: ExitStack) -> None:
        """Read what a request says.

        Raises:
            ServiceError: If it cannot be read.
        """
        call, request = exchange.call, exchange.http
        exchange.timeout_seconds = timeout_of(request)
        if endpoint.read is None:
            return
        around.enter_context(self._bodies.room(request, owner_of(call, request)))
        deadlines = self._core.generation.deadlines(call)
        seconds, limit = exchange.remaining_seconds, ""
        if deadlines != NO_DEADLINES:
            seconds, limit = deadlines.time_left(call.arrival, seconds)
        exchange.message = await endpoint.read(request, await self._bodies.read(request, seconds, limit))


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
