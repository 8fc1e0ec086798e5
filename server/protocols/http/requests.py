"""HTTP requests: endpoints, the context of one request, and reading of bodies within bounds of size and time."""

import asyncio
import json
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
from aiohttp import web

from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.protocols.http.responses import ErrorFormat, HttpRefusal
from dragoman.server.service.context import Call
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.sentences import on_thread

T = TypeVar("T")

ID_KEY, TIMEOUT_KEY = "X-Request-Id", "Grpc-Timeout"
# Until a whole body has come; the deadline of the caller or of the server may be shorter.
BODY_SECONDS = 30.0
# Window bits of zlib for each encoding of bodies.
WINDOW_BITS = {"gzip": 31, "deflate": 15}
MAX_REASON_CHARACTERS = 200
# X-Accel-Buffering: proxies must not collect the events of a stream.
EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
# Names in a certificate that identify a client; an address does not.
_NAMES = ("DNS", "URI", "email")
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(slots=True)
class Exchange:
    """A request and its response.

    Attributes:
        http: The request as aiohttp has it.
        call: Its id, caller and access log line.
        metadata: Its headers, with names in lower case.
        message: Its body, decoded.
        timeout_seconds: Deadline of the caller, from the arrival; None for none.
        is_operator: Whether the caller is an operator.
        events: The event stream, once an event was sent.
    """

    http: web.Request
    call: Call
    metadata: list[tuple[str, str | bytes]]
    message: Any = None
    timeout_seconds: float | None = None
    is_operator: bool = False
    events: web.StreamResponse | None = None

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the caller's deadline; None for none."""
        return None if self.timeout_seconds is None else self.timeout_seconds - (time.monotonic() - self.call.arrival)

    @property
    def owner(self) -> str:
        """Name of the caller or, without callers, its address: shares of what is in flight are counted by it."""
        return (self.http.remote or "") if self.call.caller is None else self.call.caller.name

    async def send_event(self, data: str, name: str = "") -> web.StreamResponse:
        """Send a server-sent event; the first one begins the response, so that errors before it have their own status.

        Raises:
            ConnectionError: If the caller is gone.
        """
        assert "\n" not in data and "\r" not in data
        if self.events is None:
            self.events = web.StreamResponse(headers={**EVENT_HEADERS, ID_KEY: self.call.request_id})
            await self.events.prepare(self.http)
        event = f"event: {name}\n" if name else ""
        await self.events.write(f"{event}data: {data}\n\n".encode())
        return self.events


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path with their handler.

    Attributes:
        method: `GET` or `POST`.
        path: Path pattern of aiohttp.
        handler: Returns the response.
        errors: Error format.
        read: Decodes the body; None for no body.
        access: Whose tokens are accepted.
        is_counted: Whether the request metrics count it: it generates or scores.
        is_awaited: Whether a drain waits for it.
        is_open: Whether no token is needed; the caller is identified all the same.
        has_items: Whether its requests have records of their own.
        api_key: Returns the token in a decoded body, empty for none; one in a header goes first.
    """

    method: str
    path: str
    handler: Callable[[Exchange], Awaitable[web.StreamResponse]]
    errors: ErrorFormat
    read: Callable[[web.Request, bytes], Awaitable[Any]] | None = None
    access: Literal["callers", "operators", "both"] = "callers"
    is_counted: bool = False
    is_awaited: bool = True
    is_open: bool = False
    has_items: bool = False
    api_key: Callable[[Any], str] | None = None


def peer_names(request: web.Request) -> Sequence[str]:
    """Return the names in the client's verified certificate: its DNS names, URIs and e-mail addresses.

    The common name counts only without any alternative name. Names that are not printable are left out.
    """
    certificate = request.get_extra_info("peercert") or {}
    alternatives = certificate.get("subjectAltName", ())
    if alternatives:
        names = [value for kind in _NAMES for own, value in alternatives if own == kind]
    else:
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return tuple(name for name in names if name and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name)


def timeout_of(request: web.Request) -> float | None:
    """Return the caller's deadline in seconds, None for none.

    Raises:
        InvalidRequest: If the header is malformed.
    """
    value = request.headers.get(TIMEOUT_KEY)
    if value is None:
        return None
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidRequest(TIMEOUT_KEY, "is a number of at most eight digits and a unit: H, M, S, m, u or n, as in 1500m")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def check_content_type(request: web.Request, *kinds: str) -> None:
    """Raise `HttpRefusal` unless the body has one of these media types.

    A browser sends text and forms of any page to any origin without a preflight, but not JSON.
    """
    if request.content_type not in kinds or "Content-Type" not in request.headers:
        raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: {' or '.join(kinds)} is read, and nothing else")


def one_line(reason: object) -> str:
    """Return the first line of a reason, shortened."""
    line = " ".join(str(reason).partition("\n")[0].split()).encode(errors="backslashreplace").decode()
    return line if len(line) <= MAX_REASON_CHARACTERS else line[:MAX_REASON_CHARACTERS] + "..."


def decode_json(body: bytes | memoryview, kind: type[T]) -> T:
    """Return the content of a JSON document; msgspec alone would accept a key twice.

    Raises:
        InvalidRequest: If it is malformed, not of this type, or has a key twice in an object.
    """
    try:
        text = str(body, "utf-8")
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # raises for a lone one
        return msgspec.convert(content, kind)
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidRequest("body", f"cannot be read: {one_line(error)}") from None
    except RecursionError:
        raise InvalidRequest("body", "cannot be read: too many brackets within each other") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        unseen = dict(pairs)
        twice = next(key for key, _ in pairs if unseen.pop(key, pairs) is pairs)
        raise InvalidRequest(one_line(twice), "is given twice")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def run_by_size(num_bytes: int, work: Callable[..., T], *arguments: object) -> T:
    """Return the result of work on so many bytes: on a thread where they are many."""
    return await on_thread(work, *arguments) if num_bytes > LARGE_BYTES else work(*arguments)


class BodyReader:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def size(self, request: web.Request) -> int:
        """Return the bytes to reserve for a body: the largest for one that is compressed or of unknown size.

        Raises:
            HttpRefusal: If it is larger than allowed, before anything is read.
        """
        size = request.content_length
        if size is not None and size > self._max_bytes:
            raise self._too_large()
        if size is None or "Content-Encoding" in request.headers:
            return self._max_bytes if request.can_read_body else 0
        return size

    async def read(self, request: web.Request, seconds: float | None, limit: str) -> bytes:
        """Return the whole body, decompressed.

        Args:
            request: The request.
            seconds: Time until its deadline; None for none.
            limit: Name of the server's limit that set the deadline, if one did.

        Raises:
            HttpRefusal: If it is too large, too slow for any body, or compressed in another way.
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
