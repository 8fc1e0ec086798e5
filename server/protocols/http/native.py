"""dragoman.v1 over HTTP in protobuf's canonical JSON: generation, scoring and the admin service."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from dragoman.server.errors import DeadlineExceeded, InvalidRequest, ServiceError
from dragoman.server.protocols.http.requests import Endpoint, Exchange, check_kind, decode, one_line
from dragoman.server.protocols.http.responses import headers_of, status_of
from dragoman.server.protocols.v1.descriptions import Descriptions, to_listing, to_model
from dragoman.server.protocols.v1.messages import (
    MessageLimit,
    to_generate_request,
    to_message,
    to_score_request,
    to_score_response,
    to_stream_response,
    write_response,
)
from dragoman.server.service.administration import CarryOut, Listing, Operator, Order, Verb
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.sentences import on_thread
from dragoman.server.service.service import Core
from dragoman.v1 import generation_pb2, repository_pb2

JSON = "application/json"
# Of a list in a request; no field may have as many.
MAX_ITEMS = 1024

Kind = TypeVar("Kind", bound=Message)


class NativeApi:
    """Answers `/v1`; a `Manner`."""

    def __init__(self, core: Core, max_message_bytes: int) -> None:
        """Serve what the core does.

        Args:
            core: What answers.
            max_message_bytes: Largest answer that is made, as gRPC would send it; as JSON it has some times as many.
        """
        self._generation = core.generation
        self._limit = MessageLimit(max_message_bytes)
        self._descriptions = Descriptions(core.models, max_message_bytes)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers."""
        reads = message_reader(generation_pb2.GenerateRequest)
        return (
            Endpoint("POST", "/v1/generate", self.generate, reads, is_counted=True),
            Endpoint("POST", "/v1/generate:stream", self.stream, reads, is_counted=True),
            Endpoint("POST", "/v1/score", self.score, message_reader(generation_pb2.ScoreRequest), is_counted=True),
            Endpoint("GET", "/v1/models", self.models),
            Endpoint("GET", "/v1/models/{model}", self.model),
        )

    async def generate(self, exchange: Exchange) -> web.Response:
        """Answer with the whole answer."""
        wanted = to_generate_request(exchange.message)
        generated = await self._generation.generate(wanted, exchange.call, exchange.remaining_seconds, self._limit)
        response = generation_pb2.GenerateResponse()
        await write_response(generated, self._limit.max_bytes, response)
        return await answer_with(response)

    async def stream(self, exchange: Exchange) -> web.StreamResponse:
        """Answer with the same in pieces: a server-sent event each, the last of which has `result`."""
        wanted, events = to_generate_request(exchange.message), exchange.stream()
        async with self._generation.stream(wanted, exchange.call, exchange.remaining_seconds, self._limit) as pieces:
            async for piece in pieces:
                response = await events.send(await _written(await to_stream_response(piece, self._limit.max_bytes)))
        return response

    async def score(self, exchange: Exchange) -> web.Response:
        """Answer with the scores of a pair."""
        wanted = to_score_request(exchange.message)
        scores = await self._generation.score(wanted, exchange.call, exchange.remaining_seconds, self._limit)
        return await answer_with(await to_score_response(scores, self._limit.max_bytes))

    async def models(self, exchange: Exchange) -> web.Response:
        """Describe every model that the caller may use."""
        return await answer_with(self._descriptions.of_all(self._generation.models(exchange.call.caller)))

    async def model(self, exchange: Exchange) -> web.Response:
        """Describe one model."""
        http = exchange.http
        version = http.query.get("modelVersion") or http.query.get("model_version", "")
        return await answer_with(
            self._descriptions.of(self._generation.model(http.match_info["model"], exchange.call.caller, version))
        )

    def refuse(self, error: ServiceError, request_id: str) -> web.Response:
        """See `Manner`."""
        headers = headers_of(error)
        return web.Response(text=status_json(error, request_id), status=status_of(error), content_type=JSON, headers=headers)

    def error_event(self, error: ServiceError, request_id: str) -> tuple[str, str]:
        """See `Manner`."""
        return "error", status_json(error, request_id)


def status_json(error: ServiceError, request_id: str) -> str:
    """Return an error as `google.rpc.Status` in JSON."""
    told = to_message(error, request_id)
    status = Status(code=told.code, message=told.message, details=told.details)
    return json_format.MessageToJson(status, indent=None, ensure_ascii=False)


def message_reader(kind: Callable[[], Kind]) -> Callable[[web.Request, bytes], Any]:
    """Return what reads a message of a kind."""

    async def read(request: web.Request, body: bytes) -> Kind:
        check_kind(request, JSON)
        message = kind()
        if len(body) > LARGE_BYTES:
            await on_thread(parse, body, message)
        else:
            parse(body, message)
        return message

    return read


def parse(body: bytes, message: Message) -> None:
    """Read a message from JSON.

    Raises:
        InvalidRequest: If it is no JSON, or not of this kind of message.
    """
    told = decode(body, dict[str, Any])
    for name, value in told.items():
        if isinstance(value, list) and len(value) > MAX_ITEMS:
            raise InvalidRequest(one_line(name), f"{len(value)} items; at most {MAX_ITEMS} are read")
    try:
        json_format.ParseDict(told, message)
    except json_format.ParseError as error:
        raise InvalidRequest("body", one_line(error)) from None


async def answer_with(message: Message) -> web.Response:
    """Return the answer that has a message."""
    return web.Response(text=await _written(message), content_type=JSON)


async def _written(message: Message) -> str:
    """Write a message as JSON; a large one beside others' work."""
    if message.ByteSize() > LARGE_BYTES:
        return await on_thread(to_json, message)
    return to_json(message)


def to_json(message: Message) -> str:
    """Return a message in canonical JSON, with the fields that have their default."""
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False, always_print_fields_with_no_presence=True)


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
