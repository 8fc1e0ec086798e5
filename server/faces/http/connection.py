"""A connection over HTTP: what is said on it to whoever sends what cannot be read as a request."""

from http import HTTPStatus
from typing import Any

from aiohttp import web

from dragoman.server.faces.http.exchange import Manner
from dragoman.server.faces.http.statuses import HttpRefusal

# What is sent with every answer: what it is nobody has to guess, and nobody keeps it.
HEADERS = {"Server": "dragoman", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


class Connection(web.RequestHandler):
    """aiohttp's, but that it neither repeats what it could not read nor tells what it is made of."""

    __slots__ = ("_manner",)

    def __init__(self, server: web.Server, manner: Manner, **settings: Any) -> None:
        """Serve one connection.

        Args:
            server: What answers its requests.
            manner: How to say what is wrong.
            settings: aiohttp's.
        """
        super().__init__(server, **settings)
        self._manner = manner

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to what cannot be answered; the connection ends with it.

        Raises:
            ConnectionError: If an answer has begun already.
        """
        response = super().handle_error(request, status, exc, message)
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            response = self._manner.refuse(HttpRefusal(status, "the request cannot be read: it is not as HTTP/1.1 has it"), "")
            response.force_close()
        response.headers.update(HEADERS)
        return response
