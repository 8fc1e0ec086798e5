"""Allowed hosts and origins: protection from DNS rebinding, and CORS (https://fetch.spec.whatwg.org/#http-cors-protocol).

A browser sends JSON and tokens to another origin only after a preflight, but forms without one.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from dragoman.server.protocols.http.responses import HttpRefusal

ANY = "*"
# Media types that need a preflight.
PREFLIGHTED = ("application/json", "application/octet-stream")
HEADERS = "Authorization, Content-Type, Grpc-Timeout, Inference-Header-Content-Length, Traceparent, X-Request-Id"
PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": HEADERS,
    "Access-Control-Max-Age": "86400",
}
EXPOSED = "Inference-Header-Content-Length, Retry-After, X-Request-Id"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_allowed_host(request: web.Request, allowed: frozenset[str]) -> bool:
    """Return whether `Host` is an allowed name, an IP address or localhost; any host if no names are set.

    DNS rebinding resolves a page's own name to the server; it cannot claim an address or localhost.
    """
    if not allowed:
        return True
    try:
        parts = urlsplit(f"//{request.host}")
    except ValueError:
        return False
    if parts.netloc != request.host or "@" in parts.netloc:  # more than name and port
        return False
    name = parts.hostname or ""
    if name in allowed or name == "localhost":
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Origins:
    """Origins whose pages may use the port: allowed ones, `*` for any, and for forms the server's own."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(allowed)

    def check(self, request: web.Request) -> None:
        """Raise `HttpRefusal` for a body sent without a preflight by another origin's page."""
        if "Content-Type" in request.headers and request.content_type in PREFLIGHTED:
            return
        origin = request.headers.get("Origin")
        if not (origin is None or self._allowed & {ANY, origin} or _is_own(origin, request.host)):
            raise HttpRefusal(HTTPStatus.FORBIDDEN, "Origin: pages of other origins may send this if http_allowed_origins has them")

    @web.middleware
    async def answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer preflights, as middleware."""
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        refused = request.match_info.http_exception
        is_there = refused is None or isinstance(refused, web.HTTPMethodNotAllowed)
        if not (is_preflight and is_there and self._allowed_origin(request)):
            return await handler(request)
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=PREFLIGHT)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the CORS headers that let a page read a response."""
        if not self._allowed:
            return
        if ANY not in self._allowed:
            response.headers.add("Vary", "Origin")
        if (origin := self._allowed_origin(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _allowed_origin(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        return ANY if ANY in self._allowed else origin if origin in self._allowed else None


def _is_own(origin: str, host: str) -> bool:
    """Return whether an origin is the server's; a proxy may change the scheme but not the host."""
    try:
        return urlsplit(origin).netloc == host != ""
    except ValueError:
        return False
