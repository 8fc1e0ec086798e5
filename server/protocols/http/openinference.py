"""The Open Inference Protocol over HTTP, with Triton's binary tensor data and generate extensions; see docs/call.md."""

import math
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, NotOffered, NotReady, ServiceError
from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.http.middleware import own_ending
from dragoman.server.protocols.http.native import carried_out
from dragoman.server.protocols.http.requests import Endpoint, Exchange, run_by_size
from dragoman.server.protocols.http.responses import JSON, OPENINFERENCE_ERRORS, json_response
from dragoman.server.protocols.json_text import decode_json
from dragoman.server.protocols.openinference.answers import Answering
from dragoman.server.protocols.openinference.descriptions import Descriptions, server_metadata
from dragoman.server.protocols.openinference.requests import (
    OUTPUTS,
    STREAM,
    TEXT_INPUT,
    Inference,
    RawRequest,
    check_counts,
    to_inference,
)
from dragoman.server.protocols.openinference.service import (
    NO_SETTINGS,
    NO_SHARED_MEMORY,
    ON_ADMIN_PORT,
    load_order,
    unload_order,
)
from dragoman.server.protocols.openinference.tensors import (
    DATATYPES,
    Datatype,
    Input,
    from_raw,
    from_values,
    shown,
)
from dragoman.server.service.administration import OperatorCalls, Order
from dragoman.server.service.callers import RETRY_SECONDS
from dragoman.server.service.context import check_request_id
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.service import Service

ROOT = "/v2"
MODEL = f"{ROOT}/models/{{model}}"
MODEL_PATHS = (MODEL, f"{MODEL}/versions/{{version}}")
CHANGE = f"{ROOT}/repository/models/{{model}}"
# Triton's names of extensions that only HTTP has.
EXTENSIONS = ("binary_tensor_data", "generate")
BINARY = "application/octet-stream"
# Header with the number of JSON bytes before binary tensor data.
LENGTH_KEY = "Inference-Header-Content-Length"
MAX_LENGTH_DIGITS = 10
BINARY_OUTPUT, BINARY_DATA, BINARY_SIZE = "binary_data_output", "binary_data", "binary_data_size"

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

Response = inference_pb2.ModelInferResponse
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
    model_name: str | None = None  # sent by KServe's client


class _Index(Struct, forbid_unknown_fields=True):
    ready: bool = False
    repository_name: str = ""


class _Change(Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class InferenceApi:
    """Endpoints below `/v2`; `max_message_bytes` limits a response's size in gRPC's encoding."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._service, self._max_message_bytes = service, max_message_bytes
        self._descriptions = Descriptions(service.models, service.generation)

    def endpoints(self, operators: OperatorCalls | None) -> Iterable[Endpoint]:
        """Yield the endpoints; without `operators`, loading and unloading are refused."""
        get = partial(Endpoint, "GET", errors=OPENINFERENCE_ERRORS)
        post = partial(Endpoint, "POST", errors=OPENINFERENCE_ERRORS)
        yield get(ROOT, self.server)
        yield get(f"{ROOT}/models", self.models)
        yield get(f"{ROOT}/models/stats", self.statistics)
        yield post(f"{ROOT}/repository/index", self.index, read=_read_index)
        for path in MODEL_PATHS:
            yield get(path, self.metadata)
            yield get(f"{path}/config", self.config)
            yield get(f"{path}/stats", self.statistics)
            yield post(f"{path}/infer", self.infer, read=self.read_infer, is_counted=True)
            yield post(f"{path}/generate", self.generate, read=self.read_generate, is_counted=True)
            yield post(f"{path}/generate_stream", self.stream, read=self.read_generate, is_counted=True)
        for method, path, reason in NOT_OFFERED:
            yield Endpoint(method, path, _refusing(reason), OPENINFERENCE_ERRORS)
        for verb, to_order in (("load", load_order), ("unload", unload_order)):
            if operators is None:
                yield post(f"{CHANGE}/{verb}", _refusing(ON_ADMIN_PORT))
            else:  # a drain does not wait for changes
                change = _changing(operators, to_order)
                yield post(f"{CHANGE}/{verb}", change, read=_read_change, access="operators", is_awaited=False)

    def probes(self) -> Iterable[tuple[str, Callable[[web.Request], Awaitable[web.Response]]]]:
        """Yield paths and handlers that need no token and are not logged."""
        yield f"{ROOT}/health/live", self.live
        yield f"{ROOT}/health/ready", self.ready
        for path in MODEL_PATHS:
            yield f"{path}/ready", self.model_ready

    async def live(self, _: web.Request) -> web.Response:
        """Report that the process is alive."""
        return json_response({"live": True})

    async def ready(self, _: web.Request) -> web.Response:
        """Report whether the server is ready."""
        return json_response({"ready": True}) if self._service.is_ready else _not_ready("the server")

    async def model_ready(self, request: web.Request) -> web.Response:
        """Report whether a model is ready; an unknown model is not."""
        name, version = _model_of(request)
        try:
            is_ready = self._service.generation.model(name, version=version).engine.is_ready and not self._service.is_draining
        except ServiceError:
            is_ready = False
        return json_response({"name": name, "ready": True}) if is_ready else _not_ready("the model")

    async def server(self, _: Exchange) -> web.Response:
        """Return the server's name, version and extensions."""
        metadata = to_builtins(server_metadata())
        return json_response(metadata | {"extensions": [*metadata["extensions"], *EXTENSIONS]})

    async def models(self, exchange: Exchange) -> web.Response:
        """Return the names of the models that the caller may use."""
        return json_response({"models": [model.name for model in self._service.generation.models(exchange.call.caller)]})

    async def metadata(self, exchange: Exchange) -> web.Response:
        """Return a model's inputs and outputs."""
        return json_response(to_builtins(self._descriptions.metadata(*_model_of(exchange.http), exchange.call.caller)))

    async def config(self, exchange: Exchange) -> web.Response:
        """Return a model's configuration in Triton's format."""
        return json_response(to_builtins(self._descriptions.config(*_model_of(exchange.http), exchange.call.caller))["config"])

    async def statistics(self, exchange: Exchange) -> web.Response:
        """Return request counts and durations, of one model or of all."""
        return json_response(to_builtins(self._descriptions.statistics(*_model_of(exchange.http), exchange.call.caller)))

    async def index(self, exchange: Exchange) -> web.Response:
        """Return all versions of the models that the caller may use."""
        return json_response(to_builtins(self._descriptions.index(exchange.message, exchange.call.caller))["models"])

    async def infer(self, exchange: Exchange) -> web.Response:
        """Return the answers to all texts as tensors, in JSON or as binary data."""
        response = await self._whole(exchange)
        head, tensors = await run_by_size(_size(response), write_tensors, response, exchange.message.binary_outputs)
        if not tensors:
            return web.Response(body=head, content_type=JSON)
        return web.Response(body=b"".join((head, *tensors)), content_type=BINARY, headers={LENGTH_KEY: str(len(head))})

    async def generate(self, exchange: Exchange) -> web.Response:
        """Return the answers to all texts, each output by its name."""
        return web.Response(body=await _by_name(await self._whole(exchange)), content_type=JSON)

    async def stream(self, exchange: Exchange) -> web.StreamResponse:
        """Stream one text's answer as server-sent events, the last with all outputs; several texts take one event."""
        inference, call = exchange.message, exchange.call
        if len(inference) > 1:
            if inference.is_streamed:
                raise InvalidRequest(STREAM, f"goes with one text only, and there are {len(inference)}")
            last = await self._answering(exchange).whole(inference, call)
        else:

            async def write(piece: Response) -> None:
                await exchange.send_event((await _by_name(piece)).decode())

            last = await self._answering(exchange).in_pieces(inference, call.request_id, call, write)
        return await exchange.send_event((await _by_name(last)).decode())

    async def read_infer(self, request: web.Request, body: bytes) -> Inference:
        """Decode an infer request."""
        return await self._read(request, body, decode_infer, request.headers.get(LENGTH_KEY))

    async def read_generate(self, request: web.Request, body: bytes) -> Inference:
        """Decode a generate request."""
        return await self._read(request, body, decode_generate)

    async def _read(self, request: web.Request, body: bytes, decode: Callable[..., Inference], *more: object) -> Inference:
        longest = self._service.generation.max_characters() if len(body) > LARGE_BYTES else None
        return await run_by_size(len(body), decode, body, _model_of(request), longest, *more)

    async def _whole(self, exchange: Exchange) -> Response:
        inference = exchange.message
        if inference.is_streamed:
            raise InvalidRequest(STREAM, "goes with generate_stream only")
        return await self._answering(exchange).whole(inference, exchange.call)

    def _answering(self, exchange: Exchange) -> Answering:
        items = ItemRecords(self._service.calls, exchange.call, own_ending)
        return Answering(self._service, items, lambda: exchange.remaining_seconds, self._max_message_bytes)


def _model_of(request: web.Request) -> tuple[str, str]:
    """Return the model's name and version in the path; empty if absent."""
    return request.match_info.get("model", ""), request.match_info.get("version", "")


def _not_ready(what: str) -> web.Response:
    return OPENINFERENCE_ERRORS.response(NotReady(f"{what} is not ready", RETRY_SECONDS))


def _refusing(reason: str) -> Callable[[Exchange], Awaitable[NoReturn]]:
    async def refuse(_: Exchange) -> NoReturn:
        raise NotOffered(reason)

    return refuse


async def _read_index(_: web.Request, body: bytes) -> inference_pb2.RepositoryIndexRequest:
    asked = decode_json(body, _Index) if body else _Index()
    return inference_pb2.RepositoryIndexRequest(ready=asked.ready, repository_name=asked.repository_name)


async def _read_change(_: web.Request, body: bytes) -> _Change:
    return decode_json(body, _Change) if body else _Change()


def _changing(
    operators: OperatorCalls, to_order: Callable[[str, str, Iterable[str]], Order]
) -> Callable[[Exchange], Awaitable[web.Response]]:
    async def change(exchange: Exchange) -> web.Response:
        order = to_order(exchange.http.match_info["model"], "", exchange.message.parameters)
        await carried_out(operators.carry_out, exchange, order)
        return web.Response()

    return change


# Requests


def decode_infer(body: bytes, model: tuple[str, str], max_characters: int | None, length: str | None = None) -> Inference:
    """Decode an infer request or raise `InvalidRequest`; `length` is the header `LENGTH_KEY`."""
    head = _head_length(length, len(body))
    asked = decode_json(memoryview(body)[:head], _Infer)
    if asked.model_name and asked.model_name != model[0]:
        raise InvalidRequest("model_name", f"{shown(asked.model_name)} is not that of the path")
    outputs, parameters = asked.outputs or [], dict(asked.parameters or {})
    is_binary_else = _flag(BINARY_OUTPUT, parameters.pop(BINARY_OUTPUT, False))
    check_counts(len(asked.inputs), len(outputs), len(parameters))
    binary = dict.fromkeys([output.name for output in outputs] or OUTPUTS, is_binary_else)
    for output in outputs:
        if output.parameters and BINARY_DATA in output.parameters:
            binary[output.name] = _flag(f"outputs: {BINARY_DATA}", output.parameters.pop(BINARY_DATA))
    request = RawRequest(
        check_request_id("id", asked.id or ""),
        *model,
        parameters,
        _inputs(asked.inputs, memoryview(body)[head:]),
        [(output.name, tuple(output.parameters or ())) for output in outputs],
        frozenset(name for name, is_binary in binary.items() if is_binary),
    )
    return to_inference(request, len(body), max_characters)


def decode_generate(body: bytes, model: tuple[str, str], max_characters: int | None) -> Inference:
    """Decode a generate request, parameters in `parameters` or beside it, or raise `InvalidRequest`."""
    content = decode_json(body, dict[str, Any])
    request_id, text, more = content.pop("id", ""), content.pop(TEXT_INPUT, UNSET), content.pop("parameters", None)
    if not isinstance(request_id, str):
        raise InvalidRequest("id", "is not a text")
    if more is not None and not isinstance(more, dict):
        raise InvalidRequest("parameters", "is no JSON object")
    for name in content.keys() & (more or {}).keys():
        raise InvalidRequest("parameters", f"{shown(name)} is given twice, in them and beside them")
    if text is UNSET:
        raise InvalidRequest(TEXT_INPUT, "is missing")
    parameters = content | (more or {})
    check_counts(1, 0, len(parameters))
    texts = text if isinstance(text, list) else [text]
    source = Input(TEXT_INPUT, "BYTES", [len(texts)], (), lambda datatype, count: from_values(TEXT_INPUT, datatype, texts, count))
    request = RawRequest(check_request_id("id", request_id), *model, parameters, [source])
    return to_inference(request, len(body), max_characters)


def _head_length(length: str | None, num_bytes: int) -> int:
    """Return the number of JSON bytes at the start of a body."""
    if length is None:
        return num_bytes
    is_number = length.isascii() and length.isdecimal() and len(length) <= MAX_LENGTH_DIGITS
    if not is_number or not 0 < int(length) <= num_bytes:
        raise InvalidRequest(LENGTH_KEY, f"is the number of bytes of the JSON that the body begins with; it has {num_bytes} in all")
    return int(length)


def _inputs(tensors: Sequence[_Tensor], rest: memoryview) -> list[Input]:
    """Return input tensors; `rest` has the binary contents in order."""
    inputs, position = [], 0
    for number, tensor in enumerate(tensors):
        parameters = dict(tensor.parameters or {})
        if BINARY_SIZE not in parameters:
            content: Callable[[Datatype, int], Sequence[Any]] = partial(_listed, tensor)
        else:
            size, name = parameters.pop(BINARY_SIZE), f"inputs[{number}]"
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest) - position:
                raise InvalidRequest(name, f"{BINARY_SIZE} is a number of bytes; {len(rest) - position} are left behind the JSON")
            if tensor.data is not UNSET:
                raise InvalidRequest(name, "its content is in data and behind the JSON; one of them is enough")
            content = partial(_raw, tensor, bytes(rest[position : position + size]))
            position += size
        inputs.append(Input(tensor.name, tensor.datatype, tensor.shape, tuple(parameters), content))
    if position < len(rest):
        raise InvalidRequest("body", f"has {len(rest) - position} bytes behind the JSON that are of no input")
    return inputs


def _raw(tensor: _Tensor, raw: bytes, datatype: Datatype, count: int) -> Sequence[Any]:
    return from_raw(tensor.name, datatype, raw, count)


def _listed(tensor: _Tensor, datatype: Datatype, count: int) -> Sequence[Any]:
    """Return a tensor's elements from JSON: a flat list or a list of rows."""
    data, shape = tensor.data, tensor.shape
    if not isinstance(data, list):
        raise InvalidRequest(tensor.name, f"has no content: neither a list in data nor {BINARY_SIZE}")
    if len(shape) > 1 and data and isinstance(data[0], list):
        if len(data) != shape[0] or any(not isinstance(row, list) or len(row) != shape[1] for row in data):
            raise InvalidRequest(tensor.name, f"its content has not the shape {shape}")
        data = [element for row in data for element in row]
    return from_values(tensor.name, datatype, data, count)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, "is not true or false")
    return value


# Responses


def to_builtins(message: Any) -> dict[str, Any]:
    """Return a message as builtins, with proto field names and, unlike canonical JSON, 64-bit integers as numbers."""

    def value(field: Any, content: Any) -> Any:
        if field.message_type is not None:
            return to_builtins(content)
        return content if field.enum_type is None else field.enum_type.values_by_number[content].name

    return {
        field.name: [value(field, each) for each in content] if field.is_repeated else value(field, content)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
        for content in (getattr(message, field.name),)
    }


def write_tensors(response: Response, binary: Container[str]) -> tuple[bytes, list[bytes]]:
    """Return a response's JSON, and the contents of outputs in `binary`, which follow it."""
    outputs, tensors = [], []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if output.name in binary:
            tensors.append(raw)
            outputs.append(tensor | {"parameters": {BINARY_SIZE: len(raw)}})
        else:
            outputs.append(tensor | {"data": list(_values(output, raw))})
    return msgspec.json.encode(_envelope(response) | {"outputs": outputs}), tensors


async def _by_name(response: Response) -> bytes:
    return await run_by_size(_size(response), write_by_name, response)


def write_by_name(response: Response) -> bytes:
    """Return a response's JSON with each output by name: a value, or a list of several."""
    content = _envelope(response)
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = list(_values(output, raw))
        content[output.name] = values[0] if len(values) == 1 else values
    return msgspec.json.encode(content)


def _size(response: Response) -> int:
    return sum(map(len, response.raw_output_contents))


def _envelope(response: Response) -> dict[str, Any]:
    content = {"id": response.id, "model_name": response.model_name}
    return content | ({"model_version": response.model_version} if response.model_version else {})


def _values(output: Response.InferOutputTensor, raw: bytes) -> Iterator[Any]:
    """Yield elements as JSON values; BYTES become text."""
    for element in from_raw(output.name, DATATYPES[output.datatype], raw, math.prod(output.shape)):
        yield element.decode(errors="replace") if isinstance(element, bytes) else element
