"""HTTP statuses of errors, and server-sent events."""

import math
from http import HTTPStatus

from aiohttp import web

from dragoman.server.errors import ServiceError
from dragoman.server.service.context import Call

# As google.rpc.Code maps them, so that what stands between caller and server knows what to do: 499 is what proxies log of a caller
# that has left.
STATUSES = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
}


class HttpRefusal(ServiceError):
    """What is wrong with a request as HTTP, which has statuses of its own for it.

    Attributes:
        status: HTTP's.
        headers: That the status asks for.
    """

    code = "INVALID_ARGUMENT"
    refusal = "invalid"

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class NothingThere(HttpRefusal):
    """No endpoint has the path."""

    code = "NOT_FOUND"

    def __init__(self, instead: str = "") -> None:
        super().__init__(HTTPStatus.NOT_FOUND, f"nothing is at this path{instead and '; '}{instead}")


def status_of(error: ServiceError) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, HttpRefusal) else STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def headers_of(error: ServiceError) -> dict[str, str]:
    """Return the headers that an error's answer has: when to come back, in whole seconds, and what to show."""
    headers = dict(error.headers) if isinstance(error, HttpRefusal) else {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if error.code == "UNAUTHENTICATED":
        headers["WWW-Authenticate"] = "Bearer"
    return headers


HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    # A proxy that collects an answer before it hands it on would make one piece of them all.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """Sends events, the head of the answer with the first of them: until then an error may have a status of its own."""

    def __init__(self, request: web.Request, call: Call) -> None:
        """Send nothing yet.

        Args:
            request: What is answered.
            call: Its record.
        """
        self._request, self._call = request, call
        self._response: web.StreamResponse | None = None

    @property
    def response(self) -> web.StreamResponse | None:
        """The answer, once it has begun."""
        return self._response

    async def send(self, data: str, name: str = "") -> web.StreamResponse:
        """Send an event, when the caller takes it.

        Args:
            data: Its text, without line ends.
            name: Its name; empty for a plain message.

        Raises:
            ConnectionError: If the caller is gone.
        """
        assert "\n" not in data and "\r" not in data
        if self._response is None:
            self._response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": self._call.request_id})
            await self._response.prepare(self._request)
        event = f"event: {name}\n" if name else ""
        await self._response.write(f"{event}data: {data}\n\n".encode())
        return self._response
