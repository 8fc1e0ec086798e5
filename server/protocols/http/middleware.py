"""Endpoint middleware of the HTTP port: authentication, request context, body reading and error responses."""

import asyncio
from contextlib import ExitStack
from functools import partial

from aiohttp import web

from dragoman.server.errors import Cancelled, ServiceError
from dragoman.server.protocols.bulk import num_requests
from dragoman.server.protocols.http.origins import Origins
from dragoman.server.protocols.http.requests import ID_KEY, BodyReader, Endpoint, Exchange, peer_names, timeout_of
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.callers import NO_DEADLINES
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.in_flight import LARGE_BYTES, InFlight
from dragoman.server.service.service import Service


def own_ending(error: BaseException) -> str | None:
    """Return the status of a caller that has left: aiohttp cancelled the handler, or a write failed."""
    is_gone = isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError)
    return Cancelled.code if is_gone else None


class Middleware:
    """Serves requests as calls of the service, or of operators on their endpoints."""

    def __init__(self, service: Service, max_message_bytes: int, origins: Origins, operators: OperatorCalls | None) -> None:
        self._service, self._origins = service, origins
        self._bodies = BodyReader(max_message_bytes)
        self._unknown = InFlight(lambda: 1)  # bodies whose callers are not known yet, where callers have to be
        self._operators = None if operators is None else operators.calls

    def add(self, app: web.Application, *endpoints: Endpoint) -> None:
        """Add endpoints to an application."""
        for endpoint in endpoints:
            app.router.add_route(endpoint.method, endpoint.path, partial(self._handle, endpoint))

    async def _handle(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        call = Call.begin(
            f"{endpoint.method} {endpoint.path}",
            is_counted=endpoint.is_counted,
            has_items=endpoint.has_items,
            is_awaited=endpoint.is_awaited,
        )
        call.address = request.remote or ""
        exchange = Exchange(request, call, [(key.lower(), value) for key, value in request.headers.items()])
        calls = self._service.calls
        if self._operators is not None and self._is_for_operators(endpoint, exchange, self._operators):
            exchange.is_operator, calls = True, self._operators
        with ExitStack() as in_flight:
            response = await self._serve(endpoint, exchange, calls, in_flight)
        if self._service.is_draining:
            response.force_close()
        if not response.prepared:
            response.headers[ID_KEY] = call.request_id
        return response

    async def _serve(self, endpoint: Endpoint, exchange: Exchange, calls: RunningCalls, in_flight: ExitStack) -> web.StreamResponse:
        """Read a request and return its response; `in_flight` holds its window."""
        call, is_open = exchange.call, endpoint.is_open
        problem: ServiceError | None = None
        if _is_read(endpoint, exchange, calls):
            try:
                await self._read(endpoint, exchange, in_flight)
                if endpoint.api_key is not None and call.caller is None and (key := endpoint.api_key(exchange.message)):
                    exchange.metadata.append(("authorization", f"Bearer {key}"))
            except ServiceError as error:
                problem = error
                # The unreadable body may have the token: report the reading error, not a missing token.
                is_open = is_open or (endpoint.api_key is not None and call.caller is None)
            except (asyncio.CancelledError, ConnectionError):  # the caller left before the whole body arrived
                calls.finish(call, Cancelled.code)
                raise
            except Exception as error:
                problem = calls.fault(error)
        call.has_items = call.has_items or num_requests(exchange.message) > 1
        try:
            with calls.serving(
                call,
                exchange.metadata,
                getattr(exchange.message, "request_id", ""),
                names=partial(peer_names, exchange.http),
                own_ending=own_ending,
                is_sent_later=True,
                is_open=is_open,
            ):
                if problem is not None:
                    raise problem
                if call.has_items and call.window is None:
                    call.window = in_flight.enter_context(self._service.in_flight.window(call.owner))
                return await endpoint.handler(exchange)
        except ServiceError as error:
            if exchange.events is None:
                return endpoint.errors.response(error, call.request_id)
            return await exchange.send_event(endpoint.errors.write(error, call.request_id), endpoint.errors.event)

    def _is_for_operators(self, endpoint: Endpoint, exchange: Exchange, operators: RunningCalls) -> bool:
        if endpoint.access != "both":
            return endpoint.access == "operators"
        return operators.callers is not None and operators.callers.find(exchange.metadata, peer_names(exchange.http)) is not None

    async def _read(self, endpoint: Endpoint, exchange: Exchange, in_flight: ExitStack) -> None:
        exchange.timeout_seconds = timeout_of(exchange.http)
        if endpoint.read is None and not endpoint.is_upload:
            return
        self._origins.check(exchange.http)
        if endpoint.read is None:
            return
        call, window = exchange.call, None
        if (num_bytes := self._bodies.size(exchange.http)) > LARGE_BYTES:
            is_known = self._service.callers is None or call.caller is not None
            in_flight_bodies = self._service.in_flight if is_known else self._unknown
            window = in_flight.enter_context(in_flight_bodies.window(call.owner, num_bytes))
            call.window = window if is_known else None
        deadlines = self._service.generation.deadlines(call)
        seconds, limit = exchange.remaining_seconds, ""
        if deadlines != NO_DEADLINES:
            seconds, limit = deadlines.time_left(call.arrival, seconds)
        body = await self._bodies.read(exchange.http, seconds, limit)
        if window is not None:
            window.reserve(len(body))
        exchange.message = await endpoint.read(exchange.http, body)


def _is_read(endpoint: Endpoint, exchange: Exchange, calls: RunningCalls) -> bool:
    """Return whether to read the body: the caller is known, not required, or possibly identified by the body."""
    if endpoint.api_key is not None and all(key != "authorization" for key, _ in exchange.metadata):
        return True
    if calls.is_known(exchange.call, exchange.metadata, partial(peer_names, exchange.http)):
        return True
    if endpoint.is_open:
        exchange.call.caller = None
    return endpoint.is_open
