"""The `Repository` service over HTTP, for operators: its messages in protobuf's canonical JSON, a model's name in the path.

It is on the port that everybody reaches, so it is there only where settings say so, and only operators' own tokens open it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from google.protobuf.message import Message

from dragoman.server.core.administration import CarryOut, Listing, Operator, Order, Verb
from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.faces.http.exchange import Endpoint, Exchange
from dragoman.server.faces.http.native import answer_with, message_reader
from dragoman.server.faces.v1.repository import to_listing, to_model
from dragoman.v1 import repository_pb2

PATH = "/v1/repository"
CHANGES: tuple[tuple[Verb, Callable[[], Message]], ...] = (
    ("load", repository_pb2.LoadModelRequest),
    ("unload", repository_pb2.UnloadModelRequest),
    ("reload", repository_pb2.ReloadModelRequest),
    ("rollback", repository_pb2.RollbackModelRequest),
    ("label", repository_pb2.SetLabelRequest),
)


class RepositoryApi:
    """Answers `/v1/repository` and what is below it."""

    def __init__(self, carry_out: CarryOut) -> None:
        """Hand on what operators ask for."""
        self._carry_out = carry_out

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers; a drain does not wait for changes, which end with it."""
        refresh = message_reader(repository_pb2.RefreshRepositoryRequest)
        yield Endpoint("GET", PATH, self.list, is_awaited=False)
        yield Endpoint("POST", f"{PATH}:refresh", self.refresh, refresh, is_awaited=False)
        for verb, kind in CHANGES:
            path = f"{PATH}/models/{{model}}:{verb}"
            yield Endpoint("POST", path, self._changing(verb), message_reader(kind), is_awaited=False)

    async def list(self, exchange: Exchange) -> web.Response:
        """Tell how models are; one, if the query names it."""
        listing = await carried_out(self._carry_out, exchange, Order("list", exchange.http.query.get("model", "")))
        return await answer_with(to_listing(listing.models, listing.problem))

    async def refresh(self, exchange: Exchange) -> web.Response:
        """Look at all folders."""
        listing = await carried_out(self._carry_out, exchange, Order("refresh"))
        return await answer_with(to_listing(listing.models, listing.problem))

    def _changing(self, verb: Verb) -> Callable[[Exchange], Awaitable[web.Response]]:
        async def change(exchange: Exchange) -> web.Response:
            message, model = exchange.message, exchange.http.match_info["model"]
            if message.model not in ("", model):
                raise InvalidRequest("model", "is another in the body than in the path")
            order = Order(verb, model, getattr(message, "version", ""), getattr(message, "label", ""))
            return await answer_with(to_model((await carried_out(self._carry_out, exchange, order)).models[0]))

        return change


async def carried_out(carry_out: CarryOut, exchange: Exchange, order: Order) -> Listing:
    """Carry out an order within the time that its operator has for it; a change that has begun goes on after that.

    Raises:
        DeadlineExceeded: If that is over before.
    """
    try:
        async with asyncio.timeout(exchange.remaining_seconds):
            return await carry_out(_operator(exchange), order)
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed; a change that has begun goes on") from None


def _operator(exchange: Exchange) -> Operator:
    caller = exchange.call.caller
    assert caller is not None, "operators are always known here"
    return Operator(caller.name, caller.models)
