"""HTTP requests: endpoints, the context of a request, and body reading within size and time limits."""

import asyncio
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from aiohttp import web

from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.protocols.http.responses import ErrorFormat, HttpRefusal
from dragoman.server.protocols.tls import printable
from dragoman.server.service.context import Call
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.sentences import on_thread

T = TypeVar("T")

ID_KEY, TIMEOUT_KEY = "X-Request-Id", "Grpc-Timeout"
# Time limit to receive a body; deadlines may be shorter.
BODY_SECONDS = 30.0
# zlib window bits per Content-Encoding.
WINDOW_BITS = {"gzip": 31, "deflate": 15}
# X-Accel-Buffering: proxies must not buffer events.
EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
# Certificate names that identify a client; an IP address does not.
_NAMES = ("DNS", "URI", "email")
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(slots=True)
class Exchange:
    """A request and its response."""

    http: web.Request
    call: Call
    metadata: list[tuple[str, str | bytes]]  # headers, names in lower case
    message: Any = None  # the decoded body
    timeout_seconds: float | None = None  # the caller's deadline, from arrival
    is_operator: bool = False
    events: web.StreamResponse | None = None  # set once an event was sent

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds until the caller's deadline; None for none."""
        return None if self.timeout_seconds is None else self.timeout_seconds - (time.monotonic() - self.call.arrival)

    async def send_event(self, data: str, name: str = "") -> web.StreamResponse:
        """Send a server-sent event, the first with the response's headers; raise `ConnectionError` if the caller has left."""
        assert "\n" not in data and "\r" not in data
        if self.events is None:
            self.events = web.StreamResponse(headers={**EVENT_HEADERS, ID_KEY: self.call.request_id})
            await self.events.prepare(self.http)
        event = f"event: {name}\n" if name else ""
        await self.events.write(f"{event}data: {data}\n\n".encode())
        return self.events


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and path with their handler."""

    method: str
    path: str
    handler: Callable[[Exchange], Awaitable[web.StreamResponse]]
    errors: ErrorFormat
    read: Callable[[web.Request, bytes], Awaitable[Any]] | None = None  # decodes the body; None for no body
    is_upload: bool = False  # the handler reads the body, which may be larger than messages
    access: Literal["callers", "operators", "both"] = "callers"
    is_counted: bool = False  # in the request metrics
    is_awaited: bool = True  # a drain waits for its calls
    is_open: bool = False  # needs no token, but identifies the caller
    has_items: bool = False  # its calls consist of requests with their own records
    api_key: Callable[[Any], str] | None = None  # returns the token in a decoded body, empty for none; a header takes precedence


def peer_names(request: web.Request) -> Sequence[str]:
    """Return the printable names in the client's verified certificate: DNS names, URIs, e-mail addresses."""
    certificate = request.get_extra_info("peercert") or {}
    alternatives = certificate.get("subjectAltName", ())
    if alternatives:  # the common name counts only without alternative names
        names = [value for kind in _NAMES for own, value in alternatives if own == kind]
    else:
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return printable(names)


def timeout_of(request: web.Request) -> float | None:
    """Return the caller's deadline in seconds, None for none; raise `InvalidRequest` if the header is malformed."""
    value = request.headers.get(TIMEOUT_KEY)
    if value is None:
        return None
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidRequest(TIMEOUT_KEY, "is a number of at most eight digits and a unit: H, M, S, m, u or n, as in 1500m")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def check_content_type(request: web.Request, *kinds: str) -> None:
    """Raise `HttpRefusal` unless the body has one of these media types."""
    # Browsers send text and forms, but not JSON, to other origins without a preflight.
    if request.content_type not in kinds or "Content-Type" not in request.headers:
        raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: {' or '.join(kinds)} is read, and nothing else")


async def run_by_size(num_bytes: int, work: Callable[..., T], *arguments: object) -> T:
    """Run work on `num_bytes` bytes, on a thread if they are many."""
    return await on_thread(work, *arguments) if num_bytes > LARGE_BYTES else work(*arguments)


class BodyReader:
    """Reads bodies of at most `max_bytes`, decompressed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def size(self, request: web.Request) -> int:
        """Return the bytes to reserve, the maximum if compressed or of unknown size; raise `HttpRefusal` for a body too large."""
        size = request.content_length
        if size is not None and size > self._max_bytes:
            raise self._too_large()
        if size is None or "Content-Encoding" in request.headers:
            return self._max_bytes if request.can_read_body else 0
        return size

    async def read(self, request: web.Request, seconds: float | None, limit: str) -> bytes:
        """Return the whole body, decompressed, within `seconds`; `limit` names the server's limit that set these, if one did.

        Raises:
            HttpRefusal: If the body is too large, too slow, or has an unsupported encoding.
            DeadlineExceeded: If the deadline passes first.
        """
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity" and encoding not in WINDOW_BITS:
            message = f"Content-Encoding: {' or '.join(WINDOW_BITS)} is read, and nothing else"
            raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        inflater = zlib.decompressobj(WINDOW_BITS[encoding]) if encoding in WINDOW_BITS else None
        body, num_read = bytearray(), 0
        allowed = BODY_SECONDS if seconds is None else min(seconds, BODY_SECONDS)
        try:
            async with asyncio.timeout(allowed):
                async for part in request.content.iter_any():
                    num_read += len(part)
                    body += part if inflater is None else inflater.decompress(part, self._max_bytes + 1 - len(body))
                    if max(len(body), num_read) > self._max_bytes:
                        raise self._too_large()
            if inflater is not None and (not inflater.eof or inflater.unused_data):
                raise zlib.error("it ends too early or too late")
        except (web.RequestPayloadError, zlib.error):
            raise HttpRefusal(HTTPStatus.BAD_REQUEST, "the body cannot be read: it is not what its headers say") from None
        except TimeoutError:
            if allowed == BODY_SECONDS:
                raise HttpRefusal(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_SECONDS:g} s") from None
            whose = f"the server's deadline ({limit} seconds)" if limit else "the deadline"
            raise DeadlineExceeded(f"{whose} passed before the request came") from None
        return bytes(body)

    def _too_large(self) -> HttpRefusal:
        return HttpRefusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {self._max_bytes} bytes, max_message_bytes of the server"
        )
