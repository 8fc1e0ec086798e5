"""What the console's Engine tab lives on: how engines are, as server-sent events, four a second.

What is told and to whom is the core's; there is no text of any request in it.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

import msgspec
from aiohttp import web

from dragoman.server.protocols.http.requests import Endpoint, Exchange
from dragoman.server.service.service import Core

PATH = "/console/engine"
# Who does not take an event for so long is not looking.
SEND_SECONDS = 10.0


class EngineEvents:
    """Answers `/console/engine`."""

    def __init__(self, core: Core) -> None:
        """Tell what the core's engines do."""
        self._viewing = core.viewing

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers; a stream counts as one of its caller's streams and keeps no drain waiting."""
        return (Endpoint("GET", PATH, self.watch, is_awaited=False, has_items=True),)

    async def watch(self, exchange: Exchange) -> web.StreamResponse:
        """Send views until the caller leaves or may not look any more, or the server drains."""
        caller, events = exchange.call.caller, exchange.stream()
        response: web.StreamResponse | None = None
        async with aclosing(self._viewing.views(caller, is_operator=exchange.is_operator)) as views:
            async for view in views:
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        response = await events.send(msgspec.json.encode(view).decode())
                except TimeoutError:
                    raise ConnectionResetError("the caller takes no events") from None
        assert response is not None
        response.force_close()
        return response
