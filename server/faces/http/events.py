"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from aiohttp import web

from dragoman.server.core.calls import Call

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
