"""The Open Inference Protocol over HTTP, with Triton's extensions."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, field

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, NotOffered, NotReady, ServiceError
from dragoman.server.protocols.bulk import BulkEnvelope, Items
from dragoman.server.protocols.http.middleware import own_ending
from dragoman.server.protocols.http.native import carried_out
from dragoman.server.protocols.http.origins import Origins
from dragoman.server.protocols.http.requests import Endpoint, Exchange, decode
from dragoman.server.protocols.http.responses import HttpRefusal, headers_of, status_of
from dragoman.server.protocols.openinference.answers import Answering
from dragoman.server.protocols.openinference.descriptions import Descriptions, server_metadata
from dragoman.server.protocols.openinference.requests import STREAM, TEXT_INPUT, Inference, check_counts, to_inference
from dragoman.server.protocols.openinference.service import NO_SETTINGS, NO_SHARED_MEMORY, ON_ADMIN_PORT, load_order, unload_order
from dragoman.server.protocols.openinference.tensors import (
    DATATYPES,
    Asked,
    Datatype,
    Input,
    Wanted,
    elements_of,
    from_raw,
    from_values,
    shown,
)
from dragoman.server.service.administration import CarryOut, Order
from dragoman.server.service.ids import check_request_id
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.outcomes import RETRY_SECONDS
from dragoman.server.service.sentences import on_thread
from dragoman.server.service.service import Core

BINARY_OUTPUT, BINARY_DATA, BINARY_SIZE = "binary_data_output", "binary_data", "binary_data_size"
# Digits of a length of a body.
MAX_LENGTH_DIGITS = 10

Dimension = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Tensor(Struct, forbid_unknown_fields=True):
    name: str
    shape: list[Dimension]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Any = UNSET


class _Output(Struct, forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] | None = None


class _Infer(Struct, forbid_unknown_fields=True):
    inputs: list[_Tensor]
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None
    id: str | None = None
    model_name: str | None = None  # KServe's client says it again


class _Index(Struct, forbid_unknown_fields=True):
    ready: bool = False
    repository_name: str = ""


class Posted(BulkEnvelope):
    """A request as it was read.

    Attributes:
        inference: What it asks for.
    """

    __slots__ = ("_binary", "_is_binary_else", "inference")

    def __init__(self, inference: Inference, binary: dict[str, bool] | None = None, is_binary_else: bool = False) -> None:
        """Hold a request.

        Args:
            inference: What it asks for.
            binary: Whether outputs are wanted as bytes, of those that say so.
            is_binary_else: Whether the others are.
        """
        self.inference = inference
        self._binary, self._is_binary_else = binary or {}, is_binary_else

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.inference)

    @property
    def request_id(self) -> str:
        """Its id; empty if it has none."""
        return self.inference.request_id

    def is_binary(self, name: str) -> bool:
        """Whether an output is wanted as bytes."""
        return self._binary.get(name, self._is_binary_else)


class Reader:
    """Reads bodies."""

    def __init__(self, max_characters: Callable[[], int], origins: Origins) -> None:
        """Read what pages of some origins send, and whoever is no page.

        Args:
            max_characters: Says how many characters of a text a model could use; of a large request no more are kept.
            origins: Whose pages may send what a browser sends without asking first.
        """
        self._max_characters, self._origins = max_characters, origins

    async def infer(self, request: web.Request, body: bytes) -> Posted:
        """Return a request for inference.

        Raises:
            InvalidRequest: If it cannot be understood.
            HttpRefusal: If a page sends it that may not.
        """
        said = request.headers.get(LENGTH_KEY)
        return await self._read(request, body, lambda model, longest: _read_infer(body, said, model, longest))

    async def generate(self, request: web.Request, body: bytes) -> Posted:
        """Return a request in Triton's shorter form; errors as `infer`."""
        return await self._read(request, body, lambda model, longest: _read_generate(body, model, longest))

    async def index(self, request: web.Request, body: bytes) -> inference_pb2.RepositoryIndexRequest:
        """Return a request for the index; an empty body asks for all of it. Errors as `infer`."""
        self._check(request)
        asked = decode(body, _Index) if body else _Index()
        return inference_pb2.RepositoryIndexRequest(ready=asked.ready, repository_name=asked.repository_name)

    async def _read(self, request: web.Request, body: bytes, read: Callable[[tuple[str, str], int | None], Posted]) -> Posted:
        self._check(request)
        model = request.match_info["model"], request.match_info.get("version", "")
        if len(body) <= LARGE_BYTES:
            return read(model, None)
        return await on_thread(read, model, self._max_characters())

    def _check(self, request: web.Request) -> None:
        # Triton's client does not say what its body is, and curl says that it is a form. Of such a request, unlike of one that
        # says JSON or bytes, a browser does not ask first whether a page of another origin may send it.
        is_said = "Content-Type" in request.headers and request.content_type in (JSON, BINARY)
        if not is_said and not self._origins.is_trusted(request):
            raise HttpRefusal(HTTPStatus.FORBIDDEN, "Origin: pages of other origins may send this if http_allowed_origins has them")


def _read_infer(body: bytes, said: str | None, model: tuple[str, str], longest: int | None) -> Posted:
    head = _head_length(said, len(body))
    asked = decode(memoryview(body)[:head], _Infer)
    if asked.model_name and asked.model_name != model[0]:
        raise InvalidRequest("model_name", f"{shown(asked.model_name)} is not that of the path")
    outputs, parameters = asked.outputs or [], dict(asked.parameters or {})
    is_binary_else = _flag(BINARY_OUTPUT, parameters.pop(BINARY_OUTPUT, False))
    check_counts(len(asked.inputs), len(outputs), len(parameters))
    binary = {
        output.name: _flag(f"outputs: {BINARY_DATA}", output.parameters.pop(BINARY_DATA))
        for output in outputs
        if output.parameters and BINARY_DATA in output.parameters
    }
    request = Asked(
        check_request_id("id", asked.id or ""),
        *model,
        parameters,
        _inputs(asked.inputs, memoryview(body)[head:]),
        [Wanted(output.name, tuple(output.parameters or ())) for output in outputs],
    )
    return Posted(to_inference(request, len(body), longest), binary, is_binary_else)


def _read_generate(body: bytes, model: tuple[str, str], longest: int | None) -> Posted:
    """Return a request that has its text and whatever else by name, the latter in `parameters` or beside them."""
    told = decode(body, dict[str, Any])
    request_id, text, more = told.pop("id", ""), told.pop(TEXT_INPUT, UNSET), told.pop("parameters", None)
    if not isinstance(request_id, str):
        raise InvalidRequest("id", "is not a text")
    if more is not None and not isinstance(more, dict):
        raise InvalidRequest("parameters", "is no JSON object")
    for name in told.keys() & (more or {}).keys():
        raise InvalidRequest("parameters", f"{shown(name)} is given twice, in them and beside them")
    if text is UNSET:
        raise InvalidRequest(TEXT_INPUT, "is missing")
    parameters = told | (more or {})
    check_counts(1, 0, len(parameters))
    texts = text if isinstance(text, list) else [text]
    source = Input(TEXT_INPUT, "BYTES", [len(texts)], (), lambda datatype, count: from_values(TEXT_INPUT, datatype, texts, count))
    return Posted(to_inference(Asked(check_request_id("id", request_id), *model, parameters, [source]), len(body), longest))


def _head_length(said: str | None, num_bytes: int) -> int:
    """Return how many bytes of a body are JSON."""
    if said is None:
        return num_bytes
    is_number = said.isascii() and said.isdecimal() and len(said) <= MAX_LENGTH_DIGITS
    if not is_number or not 0 < int(said) <= num_bytes:
        raise InvalidRequest(LENGTH_KEY, f"is the number of bytes of the JSON that the body begins with; it has {num_bytes} in all")
    return int(said)


def _inputs(tensors: Sequence[_Tensor], rest: memoryview) -> list[Input]:
    """Return inputs with their content, that of some from what follows the JSON, in their order."""
    inputs, position = [], 0
    for number, tensor in enumerate(tensors):
        parameters = dict(tensor.parameters or {})
        if BINARY_SIZE not in parameters:
            inputs.append(Input(tensor.name, tensor.datatype, tensor.shape, tuple(parameters), _listed(tensor)))
            continue
        size, field = parameters.pop(BINARY_SIZE), f"inputs[{number}]"
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest) - position:
            raise InvalidRequest(field, f"{BINARY_SIZE} is a number of bytes; {len(rest) - position} are left behind the JSON")
        if tensor.data is not UNSET:
            raise InvalidRequest(field, "its content is in data and behind the JSON; one of them is enough")
        raw = bytes(rest[position : position + size])
        inputs.append(Input(tensor.name, tensor.datatype, tensor.shape, tuple(parameters), _raw(tensor.name, raw)))
        position += size
    if position < len(rest):
        raise InvalidRequest("body", f"has {len(rest) - position} bytes behind the JSON that are of no input")
    return inputs


def _raw(name: str, raw: bytes) -> Callable[[Datatype, int], Sequence[Any]]:
    return lambda datatype, count: from_raw(name, datatype, raw, count)


def _listed(tensor: _Tensor) -> Callable[[Datatype, int], Sequence[Any]]:
    """Return what takes the content of a tensor from JSON: a list of its elements, or of its rows."""

    def content(datatype: Datatype, count: int) -> Sequence[Any]:
        data, shape = tensor.data, tensor.shape
        if not isinstance(data, list):
            raise InvalidRequest(tensor.name, f"has no content: neither a list in data nor {BINARY_SIZE}")
        if len(shape) > 1 and data and isinstance(data[0], list):
            if len(data) != shape[0] or any(not isinstance(row, list) or len(row) != shape[1] for row in data):
                raise InvalidRequest(tensor.name, f"its content has not the shape {shape}")
            data = [element for row in data for element in row]
        return from_values(tensor.name, datatype, data, count)

    return content


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, "is not true or false")
    return value


JSON, BINARY = "application/json", "application/octet-stream"
# Bytes of the JSON of a body that has tensors behind it.
LENGTH_KEY = "Inference-Header-Content-Length"

Response = inference_pb2.ModelInferResponse
Kind = TypeVar("Kind")


def plain(message: Any) -> dict[str, Any]:
    """Return a message of the protocol with the contract's names; integers are numbers, as Triton has them."""
    return {
        field.name: _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_one(field, each) for each in value]
    return _one(field, value)


def _one(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name


async def to_answer(response: Response, is_binary: Callable[[str], bool]) -> web.Response:
    """Return what answers a request for inference; a large one is written beside others' work.

    Args:
        response: As gRPC would send it.
        is_binary: Says of an output by its name whether it is wanted as bytes.
    """
    binary = {output.name for output in response.outputs if is_binary(output.name)}
    head, tensors = await _beside(response, lambda: _with_tensors(response, binary))
    if not binary:
        return web.Response(body=head, content_type=JSON)
    return web.Response(body=b"".join((head, *tensors)), content_type=BINARY, headers={LENGTH_KEY: str(len(head))})


async def to_generated(response: Response) -> bytes:
    """Return JSON that has each output by its name: a value, or a list where there are several."""
    return await _beside(response, lambda: _by_name(response))


async def _beside(response: Response, write: Callable[[], Kind]) -> Kind:
    is_large = sum(map(len, response.raw_output_contents)) > LARGE_BYTES
    return await on_thread(write) if is_large else write()


def _with_tensors(response: Response, binary: set[str]) -> tuple[bytes, list[bytes]]:
    """Return JSON, and the content of outputs that is bytes."""
    outputs, tensors = [], []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        told: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if output.name in binary:
            tensors.append(raw)
            outputs.append(told | {"parameters": {"binary_data_size": len(raw)}})
        else:
            outputs.append(told | {"data": list(_values(output.datatype, raw))})
    return msgspec.json.encode(_envelope(response) | {"outputs": outputs}), tensors


def _by_name(response: Response) -> bytes:
    told = _envelope(response)
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = list(_values(output.datatype, raw))
        told[output.name] = values[0] if len(values) == 1 else values
    return msgspec.json.encode(told)


def _envelope(response: Response) -> dict[str, Any]:
    told = {"id": response.id, "model_name": response.model_name}
    return told | ({"model_version": response.model_version} if response.model_version else {})


def _values(datatype: str, raw: bytes) -> Iterator[Any]:
    """Yield elements as JSON has them; those of BYTES are texts."""
    for element in elements_of(DATATYPES[datatype], raw):
        yield element.decode(errors="replace") if isinstance(element, bytes) else element


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
