"""Requests of LibreTranslate's API: JSON, forms and query arguments."""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web
from aiohttp.helpers import parse_mimetype
from msgspec import Struct

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.http.origins import Origins
from dragoman.server.protocols.http.requests import check_kind, decode
from dragoman.server.protocols.http.responses import HttpRefusal
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.sentences import on_thread

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
# Of a form, or of a query.
MAX_FIELDS = 64
# As RFC 2046 has it.
MAX_BOUNDARY_CHARACTERS = 70
# Of what is before a part's content.
MAX_HEAD_BYTES = 4096
# Of Content-Disposition. aiohttp's own parser warns with the header's text, which Python's registry of warnings keeps for good.
_PARAMETER = re.compile(r""";[ \t]*+([\w*-]++)[ \t]*+=[ \t]*+(?:"((?:[^"\\]|\\.)*+)"|([^ \t;"=]++))[ \t]*+""")
_DISPOSITION = re.compile(rf"form-data[ \t]*+((?:{_PARAMETER.pattern})++);?", re.IGNORECASE)


def read_multipart(body: bytes, content_type: str) -> list[tuple[str, str]]:
    """Return the fields of a form.

    Args:
        body: As it came.
        content_type: Its header, which tells the boundary.

    Raises:
        InvalidRequest: If it is no such form, has files or too many fields.
    """
    boundary = parse_mimetype(content_type).parameters.get("boundary", "")
    if not 0 < len(boundary) <= MAX_BOUNDARY_CHARACTERS or not boundary.isascii():
        raise InvalidRequest("Content-Type", "has no boundary")
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), MAX_FIELDS + 2)
    if not parts or not parts[-1].startswith(b"--"):
        reason = f"has more than {MAX_FIELDS} fields" if len(parts) > MAX_FIELDS + 1 else "does not end with its boundary"
        raise InvalidRequest("body", reason)
    return [_field(part) for part in parts[:-1]]


def _field(part: bytes) -> tuple[str, str]:
    """Return name and value of a part, from the end of the line of its boundary on."""
    head, separator, content = part.partition(b"\r\n\r\n")
    if not separator or len(head) > MAX_HEAD_BYTES:
        raise InvalidRequest("body", "has a part that cannot be read")
    try:
        headers = dict(_header(line) for line in head.decode().split("\r\n")[1:])
        value = content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is no UTF-8") from None
    form_data = _DISPOSITION.fullmatch(headers.get("content-disposition", ""))
    found = [] if form_data is None else _PARAMETER.findall(form_data[1])
    parameters = {key.lower(): quoted or token for key, quoted, token in found}
    if len(parameters) != len(found) or "name" not in parameters:
        raise InvalidRequest("body", "has a part that is no field of a form")
    if "filename" in parameters or "filename*" in parameters:
        raise InvalidRequest("body", "has a file; fields alone are read")
    if headers.get("content-transfer-encoding", "8bit").lower() not in ("7bit", "8bit", "binary"):
        raise InvalidRequest("body", "has a part in another encoding; they are read as they are")
    return parameters["name"], value


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


JSON = "application/json"
# Of a list `q`.
MAX_TEXTS = 1024
MAX_SHOWN_CHARACTERS = 32
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")
_TEXT_FIELDS = ("source", "target", "format", "api_key", "model")
_FIELDS = ("q", "alternatives", *_TEXT_FIELDS)


class Asked(Struct, frozen=True):
    """What a body says; fields that it has beside these are left out, as LibreTranslate does.

    Attributes:
        texts: Of `q`; none where that is missing.
        is_list: Whether `q` is a list, and so are the answers.
        source: Code of a language, or `auto`; empty where it is missing, as of the others.
        target: Code of a language.
        format: `text` or `html`.
        alternatives: Further answers wanted.
        api_key: Token of the caller.
        model: Name of the model, where languages do not say which; LibreTranslate has no such field.
    """

    texts: Sequence[str] = ()
    is_list: bool = False
    source: str = ""
    target: str = ""
    format: str = ""
    alternatives: int = 0
    api_key: str = ""
    model: str = ""


def key_of(asked: Asked | None) -> str:
    """Return the token that a request says."""
    return "" if asked is None else asked.api_key


class Reader:
    """Reads requests of callers; forms from pages of origins that are allowed alone."""

    def __init__(self, origins: Origins) -> None:
        """Read what pages of these origins send, and whoever is no page."""
        self._origins = origins

    async def read(self, request: web.Request, body: bytes) -> Asked:
        """Return what a request asks for.

        Raises:
            InvalidRequest: If it cannot be read.
            HttpRefusal: If it is of a kind that is not, or a form of a page that may not send one.
        """
        kind = request.content_type
        if body or kind == JSON:
            check_kind(request, JSON, URLENCODED, MULTIPART)
        if kind == JSON:
            asked: Asked = await _beside(read_json, body)
            return asked
        if not self._origins.is_trusted(request):
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN, "Origin: pages of other origins may send forms if http_allowed_origins has them"
            )
        if body and kind == MULTIPART:
            pairs: list[tuple[str, str]] = await _beside(read_multipart, body, request.headers["Content-Type"])
        else:
            pairs = await _beside(_read_urlencoded, body)
        return read_form([*_read_urlencoded(request.rel_url.raw_query_string.encode()), *pairs])


async def _beside(read: Any, body: bytes, *more: str) -> Any:
    """Read a body, a large one beside others' work."""
    return await on_thread(read, body, *more) if len(body) > LARGE_BYTES else read(body, *more)


def read_json(body: bytes) -> Asked:
    """Read JSON.

    Raises:
        InvalidRequest: If it is none, or a field is of another type than it may be.
    """
    told = decode(body, dict[str, Any])
    q = told.get("q")
    if isinstance(q, list) and len(q) > MAX_TEXTS:
        raise InvalidRequest("q", f"{len(q)} texts; at most {MAX_TEXTS} are translated at once")
    if not isinstance(q, str | list | None) or (isinstance(q, list) and not all(isinstance(text, str) for text in q)):
        raise InvalidRequest("q", "is neither a text nor a list of texts")
    fields: dict[str, Any] = {name: told[name] for name in _TEXT_FIELDS if told.get(name) is not None}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise InvalidRequest(name, "is no text")
    texts = q if isinstance(q, list) else [q] if q else []
    return Asked(texts, isinstance(q, list), alternatives=_number(told.get("alternatives")), **fields)


def read_form(pairs: Sequence[tuple[str, str]]) -> Asked:
    """Read fields of a form and of a query, together.

    Raises:
        InvalidRequest: If one that means something is there twice, or is not what it may be.
    """
    told: dict[str, str] = {}
    for name, value in pairs:
        if name in _FIELDS and name in told:
            raise InvalidRequest(name, "is given more than once; a list of texts is sent as JSON")
        told[name] = value
    return _of_texts(told)


def _of_texts(told: Mapping[str, str]) -> Asked:
    # A browser's form has line ends of its own.
    q = told.get("q", "").replace("\r\n", "\n").replace("\r", "\n")
    fields: dict[str, Any] = {name: told[name] for name in _TEXT_FIELDS if name in told}
    return Asked([q] if q else [], alternatives=_number(told.get("alternatives")), **fields)


def _read_urlencoded(body: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form, or of a query.

    Raises:
        InvalidRequest: If they are too many, or no UTF-8.
    """
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is no UTF-8") from None
    except ValueError:
        raise InvalidRequest("body", f"has more than {MAX_FIELDS} fields") from None


def _number(value: object) -> int:
    """Return a number of alternatives; what is missing is none, and so is less than that."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest("alternatives", "is no whole number")
    return max(0, value)


def shown(text: str) -> str:
    """Return the beginning of what a caller said, as it may be said to others."""
    return ascii(text[:MAX_SHOWN_CHARACTERS])
