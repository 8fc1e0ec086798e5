"""Decoding of LibreTranslate requests: JSON, forms and query arguments."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from msgspec import Struct

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.http.forms import FILE, FILENAME, read_content

# Limit of a list `q`.
MAX_TEXTS = 1024
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")
_TEXT_FIELDS = ("source", "target", "format", "api_key", "model", FILENAME)
_FIELDS = ("q", "alternatives", FILE, *_TEXT_FIELDS)


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
    file: bytes = b""
    filename: str = ""


async def read_request(request: web.Request, body: bytes) -> Asked:
    """Decode a request; raise `InvalidRequest` if it is malformed, `HttpRefusal` for an unsupported media type."""
    return _read(await read_content(request, body))


async def read_file(request: web.Request, body: bytes) -> Asked:
    """Decode a request with a file; raises as `read_request`."""
    return _read(await read_content(request, body, has_file=True))


def _read(content: dict[str, Any] | Sequence[tuple[str, Any]]) -> Asked:
    return to_asked(content) if isinstance(content, dict) else read_form(content)


def to_asked(content: Mapping[str, Any]) -> Asked:
    """Convert a message; raise `InvalidRequest` if a field has the wrong type."""
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
    file = content.get(FILE) or b""
    if not isinstance(file, bytes | str):
        raise InvalidRequest(FILE, "is no text")
    file = file if isinstance(file, bytes) else file.encode(errors="replace")
    return Asked(texts, isinstance(q, list), alternatives=_number(content.get("alternatives")), file=file, **fields)


def read_form(pairs: Sequence[tuple[str, Any]]) -> Asked:
    """Decode the fields of a form and its query; raise `InvalidRequest` if a known field is repeated or malformed."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in _FIELDS and name in content:
            raise InvalidRequest(name, "is given more than once; a list of texts is sent as JSON")
        content[name] = value
    if "q" in content:  # browsers send forms with CRLF
        content["q"] = content["q"].replace("\r\n", "\n").replace("\r", "\n")
    return to_asked(content)


def _number(value: object) -> int:
    """Return the number of alternatives, 0 if missing or negative."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest("alternatives", "is no whole number")
    return max(0, value)
