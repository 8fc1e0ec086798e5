"""Names that the server goes by.

A page may have its own name turn into the server's address (DNS rebinding): to the browser of whoever looks at it, the server is
then a part of the page's origin. The name stays in `Host`, where it is told from the server's own.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

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
