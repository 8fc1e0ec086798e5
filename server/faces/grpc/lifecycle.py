"""The two RPCs of the Open Inference Protocol that are for operators, beside the admin service."""

from typing import Any, TypeAlias

import grpc

from dragoman.inference import inference_pb2
from dragoman.server.core.administration import Administration
from dragoman.server.faces.grpc.interceptors import Context
from dragoman.server.faces.grpc.repository import operator_of
from dragoman.server.faces.oip.lifecycle import load_order, unload_order
from dragoman.server.faces.oip.methods import INFERENCE

LoadRequest: TypeAlias = inference_pb2.RepositoryModelLoadRequest
LoadResponse: TypeAlias = inference_pb2.RepositoryModelLoadResponse
UnloadRequest: TypeAlias = inference_pb2.RepositoryModelUnloadRequest
UnloadResponse: TypeAlias = inference_pb2.RepositoryModelUnloadResponse


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
