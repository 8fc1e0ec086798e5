"""Forms as browsers send them in parts: `multipart/form-data`, https://www.rfc-editor.org/rfc/rfc7578; fields alone, no files."""

import re

from aiohttp.helpers import parse_mimetype

from dragoman.server.errors import InvalidRequest

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
