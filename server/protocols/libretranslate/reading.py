"""Decoding of LibreTranslate requests: JSON, forms and query arguments."""

import asyncio
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.helpers import parse_mimetype
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.http.requests import check_content_type, run_by_size
from dragoman.server.protocols.http.responses import JSON
from dragoman.server.protocols.json_text import decode_json
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.sentences import on_thread

URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
# Limit per form or query.
MAX_FIELDS = 64
# RFC 2046.
MAX_BOUNDARY_BYTES = 70
# Limit of a list `q`.
MAX_TEXTS = 1024
MAX_SHOWN_CHARACTERS = 32
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")
_TEXT_FIELDS = ("source", "target", "format", "api_key", "model")
_FIELDS = ("q", "alternatives", *_TEXT_FIELDS)

# Raise aiohttp's warnings of a malformed Content-Disposition: Python would keep their text, which is the caller's.
for _category in (aiohttp.BadContentDispositionHeader, aiohttp.BadContentDispositionParam):
    warnings.filterwarnings("error", category=_category)


class Asked(Struct, frozen=True):
    """A request; unknown fields are ignored, as in LibreTranslate."""

    texts: Sequence[str] = ()  # `q`
    is_list: bool = False  # whether `q` and the answers are lists
    source: str = ""  # language code, or `auto`
    target: str = ""
    format: str = ""
    alternatives: int = 0
    api_key: str = ""
    model: str = ""  # our extension


async def read_request(request: web.Request, body: bytes) -> Asked:
    """Decode a request; raise `InvalidRequest` if it is malformed, `HttpRefusal` for an unsupported media type."""
    kind = request.content_type
    if body or kind == JSON:
        check_content_type(request, JSON, URLENCODED, MULTIPART)
    if kind == JSON:
        return await run_by_size(len(body), read_json, body)
    if body and kind == MULTIPART:
        kind = request.headers["Content-Type"]
        is_large = len(body) > LARGE_BYTES
        pairs = await (on_thread(_read_multipart, body, kind) if is_large else read_multipart(body, kind))
    else:
        pairs = await run_by_size(len(body), read_urlencoded, body)
    return read_form([*read_urlencoded(request.rel_url.raw_query_string.encode()), *pairs])


def read_json(body: bytes) -> Asked:
    """Decode JSON; raise `InvalidRequest` if it is malformed or a field has the wrong type."""
    return _to_asked(decode_json(body, dict[str, Any]))


def _to_asked(content: Mapping[str, Any]) -> Asked:
    q = content.get("q")
    if isinstance(q, list) and len(q) > MAX_TEXTS:
        raise InvalidRequest("q", f"{len(q)} texts; at most {MAX_TEXTS} are translated at once")
    if not isinstance(q, str | list | None) or (isinstance(q, list) and not all(isinstance(text, str) for text in q)):
        raise InvalidRequest("q", "is neither a text nor a list of texts")
    fields: dict[str, Any] = {name: content[name] for name in _TEXT_FIELDS if content.get(name) is not None}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise InvalidRequest(name, "is no text")
    texts = q if isinstance(q, list) else [q] if q else []
    return Asked(texts, isinstance(q, list), alternatives=_number(content.get("alternatives")), **fields)


def read_form(pairs: Sequence[tuple[str, str]]) -> Asked:
    """Decode the fields of a form and its query; raise `InvalidRequest` if a known field is repeated or malformed."""
    content: dict[str, str] = {}
    for name, value in pairs:
        if name in _FIELDS and name in content:
            raise InvalidRequest(name, "is given more than once; a list of texts is sent as JSON")
        content[name] = value
    if "q" in content:  # browsers send forms with CRLF
        content["q"] = content["q"].replace("\r\n", "\n").replace("\r", "\n")
    return _to_asked(content)


def read_urlencoded(body: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form or query; raise `InvalidRequest` if they are too many or not UTF-8."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is no UTF-8") from None
    except ValueError:
        raise InvalidRequest("body", f"has more than {MAX_FIELDS} fields") from None


def _read_multipart(body: bytes, content_type: str) -> list[tuple[str, str]]:
    return asyncio.run(read_multipart(body, content_type))


async def read_multipart(body: bytes, content_type: str) -> list[tuple[str, str]]:
    """Return the fields of a multipart form; raise `InvalidRequest` if it is malformed, has files or too many fields."""
    boundary = parse_mimetype(content_type).parameters.get("boundary", "")
    if not boundary.isascii() or body[: MAX_BOUNDARY_BYTES + 4].partition(b"\r\n")[0] != b"--" + boundary.encode():
        raise InvalidRequest("body", "does not begin with its boundary")  # aiohttp searches it line by line
    content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), len(body))
    content.feed_data(body)
    content.feed_eof()
    fields: list[tuple[str, str]] = []
    try:
        parts = aiohttp.MultipartReader({"Content-Type": content_type}, content)
        while (part := await parts.next()) is not None:
            if len(fields) == MAX_FIELDS:
                raise InvalidRequest("body", f"has more than {MAX_FIELDS} fields")
            if isinstance(part, aiohttp.MultipartReader) or part.name is None or part.filename is not None:
                raise InvalidRequest("body", "has a part that is no field of a form; files are not read")
            fields.append((part.name, bytes(part.decode(await part.read())).decode()))
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is no UTF-8") from None
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError, Warning):
        raise InvalidRequest("body", "is no form in parts") from None
    return fields


def _number(value: object) -> int:
    """Return the number of alternatives, 0 if missing or negative."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest("alternatives", "is no whole number")
    return max(0, value)


def shown(text: str) -> str:
    """Return a truncated, escaped text for an error."""
    return ascii(text[:MAX_SHOWN_CHARACTERS])
