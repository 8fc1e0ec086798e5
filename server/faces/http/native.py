"""Dragoman's own API over HTTP: the messages of `dragoman.v1` in protobuf's canonical JSON, errors as `google.rpc.Status` in JSON.

Every field is written, those that have their default value, too. What is read may have names in camel case or as in the contract.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from dragoman.server.core.core import Core
from dragoman.server.core.text_work import on_thread
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.faces.http.exchange import Endpoint, Exchange
from dragoman.server.faces.http.reading import check_kind, decode, one_line
from dragoman.server.faces.http.statuses import headers_of, status_of
from dragoman.server.faces.large_requests import LARGE_BYTES
from dragoman.server.faces.v1.conversion import (
    to_generate_request,
    to_score_request,
    to_score_response,
    to_stream_response,
    write_response,
)
from dragoman.server.faces.v1.descriptions import Descriptions
from dragoman.server.faces.v1.sizes import MessageLimit
from dragoman.server.faces.v1.status import to_message
from dragoman.v1 import generation_pb2

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
