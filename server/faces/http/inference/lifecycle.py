"""Triton's paths to load and unload models, for operators, where the admin service is over HTTP too."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from msgspec import Struct, field

from dragoman.server.core.administration import CarryOut, Order
from dragoman.server.faces.http.exchange import Endpoint, Exchange
from dragoman.server.faces.http.reading import decode
from dragoman.server.faces.http.repository import carried_out
from dragoman.server.faces.oip.lifecycle import load_order, unload_order

PATH = "/v2/repository/models/{model}"
ToOrder = Callable[[str, str, Iterable[str]], Order]
ORDERS: tuple[tuple[str, ToOrder], ...] = (("load", load_order), ("unload", unload_order))


class _Change(Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = field(default_factory=dict)


class LifecycleApi:
    """Answers `/v2/repository/models/NAME/load` and `unload`."""

    def __init__(self, carry_out: CarryOut) -> None:
        """Hand on what operators ask for."""
        self._carry_out = carry_out

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers; a drain does not wait for changes, which end with it."""
        for verb, to_order in ORDERS:
            yield Endpoint("POST", f"{PATH}/{verb}", self._changing(to_order), _read, is_awaited=False)

    def _changing(self, to_order: ToOrder) -> Callable[[Exchange], Awaitable[web.Response]]:
        async def change(exchange: Exchange) -> web.Response:
            order = to_order(exchange.http.match_info["model"], "", exchange.message.parameters)
            await carried_out(self._carry_out, exchange, order)
            return web.Response()

        return change


async def _read(request: web.Request, body: bytes) -> _Change:
    """Return what a body says; it may be empty."""
    return decode(body, _Change) if body else _Change()
