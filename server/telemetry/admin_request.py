"""One request to the metrics port, as far as that port speaks HTTP/1: a head of bounded size in, a whole answer out, the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

MAX_HEAD_BYTES = 8192
# Headers that may not come twice; others may, and mean the same as one line with commas.
SINGLE = frozenset({"authorization", "content-length", "host"})


class BadRequest(Exception):
    """What came is not HTTP that is answered here."""

    def __init__(self, status: HTTPStatus) -> None:
        """Answer with this."""
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """What was asked for; names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> "AdminRequest":
        """Read a head, the empty line at its end included.

        Raises:
            BadRequest: If it is none.
        """
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[0].isalpha():
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        method, target, version = parts
        if target.startswith(("http://", "https://")):  # as a proxy is asked
            target = "/" + target.split("/", 3)[3] if target.count("/") > 2 else "/"
        if not target.startswith("/"):
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            key = name.lower()
            if not colon or not name or name != name.strip() or (key in SINGLE and key in headers):
                raise BadRequest(HTTPStatus.BAD_REQUEST)
            headers[key] = f"{headers[key]}, {value.strip()}" if key in headers else value.strip()
        path, _, query = target.partition("?")
        return cls(method, path, query, headers)


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """A status and what comes with it."""

    status: HTTPStatus
    body: bytes
    headers: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def text(cls, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> "AdminAnswer":
        """Answer with a line of text, or several; names of files in it may be no text."""
        return cls(status, f"{text}\n".encode(errors="backslashreplace"), (("Content-Type", "text/plain; charset=utf-8"), *headers))

    def to_bytes(self, *, has_body: bool) -> bytes:
        """Return what goes over the wire; an answer to HEAD has no body."""
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{name}: {value}" for name, value in self.headers)]
        lines += [f"Content-Length: {len(self.body)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode("latin-1") + (self.body if has_body else b"")
