"""Bodies that are JSON or forms: URL-encoded, or in parts, with a file where one is taken; and query arguments."""

import asyncio
import warnings
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.helpers import parse_mimetype
from aiohttp.http_exceptions import HttpProcessingError

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.http.requests import check_content_type, run_by_size
from dragoman.server.protocols.http.responses import JSON
from dragoman.server.protocols.json_text import decode_json
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.sentences import on_thread

Fields = list[tuple[str, Any]]  # texts, and bytes of a file

URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
# Limit per form or query.
MAX_FIELDS = 64
# RFC 2046.
MAX_BOUNDARY_BYTES = 70
# Raised for a malformed form.
MALFORMED = (ValueError, AssertionError, RuntimeError, HttpProcessingError, Warning)
# Fields of a form's file: its content and its name.
FILE, FILENAME = "file", "filename"

# Raise aiohttp's warnings of a malformed Content-Disposition: Python would keep their text, which is the caller's.
for _category in (aiohttp.BadContentDispositionHeader, aiohttp.BadContentDispositionParam):
    warnings.filterwarnings("error", category=_category)


async def read_content(request: web.Request, body: bytes, *, has_file: bool = False) -> dict[str, Any] | Fields:
    """Return the content of a JSON body, else the fields of the query and of a form, which has a file only if `has_file`.

    Raises:
        InvalidRequest: If the body is malformed.
        HttpRefusal: If it has another media type.
    """
    kind = request.content_type
    if body or kind == JSON:
        check_content_type(request, JSON, URLENCODED, MULTIPART)
    if kind == JSON:
        return await run_by_size(len(body), decode_json, body, dict[str, Any])
    if body and kind == MULTIPART:
        kind = request.headers["Content-Type"]
        is_large = len(body) > LARGE_BYTES
        fields = await (on_thread(_read_multipart, body, kind, has_file) if is_large else read_multipart(body, kind, has_file))
    else:
        fields = await run_by_size(len(body), read_urlencoded, body)
    return [*read_urlencoded(request.rel_url.raw_query_string.encode()), *fields]


def read_urlencoded(body: bytes) -> Fields:
    """Return the fields of a form or query; raise `InvalidRequest` if they are too many or not UTF-8."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is no UTF-8") from None
    except ValueError:
        raise InvalidRequest("body", f"has more than {MAX_FIELDS} fields") from None


def _read_multipart(body: bytes, content_type: str, has_file: bool) -> Fields:
    return asyncio.run(read_multipart(body, content_type, has_file))


def check_boundary(line: bytes, content_type: str) -> None:
    """Raise `InvalidRequest` unless a form begins with its boundary: aiohttp would search it line by line."""
    boundary = parse_mimetype(content_type).parameters.get("boundary", "")
    if not boundary.isascii() or line != b"--" + boundary.encode():
        raise InvalidRequest("body", "does not begin with its boundary")


async def read_multipart(body: bytes, content_type: str, has_file: bool = False) -> Fields:
    """Return the fields of a multipart form; raise `InvalidRequest` if it is malformed, has other files or too many fields."""
    check_boundary(body[: MAX_BOUNDARY_BYTES + 4].partition(b"\r\n")[0], content_type)
    content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), len(body))
    content.feed_data(body)
    content.feed_eof()
    fields: Fields = []
    try:
        parts = aiohttp.MultipartReader({"Content-Type": content_type}, content)
        while (part := await parts.next()) is not None:
            if len(fields) >= MAX_FIELDS:
                raise InvalidRequest("body", f"has more than {MAX_FIELDS} fields")
            if isinstance(part, aiohttp.MultipartReader) or part.name is None:
                raise InvalidRequest("body", "has a part that is no field of a form")
            is_file = has_file and part.name == FILE
            if part.filename is not None and not is_file:
                raise InvalidRequest("body", "has a file that is not read")
            value = bytes(part.decode(await part.read()))
            fields.append((part.name, value if is_file else value.decode()))
            if part.filename is not None:
                fields.append((FILENAME, part.filename))
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is no UTF-8") from None
    except MALFORMED:
        raise InvalidRequest("body", "is no form in parts") from None
    return fields
