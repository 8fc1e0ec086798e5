"""Loading and unloading of models, an extension of Triton's: what an operator's message asks for, and its two RPCs.

They are where operators are: beside the admin service over gRPC, and over HTTP where that is (`faces/http/inference/lifecycle.py`).
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc

from dragoman.inference import inference_pb2
from dragoman.server.core.administration import Administration, Order
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.grpc.interceptors import Context
from dragoman.server.faces.grpc.repository import operator_of
from dragoman.server.faces.oip.methods import INFERENCE

# What unloading may say beside the model: no model depends on another, so either is done.
UNLOAD_DEPENDENTS = "unload_dependents"

LoadRequest: TypeAlias = inference_pb2.RepositoryModelLoadRequest
LoadResponse: TypeAlias = inference_pb2.RepositoryModelLoadResponse
UnloadRequest: TypeAlias = inference_pb2.RepositoryModelUnloadRequest
UnloadResponse: TypeAlias = inference_pb2.RepositoryModelUnloadResponse


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


class Lifecycle:
    """Serves both RPCs to operators; the rest of the protocol's service is on the other port."""

    def __init__(self, administration: Administration) -> None:
        """Serve what it does."""
        self._administration = administration

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server finds the RPCs by."""
        make: Any = grpc.unary_unary_rpc_method_handler
        load = make(self.load, LoadRequest.FromString, LoadResponse.SerializeToString)
        unload = make(self.unload, UnloadRequest.FromString, UnloadResponse.SerializeToString)
        handlers = {"RepositoryModelLoad": load, "RepositoryModelUnload": unload}
        return grpc.method_handlers_generic_handler(INFERENCE.full_name, handlers)

    async def load(self, request: LoadRequest, context: Context) -> LoadResponse:
        """Serve a model."""
        order = load_order(request.model_name, request.repository_name, request.parameters)
        await self._administration.load(operator_of(context), order.model, order.version)
        return LoadResponse()

    async def unload(self, request: UnloadRequest, context: Context) -> UnloadResponse:
        """Serve a model no more."""
        order = unload_order(request.model_name, request.repository_name, request.parameters)
        await self._administration.unload(operator_of(context), order.model, order.version)
        return UnloadResponse()
