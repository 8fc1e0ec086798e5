"""The inference.GRPCInferenceService service: request parser, RPCs, and request streams."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

from google.protobuf.message import DecodeError
from structlog.contextvars import bind_contextvars

from dragoman.inference import inference_pb2, inference_pb2_grpc
from dragoman.server.errors import InvalidRequest, NotOffered, ServiceError
from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.grpc.interceptors import (
    PROBE,
    QUESTION,
    REQUEST,
    Context,
    Methods,
    current_call,
    declared,
    own_ending,
)
from dragoman.server.protocols.grpc.reading import CANNOT_BE_PARSED, Refused, note_large
from dragoman.server.protocols.grpc.streams import RequestStream
from dragoman.server.protocols.openinference.answers import Answering, streamed, to_failure, to_response
from dragoman.server.protocols.openinference.descriptions import Descriptions, server_metadata
from dragoman.server.protocols.openinference.requests import STREAM, Inference, RawRequest, check_counts, to_inference
from dragoman.server.protocols.openinference.tensors import Datatype, Input, from_contents, from_raw, shown
from dragoman.server.service.administration import Order
from dragoman.server.service.context import Call, check_request_id, new_incident
from dragoman.server.service.service import Service

# HTTP parameters that KServe's client sends over gRPC too.
REST_PARAMETERS = ("binary_data", "binary_data_output", "binary_data_size")
# Ignored when unloading: no model depends on another.
UNLOAD_DEPENDENTS = "unload_dependents"
ON_ADMIN_PORT = "operators load and unload models, at admin_port over gRPC, and here with http_admin over HTTP"
NO_SHARED_MEMORY = "shared memory is not offered; send the content of tensors with them"
NO_SETTINGS = "settings of traces and logs are the server's own, and do not change while it runs"
NOT_OFFERED = {
    "RepositoryModelLoad": ON_ADMIN_PORT,
    "RepositoryModelUnload": ON_ADMIN_PORT,
    **{f"{kind}SharedMemory{do}": NO_SHARED_MEMORY for kind in ("System", "Cuda") for do in ("Status", "Register", "Unregister")},
    "TraceSetting": NO_SETTINGS,
    "LogSettings": NO_SETTINGS,
}

Message: TypeAlias = Inference | Refused


def infer_parser(parse: Callable[[bytes], Any], max_characters: Callable[[], int]) -> Callable[[bytes], Message]:
    """Return a parser of `ModelInferRequest` that keeps nothing of the message."""

    def parse_or_refuse(data: bytes) -> Message:
        longest = max_characters() if note_large(data) else None
        request_id = ""
        try:
            message = parse(data)
            request_id = check_request_id("id", message.id)
            return to_inference(to_raw_request(message), len(data), longest)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        except InvalidRequest as error:
            return Refused(error.with_traceback(None), request_id)  # its frames would keep the message

    return parse_or_refuse


def to_raw_request(message: inference_pb2.ModelInferRequest) -> RawRequest:
    """Return a message's content, its id already checked; raise `InvalidRequest` for too many entries or missing raw contents."""
    num_inputs, num_raw = len(message.inputs), len(message.raw_input_contents)
    check_counts(num_inputs, len(message.outputs), len(message.parameters))
    if num_raw and num_raw != num_inputs:
        raise InvalidRequest("raw_input_contents", f"{num_raw} for {num_inputs} inputs; all of them have one, or none has")
    raws: Sequence[bytes | None] = message.raw_input_contents if num_raw else [None] * num_inputs
    return RawRequest(
        message.id,
        message.model_name,
        message.model_version,
        {key: _value(key, parameter) for key, parameter in message.parameters.items() if key not in REST_PARAMETERS},
        [_input(tensor, raw) for tensor, raw in zip(message.inputs, raws, strict=True)],
        [(output.name, _names(output.parameters)) for output in message.outputs],
    )


def _input(tensor: inference_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Input:
    def content(datatype: Datatype, count: int) -> Sequence[Any]:
        if raw is None:
            return from_contents(tensor.name, datatype, tensor.contents, count)
        if tensor.HasField("contents"):
            raise InvalidRequest(tensor.name, "its content is in raw_input_contents and in contents; one of them is enough")
        return from_raw(tensor.name, datatype, raw, count)

    return Input(tensor.name, tensor.datatype, tensor.shape, _names(tensor.parameters), content)


def _names(parameters: Iterable[str]) -> tuple[str, ...]:
    return tuple(key for key in parameters if key not in REST_PARAMETERS)


def _value(name: str, parameter: inference_pb2.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidRequest("parameters", f"{shown(name)} has no value that is known")
    return getattr(parameter, choice)


INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_INFER = replace(REQUEST, parser=infer_parser)
# Probes need no caller, like those of the health service.
OPEN_INFERENCE_METHODS: Methods = declared(
    INFERENCE, QUESTION, ServerLive=PROBE, ServerReady=PROBE, ModelReady=PROBE, ModelInfer=_INFER, ModelStreamInfer=_INFER
)


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves every RPC of the service; the protocol defines the method names."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._service = service
        self._max_message_bytes = max_message_bytes
        self._descriptions = Descriptions(service.models, service.generation)
        for name, reason in NOT_OFFERED.items():
            setattr(self, name, _refusing(reason))

    async def ServerLive(self, _: inference_pb2.ServerLiveRequest, context: Context) -> inference_pb2.ServerLiveResponse:
        """Report that the process is alive."""
        return inference_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, _: inference_pb2.ServerReadyRequest, context: Context) -> inference_pb2.ServerReadyResponse:
        """Report whether the server is ready."""
        return inference_pb2.ServerReadyResponse(ready=self._service.is_ready)

    async def ModelReady(self, request: inference_pb2.ModelReadyRequest, context: Context) -> inference_pb2.ModelReadyResponse:
        """Report whether a model is ready; an unknown model is not."""
        try:
            is_ready = self._service.generation.model(request.name, version=request.version).engine.is_ready
        except ServiceError:
            is_ready = False
        return inference_pb2.ModelReadyResponse(ready=is_ready and not self._service.is_draining)

    async def ServerMetadata(
        self, _: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        """Return the server's name, version and extensions."""
        return server_metadata()

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """Return a model's inputs and outputs."""
        return self._descriptions.metadata(request.name, request.version, current_call.get().caller)

    async def ModelConfig(self, request: inference_pb2.ModelConfigRequest, context: Context) -> inference_pb2.ModelConfigResponse:
        """Return a model's configuration in Triton's format."""
        return self._descriptions.config(request.name, request.version, current_call.get().caller)

    async def ModelStatistics(
        self, request: inference_pb2.ModelStatisticsRequest, context: Context
    ) -> inference_pb2.ModelStatisticsResponse:
        """Return request counts and durations."""
        return self._descriptions.statistics(request.name, request.version, current_call.get().caller)

    async def RepositoryIndex(
        self, request: inference_pb2.RepositoryIndexRequest, context: Context
    ) -> inference_pb2.RepositoryIndexResponse:
        """Return all versions of the models that the caller may use."""
        return self._descriptions.index(request, current_call.get().caller)

    async def ModelInfer(self, inference: Inference, context: Context) -> inference_pb2.ModelInferResponse:
        """Return the answers to all texts of a message."""
        if inference.is_streamed:
            raise InvalidRequest(STREAM, "goes with ModelStreamInfer only")
        call = current_call.get()
        items = ItemRecords(self._service.calls, call, partial(own_ending, context, call.arrival))
        return await Answering(self._service, items, context.time_remaining, self._max_message_bytes).whole(inference, call)

    async def ModelStreamInfer(self, requests: AsyncIterator[Message], context: Context) -> None:
        """Write the answers to a stream's requests as they complete."""
        await InferStream(self._service, context, self._max_message_bytes).serve(requests)


def _refusing(reason: str) -> Callable[[Any, Context], Awaitable[NoReturn]]:
    async def refuse(_: Any, context: Context) -> NoReturn:
        raise NotOffered(reason)

    return refuse


class InferStream(RequestStream[Message]):
    """A ModelStreamInfer call: requests with one text are answered in pieces."""

    def __init__(self, service: Service, context: Context, max_message_bytes: int) -> None:
        super().__init__(service, context)
        self._max_message_bytes = max_message_bytes
        self._answering = Answering(service, self.items, context.time_remaining, max_message_bytes)
        self._ids: set[str] = set()  # of requests in flight

    async def begin(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """Start a message's requests; return when all of them have begun."""
        message = self._checked(message)
        if isinstance(message, Inference) and len(message) > 1:
            has_begun = asyncio.Event()
            tasks.create_task(self._answer_texts(message, has_begun))
            await has_begun.wait()
        else:
            self.start(message, message.ByteSize(), tasks)

    def _checked(self, message: Message) -> Message:
        """Return a message, its id now in flight, or the refusal of an invalid one."""
        if isinstance(message, Refused):
            return message
        request_id = message.request_id
        if request_id in self._ids:
            return Refused(InvalidRequest("id", "is that of another request, which is under way on this stream"), request_id)
        if message.is_streamed and len(message) > 1:
            return Refused(InvalidRequest(STREAM, f"goes with one text only, and there are {len(message)}"), request_id)
        if request_id:
            self._ids.add(request_id)
        return message

    async def answer(self, request: Message, index: int, call: Call) -> inference_pb2.ModelStreamInferResponse:
        """Write one text's answer in pieces, unless it is wanted whole; return the last piece."""
        call.request_id = request.request_id or new_incident()
        bind_contextvars(request_id=call.request_id)
        if isinstance(request, Refused):
            raise request.error
        try:
            response = await self._answering.in_pieces(request, call.request_id, call, self._write_piece)
        finally:
            self._ids.discard(request.request_id)
        return streamed(response, is_final=True)

    def failure(self, error: ServiceError, request: Message, index: int, call: Call) -> inference_pb2.ModelStreamInferResponse:
        """Return the error response of a request."""
        return to_failure(error, request.request_id if isinstance(request, Refused) else call.request_id)

    async def _answer_texts(self, inference: Inference, has_begun: asyncio.Event) -> None:
        """Answer a message of several texts in one response."""
        request_id = inference.request_id or new_incident()
        num_bytes = inference.ByteSize()
        self.window.hold(num_bytes)
        try:
            answered = await self._answering.each(inference, request_id, self.window, has_begun)
            last = streamed(await to_response(inference, answered, request_id, self._max_message_bytes), is_final=True)
        except ServiceError as error:
            last = to_failure(error, request_id)
        finally:
            self.window.hold(-num_bytes)
            self._ids.discard(inference.request_id)
        self.window.begin()
        await self.finish(0, last.SerializeToString())

    async def _write_piece(self, piece: inference_pb2.ModelInferResponse) -> None:
        await self.write(streamed(piece, is_final=False))


def load_order(model: str, repository: str, parameters: Iterable[str]) -> Order:
    """Return the order to load a model; raise `InvalidRequest` for any repository name or parameter."""
    _check_order(repository, parameters, ())
    return Order("load", model)


def unload_order(model: str, repository: str, parameters: Iterable[str]) -> Order:
    """Return the order to unload a model; errors as `load_order`."""
    _check_order(repository, parameters, (UNLOAD_DEPENDENTS,))
    return Order("unload", model)


def _check_order(repository: str, parameters: Iterable[str], known: tuple[str, ...]) -> None:
    if repository:
        raise InvalidRequest("repository_name", "there is one, which has no name")
    if set(parameters) - set(known):
        raise InvalidRequest("parameters", "a model is loaded as it lies in its folder, with the settings that it has there")
