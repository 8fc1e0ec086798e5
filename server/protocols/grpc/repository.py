"""The admin services: dragoman.v1.Repository and the load and unload calls of the Open Inference Protocol."""

from typing import Any, TypeAlias

import grpc
import structlog

from dragoman.inference import inference_pb2
from dragoman.server.config import ConfigError, ServerConfig, is_loopback
from dragoman.server.listening import in_url
from dragoman.server.protocols.grpc.interceptors import AuthInterceptor, CallInterceptor, Context, current_call
from dragoman.server.protocols.grpc.server import connection_options, credentials, peer_names
from dragoman.server.protocols.openinference.service import INFERENCE, load_order, unload_order
from dragoman.server.protocols.tls import TlsFiles
from dragoman.server.protocols.v1.descriptions import to_listing, to_model
from dragoman.server.service.administration import CarryOut, Operator, Order
from dragoman.server.service.context import RunningCalls
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.v1 import repository_pb2, repository_pb2_grpc


class RepositoryServicer(repository_pb2_grpc.RepositoryServicer):
    """Serves every RPC of the service. Method names are the protocol's."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out

    async def ListRepository(
        self, request: repository_pb2.ListRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """Return the status of models."""
        listing = await self._carry_out(operator_of(context), Order("list", request.model))
        return to_listing(listing.models, listing.problem)

    async def RefreshRepository(
        self, _: repository_pb2.RefreshRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """Read all folders."""
        listing = await self._carry_out(operator_of(context), Order("refresh"))
        return to_listing(listing.models, listing.problem)

    async def LoadModel(self, request: repository_pb2.LoadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Serve a version, or what the policy asks for."""
        return await self._change(context, Order("load", request.model, request.version))

    async def UnloadModel(self, request: repository_pb2.UnloadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Stop serving a version, or the model."""
        return await self._change(context, Order("unload", request.model, request.version))

    async def ReloadModel(self, request: repository_pb2.ReloadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Read a model's folder."""
        return await self._change(context, Order("reload", request.model))

    async def RollbackModel(self, request: repository_pb2.RollbackModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Have an earlier version answer."""
        return await self._change(context, Order("rollback", request.model, request.version))

    async def SetLabel(self, request: repository_pb2.SetLabelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Have a label name a version."""
        return await self._change(context, Order("label", request.model, request.version, request.label))

    async def _change(self, context: Context, order: Order) -> repository_pb2.RepositoryModel:
        return to_model((await self._carry_out(operator_of(context), order)).models[0])


def operator_of(context: Context) -> Operator:
    """Return who asks: by name where tokens say so, else by address."""
    caller = current_call.get().caller
    return Operator(context.peer()) if caller is None else Operator(caller.name, caller.models)


LoadRequest: TypeAlias = inference_pb2.RepositoryModelLoadRequest
LoadResponse: TypeAlias = inference_pb2.RepositoryModelLoadResponse
UnloadRequest: TypeAlias = inference_pb2.RepositoryModelUnloadRequest
UnloadResponse: TypeAlias = inference_pb2.RepositoryModelUnloadResponse


class Lifecycle:
    """Serves both RPCs to operators; the rest of the protocol's service is on the other port."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out

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
        await self._carry_out(operator_of(context), order)
        return LoadResponse()

    async def unload(self, request: UnloadRequest, context: Context) -> UnloadResponse:
        """Serve a model no more."""
        order = unload_order(request.model_name, request.repository_name, request.parameters)
        await self._carry_out(operator_of(context), order)
        return UnloadResponse()


class RepositoryServer:
    """It listens once it is made, inside the event loop, and answers once it is started.

    Attributes:
        port: Where it listens.
        tls: The files that it shows; None where nothing is encrypted.
    """

    def __init__(self, config: ServerConfig, carry_out: CarryOut, calls: RunningCalls) -> None:
        """Take the port.

        Args:
            config: Address and credentials.
            carry_out: Carries out an order.
            calls: Those that run, and who may make them.

        Raises:
            ConfigError: If the port is taken or credentials cannot be used.
        """
        self.tls = TlsFiles.of(config)
        interceptors: list[grpc.aio.ServerInterceptor] = [CallInterceptor(calls, peer_names=peer_names)]
        if calls.callers is not None:
            interceptors.append(AuthInterceptor(calls.callers))
            if calls.callers.has_tokens and self.tls is None and not is_loopback(config.admin_host):
                structlog.get_logger().warning("operators' tokens travel unencrypted: set tls_certificate and tls_key")
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", LARGE_BYTES),
            ("grpc.max_send_message_length", -1),
            *connection_options(config),
        ]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        servicer = RepositoryServicer(carry_out)
        repository_pb2_grpc.add_RepositoryServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers((Lifecycle(carry_out).handler(),))
        address = f"{in_url(config.admin_host)}:{config.admin_port}"
        try:
            self.port: int = (
                self._server.add_insecure_port(address)
                if self.tls is None
                else self._server.add_secure_port(address, credentials(self.tls))
            )
        except RuntimeError as error:
            raise ConfigError(f"admin_port: cannot listen on {address}; is another process using it?") from error

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    async def stop(self) -> None:
        """Close the port, for a process that goes on."""
        await self._server.stop(None)
