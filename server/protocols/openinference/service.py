"""The inference.GRPCInferenceService service."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from dragoman.inference import inference_pb2, inference_pb2_grpc
from dragoman.server.errors import InvalidRequest, NotOffered, ServiceError
from dragoman.server.protocols.bulk import Items
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
from dragoman.server.protocols.grpc.reading import Refused
from dragoman.server.protocols.openinference.answers import Answering
from dragoman.server.protocols.openinference.descriptions import Descriptions, server_metadata
from dragoman.server.protocols.openinference.reading import infer_reader
from dragoman.server.protocols.openinference.requests import STREAM, Inference
from dragoman.server.protocols.openinference.stream import InferStream
from dragoman.server.service.administration import Order
from dragoman.server.service.service import Core

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_INFER = replace(REQUEST, reader=infer_reader)
# The first three say no more than health does, which needs no caller either.
OPEN_INFERENCE_METHODS: Methods = declared(
    INFERENCE, QUESTION, ServerLive=PROBE, ServerReady=PROBE, ModelReady=PROBE, ModelInfer=_INFER, ModelStreamInfer=_INFER
)


ON_ADMIN_PORT = "operators load and unload models, at admin_port over gRPC, and here with http_admin over HTTP"
NO_SHARED_MEMORY = "shared memory is not offered; send the content of tensors with them"
NO_SETTINGS = "settings of traces and logs are the server's own, and do not change while it runs"


# What unloading may say beside the model: no model depends on another, so either is done.
UNLOAD_DEPENDENTS = "unload_dependents"


def load_order(model: str, repository: str, parameters: Iterable[str]) -> Order:
    """Return the order to serve a model as its policy has it.

    Args:
        model: Its name.
        repository: Where it lies, as the message says; empty for the one that there is.
        parameters: Names of those that came along.

    Raises:
        InvalidRequest: If it is to be loaded otherwise than it lies in its folder.
    """
    _check(repository, parameters, ())
    return Order("load", model)


def unload_order(model: str, repository: str, parameters: Iterable[str]) -> Order:
    """Return the order to serve a model no more. Arguments and errors as `load_order`."""
    _check(repository, parameters, (UNLOAD_DEPENDENTS,))
    return Order("unload", model)


def _check(repository: str, parameters: Iterable[str], known: tuple[str, ...]) -> None:
    if repository:
        raise InvalidRequest("repository_name", "there is one, which has no name")
    if set(parameters) - set(known):
        raise InvalidRequest("parameters", "a model is loaded as it lies in its folder, with the settings that it has there")


REASONS = {
    "RepositoryModelLoad": ON_ADMIN_PORT,
    "RepositoryModelUnload": ON_ADMIN_PORT,
    **{f"{kind}SharedMemory{do}": NO_SHARED_MEMORY for kind in ("System", "Cuda") for do in ("Status", "Register", "Unregister")},
    "TraceSetting": NO_SETTINGS,
    "LogSettings": NO_SETTINGS,
}


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves every RPC of the service. Method names are the protocol's."""

    def __init__(self, core: Core, max_message_bytes: int) -> None:
        """Serve what the core does.

        Args:
            core: What answers.
            max_message_bytes: Largest message that gRPC sends.
        """
        self._core = core
        self._max_message_bytes = max_message_bytes
        self._descriptions = Descriptions(core.models, core.generation)
        for name, reason in REASONS.items():
            setattr(self, name, _refusing(reason))

    async def ServerLive(self, _: inference_pb2.ServerLiveRequest, context: Context) -> inference_pb2.ServerLiveResponse:
        """Say that the process answers."""
        return inference_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, _: inference_pb2.ServerReadyRequest, context: Context) -> inference_pb2.ServerReadyResponse:
        """Say whether the server is ready."""
        return inference_pb2.ServerReadyResponse(ready=self._core.is_ready)

    async def ModelReady(self, request: inference_pb2.ModelReadyRequest, context: Context) -> inference_pb2.ModelReadyResponse:
        """Say whether a model takes requests; one that there is not does not."""
        try:
            is_ready = self._core.generation.model(request.name, version=request.version).engine.is_ready
        except ServiceError:
            is_ready = False
        return inference_pb2.ModelReadyResponse(ready=is_ready and not self._core.is_draining)

    async def ServerMetadata(
        self, _: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        """Say what the server is."""
        return server_metadata()

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        """Say what a model takes and gives."""
        return self._descriptions.metadata(request.name, request.version, current_call.get().caller)

    async def ModelConfig(self, request: inference_pb2.ModelConfigRequest, context: Context) -> inference_pb2.ModelConfigResponse:
        """Say the same as Triton would."""
        return self._descriptions.config(request.name, request.version, current_call.get().caller)

    async def ModelStatistics(
        self, request: inference_pb2.ModelStatisticsRequest, context: Context
    ) -> inference_pb2.ModelStatisticsResponse:
        """Say what became of requests."""
        return self._descriptions.statistics(request.name, request.version, current_call.get().caller)

    async def RepositoryIndex(
        self, request: inference_pb2.RepositoryIndexRequest, context: Context
    ) -> inference_pb2.RepositoryIndexResponse:
        """List every version of every model that the caller may use."""
        return self._descriptions.index(request, current_call.get().caller)

    async def ModelInfer(self, inference: Inference, context: Context) -> inference_pb2.ModelInferResponse:
        """Return the answers to all texts of a message."""
        if inference.is_streamed:
            raise InvalidRequest(STREAM, "goes with ModelStreamInfer only")
        call = current_call.get()
        items = Items(self._core.calls.records, call, partial(own_ending, context, call.arrival))
        answering = Answering(self._core, items, context.time_remaining, self._max_message_bytes)
        return await answering.whole(inference, call)

    async def ModelStreamInfer(self, requests: AsyncIterator[Inference | Refused], context: Context) -> None:
        """Write answers to the requests of a stream as they go."""
        await InferStream(self._core, context, self._max_message_bytes).serve(requests)


def _refusing(reason: str) -> Callable[[Any, Context], Awaitable[NoReturn]]:
    """Return the behaviour of an RPC that is not offered."""

    async def refuse(_: Any, context: Context) -> NoReturn:
        raise NotOffered(reason)

    return refuse
