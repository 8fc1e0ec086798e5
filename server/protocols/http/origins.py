"""Host names and origins that may use the HTTP port (CORS)."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

LOCALHOST = "localhost"


class Hosts:
    """Those that requests may be for."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        """Allow these names, beside addresses and `localhost`, which nobody else can have; none of them means any name."""
        self._allowed = frozenset(allowed)

    def has(self, request: web.Request) -> bool:
        """Whether a request is for one of them."""
        if not self._allowed:
            return True
        try:
            parts = urlsplit(f"//{request.host}")
        except ValueError:
            return False
        if parts.netloc != request.host or "@" in parts.netloc:  # more than a name and a port
            return False
        name = parts.hostname or ""
        return name in self._allowed or name == LOCALHOST or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


ANY = "*"
# Of a preflight's answer: how long a browser may go by it.
MAX_AGE_SECONDS = 86400
METHODS = "GET, POST"
HEADERS = "Authorization, Content-Type, Grpc-Timeout, Inference-Header-Content-Length, Traceparent, X-Request-Id"
EXPOSED = "Inference-Header-Content-Length, Retry-After, X-Request-Id"


class Origins:
    """Those whose pages are answered."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        """Allow these, `*` for any; none of them means that nobody's page but the server's own is answered."""
        self._allowed = frozenset(allowed)

    def is_trusted(self, request: web.Request) -> bool:
        """Whether a request comes from no page, from one of the server's own or from one that is allowed."""
        origin = request.headers.get("Origin")
        return origin is None or bool(self._allowed & {ANY, origin}) or _is_own(origin, request.host)

    def middleware(self) -> Middleware:
        """Return what answers a browser that asks beforehand."""

        @web.middleware
        async def answer(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            refused = request.match_info.http_exception
            is_there = refused is None or isinstance(refused, web.HTTPMethodNotAllowed)
            if not (is_preflight and is_there and self._answered(request)):
                return await handler(request)
            headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Allow-Headers": HEADERS}
            return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers | {"Access-Control-Max-Age": str(MAX_AGE_SECONDS)})

        return answer

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say with an answer whose page may read it."""
        if not self._allowed:
            return
        if ANY not in self._allowed:
            response.headers.add("Vary", "Origin")
        if (answered := self._answered(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = answered
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _answered(self, request: web.Request) -> str | None:
        """Return what a request's page is told of whose may read; None where it may not."""
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        return ANY if ANY in self._allowed else origin if origin in self._allowed else None


def _is_own(origin: str, host: str) -> bool:
    """Whether a page is the server's own; a proxy before it may have changed the scheme, but not the host."""
    try:
        return urlsplit(origin).netloc == host != ""
    except ValueError:
        return False
