"""The console's page: its files, as they lie in the package, sent from memory. What it shows it asks of the other paths itself."""

import hashlib
from collections.abc import Iterator
from importlib.resources import files

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
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class ConsolePage:
    """Answers with the page and what belongs to it. Anybody may read it: it holds nothing that is the server's."""

    def __init__(self, grpc_port: int, is_administered: bool) -> None:
        """Read all of it.

        Args:
            grpc_port: Where gRPC is answered.
            is_administered: Whether operators may administer over HTTP.
        """
        self._assets = dict(_read())
        document = self._assets.pop(DOCUMENT)
        assert GRPC_PORT in document and HTTP_ADMIN in document
        document = document.replace(GRPC_PORT, GRPC_PORT.replace(b"8500", str(grpc_port).encode()))
        self._document = document.replace(HTTP_ADMIN, HTTP_ADMIN.replace(b"no", b"yes")) if is_administered else document

    def add_to(self, app: web.Application) -> None:
        """Have an application answer with it."""
        app.router.add_get(PATH, self._answer_document)
        app.router.add_get(ASSETS_PATH, self._answer_asset)

    async def _answer_document(self, request: web.Request) -> web.Response:
        return _answer(request, DOCUMENT, self._document)

    async def _answer_asset(self, request: web.Request) -> web.Response:
        """Answer with what has this very name; no path is made of it."""
        name = request.match_info["name"]
        body = self._assets.get(name)
        if body is None:
            raise web.HTTPNotFound
        return _answer(request, name, body)


def _answer(request: web.Request, name: str, body: bytes) -> web.Response:
    """Return a file, or that the caller has it."""
    tag = ETag(hashlib.sha256(body).hexdigest()[:32])
    known = request.if_none_match or ()
    if any(one.value in (tag.value, "*") for one in known):
        response = web.Response(status=304, headers=HEADERS)
    else:
        kind = KINDS[name.rpartition(".")[2]]
        response = web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)
    response.etag = tag
    return response


def _read() -> Iterator[tuple[str, bytes]]:
    for file in files("dragoman.server.faces.http.console").joinpath("assets").iterdir():
        if file.name.rpartition(".")[2] in KINDS:
            yield file.name, file.read_bytes()
