"""What speaks HTTP on one connection: aiohttp's own, but for what it says of requests that it cannot read."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

from dragoman.server.errors import ServiceError
from dragoman.server.faces.http.statuses import HttpRefusal

# Between signs to a client that has ended its side of a connection.
PROBE_SECONDS = 0.1

Refuse = Callable[[ServiceError, str], web.Response]


class Speaking(web.RequestHandler):
    """Speaks on a connection. What it cannot read it refuses without showing it, for a token may be part of it."""

    __slots__ = ("_max_request_bytes", "_num_bytes", "_refuse")

    def __init__(self, server: web.Server, refuse: Refuse, max_request_bytes: int, **options: Any) -> None:
        """Speak for a server.

        Args:
            server: It.
            refuse: Makes the answer to what cannot be read.
            max_request_bytes: Of a request on the wire, with all that is around its body.
            options: aiohttp's, as for its own.
        """
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._refuse, self._max_request_bytes, self._num_bytes = refuse, max_request_bytes, 0

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and end a connection that sends too many.

        The close of a connection that aiohttp stops reading behind a request in hand would not be seen. Chunk extensions may go on
        for ever and are no part of a body.
        """
        num_requests = self._request_count
        super().data_received(data)
        self._num_bytes = len(data) + (self._num_bytes if self._request_count == num_requests else 0)
        is_behind = len(self._messages) + self._request_in_progress > 1
        is_full = self._buffer_paused or (self._reading_paused and is_behind) or self._num_bytes > self._max_request_bytes
        if is_full and self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's closes the connection
        """Return whether requests are still answered: the client may have ended its own side alone, after all that it sends.

        Not if an answer has begun, in which nothing can be sent to see whether the client is there; TLS ends both sides.
        """
        request = self._current_request
        has_begun = request is not None and request.writer.output_size > 0
        is_answered = self._is_answered and not has_begun and self.ssl_context is None
        if is_answered:
            self._probe()
        return is_answered

    def _probe(self) -> None:
        """Send what a client skips: one that has left resets the connection, which is seen when the next bytes are sent."""
        request = self._current_request
        if self.transport is None:
            return
        if not self._is_answered or (request is not None and request.version < HttpVersion11):
            self.force_close()
            return
        if request is not None and request.writer.output_size == 0:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._loop.call_later(PROBE_SECONDS, self._probe)

    @property
    def _is_answered(self) -> bool:
        """Whether there are requests, of which all has come; one on its way from the queue to its task is known by neither."""
        request = self._current_request
        last = self._messages[-1][1] if self._messages else None if request is None else request.content
        return (bool(self._messages) or self._waiter is None) and (last is None or last.is_eof())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; an error of aiohttp's own, which may repeat what it refuses, is told as what cannot be read is."""
        if isinstance(resp, web.HTTPException):
            resp = self.handle_error(request, resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to what is no request, or went wrong outside of any call; the connection is closed after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        # aiohttp shows an expectation that it does not know, and fails where it is no text.
        if isinstance(exc, UnicodeEncodeError) and "Expect" in request.headers:
            status = HTTPStatus.EXPECTATION_FAILED
        what = "the request cannot be read as HTTP/1.1" if status < 500 else HTTPStatus(status).phrase
        response = self._refuse(HttpRefusal(status, what), "")
        response.force_close()
        return response
