"""dragoman.v1 over HTTP in protobuf's canonical JSON: generation, scoring, models, and the admin service.

Responses include fields with default values; requests may use camel case or the contract's names.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message

from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.protocols.http.requests import Endpoint, Exchange, check_content_type, run_by_size
from dragoman.server.protocols.http.responses import JSON, NATIVE_ERRORS
from dragoman.server.protocols.json_text import decode_json, one_line
from dragoman.server.protocols.openai.api import model_object, models_list
from dragoman.server.protocols.v1.descriptions import CHANGES, Descriptions, to_listing, to_model, to_order
from dragoman.server.protocols.v1.messages import (
    MessageLimit,
    to_generate_request,
    to_score_request,
    to_score_response,
    to_stream_response,
    write_response,
)
from dragoman.server.service.administration import CarryOut, Listing, Operator, OperatorCalls, Order, Verb
from dragoman.server.service.answers import Generated
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.service import Service
from dragoman.v1 import generation_pb2, repository_pb2

# Limit of a list in a request, above that of any field.
MAX_ITEMS = 1024
REPOSITORY = "/v1/repository"

M = TypeVar("M", bound=Message)


class NativeApi:
    """Endpoints below `/v1`; `max_message_bytes` limits a response's size in gRPC's encoding."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._generation = service.generation
        self._limit = MessageLimit(max_message_bytes)
        self._descriptions = Descriptions(service.models, max_message_bytes)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the callers' endpoints."""
        counted = partial(Endpoint, "POST", errors=NATIVE_ERRORS, is_counted=True)
        reads = message_reader(generation_pb2.GenerateRequest)
        return (
            counted("/v1/generate", self.generate, read=reads),
            counted("/v1/generate:stream", self.stream, read=reads),
            counted("/v1/score", self.score, read=message_reader(generation_pb2.ScoreRequest)),
            Endpoint("GET", "/v1/models", self.models, NATIVE_ERRORS),
            Endpoint("GET", "/v1/models/{model}", self.model, NATIVE_ERRORS),
        )

    async def generate(self, exchange: Exchange) -> web.Response:
        """Return the whole answer."""
        request = to_generate_request(exchange.message)
        generated = await self._generation.generate(request, exchange.call, exchange.remaining_seconds, self._limit)
        return web.Response(text=await to_generate_text(generated, self._limit.max_bytes), content_type=JSON)

    async def stream(self, exchange: Exchange) -> web.StreamResponse:
        """Stream the pieces as server-sent events; the last has `result`."""
        request = to_generate_request(exchange.message)
        async with self._generation.stream(request, exchange.call, exchange.remaining_seconds, self._limit) as pieces:
            async for piece in pieces:
                response = await exchange.send_event(await to_text(await to_stream_response(piece, self._limit.max_bytes)))
        return response

    async def score(self, exchange: Exchange) -> web.Response:
        """Return the scores of a target."""
        request = to_score_request(exchange.message)
        scores = await self._generation.score(request, exchange.call, exchange.remaining_seconds, self._limit)
        return await message_response(await to_score_response(scores, self._limit.max_bytes))

    async def models(self, exchange: Exchange) -> web.Response:
        """Return the models that the caller may use, also as OpenAI's list."""
        models = self._generation.models(exchange.call.caller)
        return await _extended(self._descriptions.of_all(models), models_list(model.name for model in models))

    async def model(self, exchange: Exchange) -> web.Response:
        """Return one model."""
        http = exchange.http
        version = http.query.get("modelVersion") or http.query.get("model_version", "")
        model = self._generation.model(http.match_info["model"], exchange.call.caller, version)
        return await _extended(self._descriptions.of(model), model_object(model.name))


def repository_endpoints(operators: OperatorCalls) -> Iterable[Endpoint]:
    """Yield the operators' endpoints; a drain does not wait for changes."""
    endpoint = partial(Endpoint, errors=NATIVE_ERRORS, access="operators", is_awaited=False)

    async def listing(exchange: Exchange, order: Order) -> web.Response:
        found = await carried_out(operators.carry_out, exchange, order)
        return await message_response(to_listing(found.models, found.problem))

    async def show(exchange: Exchange) -> web.Response:
        return await listing(exchange, Order("list", exchange.http.query.get("model", "")))

    async def refresh(exchange: Exchange) -> web.Response:
        return await listing(exchange, Order("refresh"))

    def changing(verb: Verb) -> Callable[[Exchange], Awaitable[web.Response]]:
        async def change(exchange: Exchange) -> web.Response:
            message, model = exchange.message, exchange.http.match_info["model"]
            if message.model not in ("", model):
                raise InvalidRequest("model", "is another in the body than in the path")
            order = to_order(verb, message, model)
            return await message_response(to_model((await carried_out(operators.carry_out, exchange, order)).models[0]))

        return change

    yield endpoint("GET", REPOSITORY, show)
    yield endpoint("POST", f"{REPOSITORY}:refresh", refresh, read=message_reader(repository_pb2.RefreshRepositoryRequest))
    for rpc, verb in CHANGES.items():
        reads = message_reader(getattr(repository_pb2, f"{rpc}Request"))
        yield endpoint("POST", f"{REPOSITORY}/models/{{model}}:{verb}", changing(verb), read=reads)


async def carried_out(carry_out: CarryOut, exchange: Exchange, order: Order) -> Listing:
    """Carry out an operator's order; raise `DeadlineExceeded` at the deadline, after which a begun change goes on."""
    caller = exchange.call.caller
    assert caller is not None, "operators are always known"
    try:
        async with asyncio.timeout(exchange.remaining_seconds):
            return await carry_out(Operator(caller.name, caller.models), order)
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed; a change that has begun goes on") from None


def message_reader(kind: Callable[[], M]) -> Callable[[web.Request, bytes], Awaitable[M]]:
    """Return a function that decodes a body to a message."""

    async def read(request: web.Request, body: bytes) -> M:
        check_content_type(request, JSON)
        message = kind()
        await run_by_size(len(body), parse, body, message)
        return message

    return read


def parse(body: bytes, message: Message) -> None:
    """Fill a message from JSON; raise `InvalidRequest` if the body does not fit."""
    content = decode_json(body, dict[str, Any])
    for name, value in content.items():
        if isinstance(value, list) and len(value) > MAX_ITEMS:
            raise InvalidRequest(one_line(name), f"{len(value)} items; at most {MAX_ITEMS} are read")
    try:
        json_format.ParseDict(content, message)
    except (json_format.ParseError, OverflowError) as error:
        raise InvalidRequest("body", one_line(error)) from None


def read_generate(body: bytes) -> GenerateRequest:
    """Return the request of a body of `/v1/generate`; raise `InvalidRequest`."""
    message = generation_pb2.GenerateRequest()
    parse(body, message)
    return to_generate_request(message)


async def to_generate_text(generated: Generated, max_bytes: int) -> str:
    """Return the response of `/v1/generate` as JSON."""
    response = generation_pb2.GenerateResponse()
    await write_response(generated, max_bytes, response)
    return await to_text(response)


async def message_response(message: Message) -> web.Response:
    """Return a response with a message as JSON."""
    return web.Response(text=await to_text(message), content_type=JSON)


async def _extended(message: Message, more: dict[str, Any]) -> web.Response:
    """Return a response with a message, which has fields, and more of them."""
    return web.Response(text=f"{(await to_text(message))[:-1]}, {msgspec.json.encode(more).decode()[1:]}", content_type=JSON)


async def to_text(message: Message) -> str:
    """Return a message as JSON, on a thread if it is large."""
    return await run_by_size(message.ByteSize(), to_json, message)


def to_json(message: Message) -> str:
    """Return a message as canonical JSON, with default values."""
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False, always_print_fields_with_no_presence=True)
