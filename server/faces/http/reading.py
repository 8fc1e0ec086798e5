"""How requests over HTTP are read: bodies as large as they may be, in the time they may take, and how long the caller waits."""

import asyncio
import json
import re
import zlib
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.faces.http.statuses import HttpRefusal

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
