"""The Open Inference Protocol over HTTP, with Triton's extensions of it: the paths, and what is behind each.

What is read and answered is that of the gRPC service, by the same code; docs/open-inference.md says what both have.
"""

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import NoReturn

import msgspec
from aiohttp import web

from dragoman.inference import inference_pb2
from dragoman.server.core.core import Core
from dragoman.server.core.endings import RETRY_SECONDS
from dragoman.server.errors import InvalidRequest, NotOffered, NotReady, ServiceError
from dragoman.server.faces.http.around import own_ending
from dragoman.server.faces.http.exchange import Endpoint, Exchange
from dragoman.server.faces.http.inference.reading import Posted, Reader
from dragoman.server.faces.http.inference.writing import JSON, plain, to_answer, to_generated
from dragoman.server.faces.http.origins import Origins
from dragoman.server.faces.http.statuses import headers_of, status_of
from dragoman.server.faces.items import Items
from dragoman.server.faces.oip.answering import Answering
from dragoman.server.faces.oip.descriptions import Descriptions, server_metadata
from dragoman.server.faces.oip.given import STREAM
from dragoman.server.faces.oip.not_offered import NO_SETTINGS, NO_SHARED_MEMORY, ON_ADMIN_PORT

ROOT = "/v2"
MODEL = f"{ROOT}/models/{{model}}"
OF_A_MODEL = (MODEL, f"{MODEL}/versions/{{version}}")
# Triton's names of what is here beside the extensions that gRPC has.
EXTENSIONS = ("binary_tensor_data", "generate")
_SHARED_MEMORY = [f"{ROOT}/{kind}sharedmemory" for kind in ("system", "cuda")]
NOT_OFFERED = (
    *(
        (method, path, NO_SETTINGS)
        for path in (f"{ROOT}/trace/setting", f"{MODEL}/trace/setting", f"{ROOT}/logging")
        for method in ("GET", "POST")
    ),
    *(("GET", f"{path}{part}/status", NO_SHARED_MEMORY) for path in _SHARED_MEMORY for part in ("", "/region/{region}")),
    *(("POST", f"{path}{part}/unregister", NO_SHARED_MEMORY) for path in _SHARED_MEMORY for part in ("", "/region/{region}")),
    *(("POST", f"{path}/region/{{region}}/register", NO_SHARED_MEMORY) for path in _SHARED_MEMORY),
)

WITHOUT_OPERATORS = tuple(("POST", f"{ROOT}/repository/models/{{model}}/{do}", ON_ADMIN_PORT) for do in ("load", "unload"))

Answer = Callable[[web.Request], Awaitable[web.Response]]


class InferenceApi:
    """Answers `/v2`; a `Manner`."""

    def __init__(self, core: Core, max_message_bytes: int, origins: Origins) -> None:
        """Serve what the core does.

        Args:
            core: What answers.
            max_message_bytes: Largest answer that is made, as gRPC would send it; as JSON it has some times as many.
            origins: Whose pages may send what a browser sends without asking first.
        """
        self._core = core
        self._max_message_bytes = max_message_bytes
        self._reader = Reader(core.generation.max_characters, origins)
        self._descriptions = Descriptions(core.models, core.generation)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return what it answers as calls of somebody's."""
        yield Endpoint("GET", ROOT, self.server)
        yield Endpoint("GET", f"{ROOT}/models", self.models)
        yield Endpoint("GET", f"{ROOT}/models/stats", self.statistics)
        yield Endpoint("POST", f"{ROOT}/repository/index", self.index, self._reader.index)
        for path in OF_A_MODEL:
            yield Endpoint("GET", path, self.metadata)
            yield Endpoint("GET", f"{path}/config", self.config)
            yield Endpoint("GET", f"{path}/stats", self.statistics)
            yield Endpoint("POST", f"{path}/infer", self.infer, self._reader.infer, is_counted=True)
            yield Endpoint("POST", f"{path}/generate", self.generate, self._reader.generate, is_counted=True)
            yield Endpoint("POST", f"{path}/generate_stream", self.stream, self._reader.generate, is_counted=True)
        yield from _refused(NOT_OFFERED)

    def without_operators(self) -> Iterable[Endpoint]:
        """Return what it answers where operators have no way in."""
        return _refused(WITHOUT_OPERATORS)

    def probes(self) -> Iterable[tuple[str, Answer]]:
        """Return what it answers anybody by GET, whatever happens, without a record: path, and what is behind it."""
        yield f"{ROOT}/health/live", self.live
        yield f"{ROOT}/health/ready", self.ready
        for path in OF_A_MODEL:
            yield f"{path}/ready", self.model_ready

    async def live(self, _: web.Request) -> web.Response:
        """Say that the process answers."""
        return _json({"live": True})

    async def ready(self, _: web.Request) -> web.Response:
        """Say whether the server is ready."""
        return _json({"ready": True}) if self._core.is_ready else self._not_ready("the server")

    async def model_ready(self, request: web.Request) -> web.Response:
        """Say whether a model takes requests; one that there is not does not."""
        name, version = _model_of(request)
        try:
            is_ready = self._core.generation.model(name, version=version).engine.is_ready and not self._core.is_draining
        except ServiceError:
            is_ready = False
        return _json({"name": name, "ready": True}) if is_ready else self._not_ready("the model")

    async def server(self, _: Exchange) -> web.Response:
        """Say what the server is."""
        told = plain(server_metadata())
        return _json(told | {"extensions": [*told["extensions"], *EXTENSIONS]})

    async def models(self, exchange: Exchange) -> web.Response:
        """List the models that the caller may use, by name."""
        return _json({"models": [model.name for model in self._core.generation.models(exchange.call.caller)]})

    async def metadata(self, exchange: Exchange) -> web.Response:
        """Say what a model takes and gives."""
        return _json(plain(self._descriptions.metadata(*_model_of(exchange.http), exchange.call.caller)))

    async def config(self, exchange: Exchange) -> web.Response:
        """Say the same as Triton would."""
        return _json(plain(self._descriptions.config(*_model_of(exchange.http), exchange.call.caller))["config"])

    async def statistics(self, exchange: Exchange) -> web.Response:
        """Say what became of requests, for a model or for all."""
        return _json(plain(self._descriptions.statistics(*_model_of(exchange.http), exchange.call.caller)))

    async def index(self, exchange: Exchange) -> web.Response:
        """List every version of every model that the caller may use."""
        return _json(plain(self._descriptions.index(exchange.message, exchange.call.caller))["models"])

    async def infer(self, exchange: Exchange) -> web.Response:
        """Answer with the answers to all texts, as tensors."""
        return await to_answer(await self._whole(exchange), exchange.message.is_binary)

    async def generate(self, exchange: Exchange) -> web.Response:
        """Answer with the same, each output by its name."""
        return web.Response(body=await to_generated(await self._whole(exchange)), content_type=JSON)

    async def stream(self, exchange: Exchange) -> web.StreamResponse:
        """Answer one text in pieces, a server-sent event each; the last one says all that there is to say of the whole, too."""
        posted: Posted = exchange.message
        inference, call, events = posted.inference, exchange.call, exchange.stream()
        if len(inference) > 1:
            if inference.is_streamed:
                raise InvalidRequest(STREAM, f"goes with one text only, and there are {len(inference)}")
            last = await self._answering(exchange).whole(inference, call)
        else:

            async def write(piece: inference_pb2.ModelInferResponse) -> None:
                await events.send((await to_generated(piece)).decode())

            last = await self._answering(exchange).in_pieces(inference, call.request_id, call, write)
        return await events.send((await to_generated(last)).decode())

    def refuse(self, error: ServiceError, request_id: str) -> web.Response:
        """See `Manner`."""
        return web.Response(body=_told(error), status=status_of(error), content_type=JSON, headers=headers_of(error))

    def error_event(self, error: ServiceError, request_id: str) -> tuple[str, str]:
        """See `Manner`."""
        return "", _told(error).decode()

    async def _whole(self, exchange: Exchange) -> inference_pb2.ModelInferResponse:
        inference = exchange.message.inference
        if inference.is_streamed:
            raise InvalidRequest(STREAM, "goes with generate_stream only")
        return await self._answering(exchange).whole(inference, exchange.call)

    def _answering(self, exchange: Exchange) -> Answering:
        items = Items(self._core.calls.records, exchange.call, own_ending)
        return Answering(self._core, items, lambda: exchange.remaining_seconds, self._max_message_bytes)

    def _not_ready(self, what: str) -> web.Response:
        return self.refuse(NotReady(f"{what} is not ready", RETRY_SECONDS), "")


def _model_of(request: web.Request) -> tuple[str, str]:
    """Return name and version of the model that a path says; empty for none."""
    return request.match_info.get("model", ""), request.match_info.get("version", "")


def _refused(what: Iterable[tuple[str, str, str]]) -> Iterable[Endpoint]:
    return [Endpoint(method, path, _refusing(reason)) for method, path, reason in what]


def _refusing(reason: str) -> Callable[[Exchange], Awaitable[NoReturn]]:
    """Return the behaviour of what is not offered."""

    async def refuse(_: Exchange) -> NoReturn:
        raise NotOffered(reason)

    return refuse


def _told(error: ServiceError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def _json(told: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(told), content_type=JSON, status=HTTPStatus.OK)
