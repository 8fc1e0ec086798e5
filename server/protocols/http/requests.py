"""Reading of HTTP requests: bodies within bounds of size and time."""

import asyncio
import json
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from dragoman.server.errors import DeadlineExceeded, InvalidRequest, ServiceError
from dragoman.server.protocols.http.responses import EventStream, HttpRefusal
from dragoman.server.service.context import Call

# Kinds of names that say who a client is, as Python's ssl has them; an address says only where somebody was.
_NAMES = ("DNS", "URI", "email")


def owner_of(call: Call, request: web.Request) -> str:
    """Return whose a request is, for what is shared out: its caller or, where callers are not known, its address."""
    return (request.remote or "") if call.caller is None else call.caller.name


def peer_names(request: web.Request) -> Sequence[str]:
    """Return the names in the certificate that the client has shown and the connection has verified.

    Returns:
        Its subject alternative names: DNS names, URIs, then e-mail addresses. The subject's common name only where it has no
        alternative names of any kind, addresses included. Empty without a certificate. Names that are not printable are left out.
    """
    shown = request.get_extra_info("peercert") or {}
    alternatives = shown.get("subjectAltName", ())
    if alternatives:
        names = [value for kind in _NAMES for own, value in alternatives if own == kind]
    else:
        names = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
    return tuple(name for name in names if name and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name)


@dataclass(slots=True)
class Exchange:
    """See above.

    Attributes:
        http: The request as it came.
        call: Its record.
        message: What its body says, as the endpoint reads it.
        timeout_seconds: How long it may take, by its caller; None where that was not said.
        events: What is sent instead of one answer, once something is.
        is_operator: Whether whose it is may administer.
    """

    http: web.Request
    call: Call
    message: Any
    timeout_seconds: float | None = None
    events: EventStream | None = field(default=None)
    is_operator: bool = False

    @property
    def remaining_seconds(self) -> float | None:
        """Time until the caller's deadline; None if there is none."""
        return None if self.timeout_seconds is None else self.timeout_seconds - (time.monotonic() - self.call.arrival)

    def stream(self) -> EventStream:
        """Return what sends events; whatever goes wrong from now on is told as the last of them, if any was sent."""
        self.events = EventStream(self.http, self.call)
        return self.events


class Manner(Protocol):
    """How a protocol that HTTP carries says what went wrong."""

    def refuse(self, error: ServiceError, request_id: str) -> web.Response:
        """Return the answer to a request that has none."""
        ...

    def error_event(self, error: ServiceError, request_id: str) -> tuple[str, str]:
        """Return name and data of the event that ends a stream which has begun."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path, and what is behind them.

    Attributes:
        method: `GET` or `POST`.
        path: As aiohttp has it, with parts in braces.
        answer: Answers.
        read: Makes a message of a body; None where there is none. What it raises is told to the caller.
        is_counted: Whether the metrics know of it: it is there to generate or to score.
        is_awaited: Whether a drain waits for it.
        is_open: Whether anybody may ask; who is known all the same is the caller.
        has_items: Whether it stands for several requests, each of which has a record of its own.
        key_of: Returns the caller's token where a body says it; empty for none. A header's goes first.
    """

    method: str
    path: str
    answer: Callable[[Exchange], Awaitable[web.StreamResponse]]
    read: Callable[[web.Request, bytes], Awaitable[Any]] | None = None
    is_counted: bool = False
    is_awaited: bool = True
    is_open: bool = False
    has_items: bool = False
    key_of: Callable[[Any], str] | None = None


Kind = TypeVar("Kind")

# For a body to come; a caller's deadline, or the server's, may be shorter.
BODY_SECONDS = 30.0
# Of zlib, by encodings of bodies.
WINDOW_BITS = {"gzip": 31, "deflate": 15}
MAX_REASON_CHARACTERS = 200
# As gRPC writes it and grpc-gateway reads it: a number of at most eight digits, and a unit.
TIMEOUT_KEY = "Grpc-Timeout"
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def timeout_of(request: web.Request) -> float | None:
    """Return how many seconds a request may take, by its caller; None where it does not say.

    Raises:
        InvalidRequest: If what it says is no time.
    """
    said = request.headers.get(TIMEOUT_KEY)
    if said is None:
        return None
    match = _TIMEOUT.fullmatch(said)
    if match is None:
        raise InvalidRequest(TIMEOUT_KEY, "is a number of at most eight digits and a unit: H, M, S, m, u or n, as in 1500m")
    number, unit = match.groups()
    return int(number) * _UNIT_SECONDS[unit]


def check_kind(request: web.Request, *kinds: str) -> None:
    """Do nothing if a body is of a kind that is read.

    Raises:
        HttpRefusal: If it is of another.
    """
    # Whoever's page a browser shows may have it send text and forms to anybody, but not JSON, without asking first.
    if request.content_type not in kinds or "Content-Type" not in request.headers:
        raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: {' or '.join(kinds)} is read, and nothing else")


def one_line(what: object) -> str:
    """Return the first line of what is to be said of a body, or as much of it as is worth saying."""
    line = " ".join(str(what).partition("\n")[0].split())
    return line if len(line) <= MAX_REASON_CHARACTERS else line[:MAX_REASON_CHARACTERS] + "..."


def decode(body: bytes | memoryview, kind: type[Kind]) -> Kind:
    """Return the content of a JSON document.

    Raises:
        InvalidRequest: If it is no JSON or not of this kind, or has a key twice in an object.
    """
    try:
        told = msgspec.json.decode(body, type=kind)
        json.loads(bytes(body), object_pairs_hook=_check_keys, parse_int=str, parse_float=str)  # msgspec takes the last of two keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", f"cannot be read: {one_line(error)}") from None
    except RecursionError:
        raise InvalidRequest("body", "cannot be read: too many brackets within each other") from None
    return told


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequest(one_line(key), "is given twice")
        seen.add(key)


class Bodies:
    """Reads bodies."""

    def __init__(self, max_bytes: int) -> None:
        """Read bodies of at most so many bytes."""
        self._max_bytes = max_bytes

    def size(self, request: web.Request) -> int:
        """Return the bytes that a body counts for; one whose size is not told, or that is compressed, counts as the largest.

        Raises:
            HttpRefusal: If it is larger than bodies may be.
        """
        told = request.content_length
        if told is not None and told > self._max_bytes:
            raise self._too_large()
        if told is not None and "Content-Encoding" not in request.headers:
            return told
        return self._max_bytes if request.can_read_body else 0

    async def read(self, request: web.Request, seconds: float | None, limit: str) -> bytes:
        """Return a body, decompressed, when all of it has come.

        Args:
            request: Whose it is.
            seconds: How long it may take; None for as long as any.
            limit: Name of the server's own deadline, if that is what leaves so many.

        Raises:
            HttpRefusal: If it is larger than bodies may be, takes longer than any may, or is compressed as is not read.
            DeadlineExceeded: If it takes longer than this one may.
        """
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity" and encoding not in WINDOW_BITS:
            message = f"Content-Encoding: {' or '.join(WINDOW_BITS)} is read, and nothing else"
            raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        inflater = zlib.decompressobj(WINDOW_BITS[encoding]) if encoding in WINDOW_BITS else None
        body, num_read = bytearray(), 0
        own = BODY_SECONDS if seconds is None else min(seconds, BODY_SECONDS)
        try:
            async with asyncio.timeout(own):
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
            if own == BODY_SECONDS:
                raise HttpRefusal(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_SECONDS:g} s") from None
            whose = f"the server's deadline ({limit} seconds)" if limit else "the deadline"
            raise DeadlineExceeded(f"{whose} passed before the request came") from None
        return bytes(body)

    def _too_large(self) -> HttpRefusal:
        return HttpRefusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {self._max_bytes} bytes, max_message_bytes of the server"
        )
