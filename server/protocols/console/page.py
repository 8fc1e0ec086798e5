"""The console's page: its files, as they lie in the package, sent from memory. What it shows it asks of the other paths itself."""

import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Self

from aiohttp import ETag, web

PATH, ASSETS_PATH = "/", "/console/assets/{name}"
DOCUMENT = "index.html"
# What the document says of the server: the port that gRPC is answered on, for the calls that it shows, and whether operators may
# administer over HTTP.
GRPC_PORT, HTTP_ADMIN = b'name="grpc-port" content="8500"', b'name="http-admin" content="no"'
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    # Kept, but asked for again each time: after an upgrade nobody has half of the old page.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}
# Who says so wants none of it: a weight of nothing.
_NO_GZIP = re.compile(r"gzip\s*;\s*q=0(?:\.0*)?\s*(?:,|$)")
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent.

    Attributes:
        kind: Its media type.
        body: What it is.
        zipped: The same, compressed.
        tag: Stands for its content.
    """

    kind: str
    body: bytes
    zipped: bytes
    tag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> Self:
        """Prepare a file."""
        return cls(KINDS[name.rpartition(".")[2]], body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32])


class ConsolePage:
    """Answers with the page and what belongs to it. Anybody may read it: it holds nothing that is the server's."""

    def __init__(self, grpc_port: int, is_administered: bool) -> None:
        """Read all of it.

        Args:
            grpc_port: Where gRPC is answered.
            is_administered: Whether operators may administer over HTTP.
        """
        bodies = dict(_read())
        document = bodies.pop(DOCUMENT)
        assert GRPC_PORT in document and HTTP_ADMIN in document
        document = document.replace(GRPC_PORT, GRPC_PORT.replace(b"8500", str(grpc_port).encode()))
        if is_administered:
            document = document.replace(HTTP_ADMIN, HTTP_ADMIN.replace(b"no", b"yes"))
        self._document = Asset.of(DOCUMENT, document)
        self._assets = {name: Asset.of(name, body) for name, body in bodies.items()}

    def add_to(self, app: web.Application) -> None:
        """Have an application answer with it."""
        app.router.add_get(PATH, partial(_answer, asset=self._document))
        app.router.add_get(ASSETS_PATH, self._answer_asset)

    async def _answer_asset(self, request: web.Request) -> web.Response:
        """Answer with what has this very name; no path is made of it."""
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return await _answer(request, asset)


async def _answer(request: web.Request, asset: Asset) -> web.Response:
    """Return a file, or that the caller has it."""
    taken = request.headers.get("Accept-Encoding", "")
    is_zipped = "gzip" in taken and _NO_GZIP.search(taken) is None
    tag = ETag(f"{asset.tag}-gzip" if is_zipped else asset.tag)
    if any(known.value in (tag.value, "*") for known in request.if_none_match or ()):
        response = web.Response(status=304, headers=HEADERS)
    else:
        body = asset.zipped if is_zipped else asset.body
        response = web.Response(body=body, content_type=asset.kind, charset="utf-8", headers=HEADERS)
        if is_zipped:
            response.headers["Content-Encoding"] = "gzip"
    response.etag = tag
    return response


def _read() -> Iterator[tuple[str, bytes]]:
    for file in files("dragoman.server.protocols.console").joinpath("assets").iterdir():
        if file.name.rpartition(".")[2] in KINDS:
            yield file.name, file.read_bytes()
