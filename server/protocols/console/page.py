"""The console's static files, served from memory without authentication."""

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Self

from aiohttp import ETag, web

DOCUMENT = "index.html"
# Placeholders in the document: the gRPC port, shown in example calls, and whether the admin service is on HTTP.
GRPC_PORT, HTTP_ADMIN = b'name="grpc-port" content="8500"', b'name="http-admin" content="no"'
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Cache-Control": "no-cache",  # revalidate, so that an upgrade never mixes versions
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_NO_GZIP = re.compile(r"gzip\s*;\s*q=0(?:\.0*)?\s*(?:,|$)")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file, also compressed, and a tag of its content."""

    kind: str
    body: bytes
    zipped: bytes
    tag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> Self:
        """Create an asset from a file's content."""
        return cls(KINDS[name.rpartition(".")[2]], body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:32])


class ConsolePage:
    """The page and its assets."""

    def __init__(self, grpc_port: int, has_admin: bool) -> None:
        """Read the files; `has_admin` enables administration over HTTP."""
        folder = files("dragoman.server.protocols.console").joinpath("assets")
        bodies = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in KINDS}
        document = bodies.pop(DOCUMENT)
        assert GRPC_PORT in document and HTTP_ADMIN in document
        document = document.replace(GRPC_PORT, GRPC_PORT.replace(b"8500", str(grpc_port).encode()))
        if has_admin:
            document = document.replace(HTTP_ADMIN, HTTP_ADMIN.replace(b"no", b"yes"))
        self._document = Asset.of(DOCUMENT, document)
        self._assets = {name: Asset.of(name, body) for name, body in bodies.items()}

    def add_to(self, app: web.Application) -> None:
        """Add the paths to an application."""
        app.router.add_get("/", partial(_respond, asset=self._document))
        app.router.add_get("/console/assets/{name}", self._respond_asset)

    async def _respond_asset(self, request: web.Request) -> web.Response:
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return await _respond(request, asset)


async def _respond(request: web.Request, asset: Asset) -> web.Response:
    """Return a file, or 304 if the client has it."""
    accepted = request.headers.get("Accept-Encoding", "")
    is_zipped = "gzip" in accepted and _NO_GZIP.search(accepted) is None
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
