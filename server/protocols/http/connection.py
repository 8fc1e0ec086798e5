"""aiohttp's protocol handler of a connection, with limits on received data and our error responses."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from dragoman.server.errors import ServiceError
from dragoman.server.protocols.http.responses import HttpRefusal

# Between probes of a half-closed connection.
PROBE_SECONDS = 0.1


class Connection(web.RequestHandler):
    """A connection; errors never quote an unreadable request, which may hold a token."""

    __slots__ = ("_max_request_bytes", "_num_bytes", "_refuse")

    def __init__(
        self, server: web.Server, refuse: Callable[[ServiceError], web.Response], max_request_bytes: int, **options: Any
    ) -> None:
        """Create the handler; `max_request_bytes` limits a request on the wire, framing included; `options` are aiohttp's."""
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._refuse, self._max_request_bytes, self._num_bytes = refuse, max_request_bytes, 0

    def data_received(self, data: bytes) -> None:
        """Process bytes; abort a connection that sends too many.

        aiohttp stops reading if much data follows a running request, and would not notice that the client leaves. Chunk extensions
        have no limit of their own.
        """
        num_requests = self._request_count
        super().data_received(data)
        self._num_bytes = len(data) + (self._num_bytes if self._request_count == num_requests else 0)
        is_behind = len(self._messages) + self._request_in_progress > 1
        is_full = self._buffer_paused or (self._reading_paused and is_behind) or self._num_bytes > self._max_request_bytes
        if is_full and self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's closes the connection
        """Return whether to keep a half-closed connection: whole requests are pending, no response has begun, and no TLS."""
        request = self._current_request  # within a response no probe can be sent; TLS closes both sides
        has_begun = request is not None and request.writer.output_size > 0
        is_kept = self._has_whole_requests and not has_begun and self.ssl_context is None
        if is_kept:
            self._probe()
        return is_kept

    def _probe(self) -> None:
        """Send an interim response, which clients ignore; a client that has left resets the connection."""
        request = self._current_request
        if self.transport is None:
            return
        if not self._has_whole_requests or (request is not None and request.version < HttpVersion11):
            self.force_close()
            return
        if request is not None and request.writer.output_size == 0:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._loop.call_later(PROBE_SECONDS, self._probe)

    @property
    def _has_whole_requests(self) -> bool:
        """Whether all pending requests, at least one, are complete."""
        request = self._current_request
        last = self._messages[-1][1] if self._messages else None if request is None else request.content
        # `_waiter is None` covers a request between queue and task, which is in neither field.
        return (bool(self._messages) or self._waiter is None) and (last is None or last.is_eof())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; replace aiohttp's errors, which may quote the request."""
        if isinstance(resp, web.HTTPException):
            resp = self.handle_error(request, resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the response to an unreadable request or a failure outside a call, and close the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        # aiohttp quotes an unknown expectation, and fails if it cannot be encoded.
        if isinstance(exc, UnicodeEncodeError) and "Expect" in request.headers:
            status = HTTPStatus.EXPECTATION_FAILED
        what = "the request cannot be read as HTTP/1.1" if status < 500 else HTTPStatus(status).phrase
        response = self._refuse(HttpRefusal(status, what))
        response.force_close()
        return response
