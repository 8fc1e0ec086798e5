"""The admin gRPC server, on its own port: dragoman.v1.Repository, and the Open Inference Protocol's load and unload calls."""

from functools import partial
from typing import Any

import grpc
import structlog

from dragoman.inference import inference_pb2
from dragoman.server.config import ServerConfig, is_loopback
from dragoman.server.protocols.grpc.interceptors import CallInterceptor, Context, current_call
from dragoman.server.protocols.grpc.server import connection_options, listen
from dragoman.server.protocols.openinference.service import INFERENCE, load_order, unload_order
from dragoman.server.protocols.tls import TlsFiles
from dragoman.server.protocols.v1.descriptions import CHANGES, to_listing, to_model, to_order
from dragoman.server.service.administration import CarryOut, Operator, Order, Verb
from dragoman.server.service.context import RunningCalls
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.v1 import repository_pb2, repository_pb2_grpc


class RepositoryServer:
    """The admin port: bound when created, in the event loop; serves once started. `tls` is None without TLS."""

    def __init__(self, config: ServerConfig, carry_out: CarryOut, calls: RunningCalls) -> None:
        """Bind the port; raise `ConfigError` if it is taken or credentials cannot be used."""
        self.tls = TlsFiles.of(config)
        has_tokens = calls.callers is not None and calls.callers.has_tokens
        if has_tokens and self.tls is None and not is_loopback(config.admin_host):
            structlog.get_logger().warning("operators' tokens travel unencrypted: set tls_certificate and tls_key")
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max(LARGE_BYTES, config.max_message_bytes)),
            ("grpc.max_send_message_length", -1),
            *connection_options(config),
        ]
        self._server = grpc.aio.server(interceptors=[CallInterceptor(calls)], options=options)
        servicer = RepositoryServicer(carry_out)
        repository_pb2_grpc.add_RepositoryServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers((servicer.open_inference(),))
        assert config.admin_port is not None
        self.port = listen(self._server, "admin_port", config.admin_host, config.admin_port, self.tls)

    async def start(self) -> None:
        """Start serving."""
        await self._server.start()

    async def stop(self) -> None:
        """Close the port without ending the process."""
        await self._server.stop(None)


class RepositoryServicer(repository_pb2_grpc.RepositoryServicer):
    """Serves every RPC of the service; the protocol defines the method names."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out
        for rpc, verb in CHANGES.items():
            setattr(self, rpc, partial(self._change, verb))

    async def ListRepository(
        self, request: repository_pb2.ListRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """List models and their versions."""
        listing = await self._carry_out(operator_of(context), Order("list", request.model))
        return to_listing(listing.models, listing.problem)

    async def RefreshRepository(
        self, _: repository_pb2.RefreshRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """Read all model folders again."""
        listing = await self._carry_out(operator_of(context), Order("refresh"))
        return to_listing(listing.models, listing.problem)

    async def _change(self, verb: Verb, request: Any, context: Context) -> repository_pb2.RepositoryModel:
        order = to_order(verb, request, request.model)
        return to_model((await self._carry_out(operator_of(context), order)).models[0])

    def open_inference(self) -> grpc.GenericRpcHandler:
        """Return the handler of the Open Inference Protocol's load and unload calls; its other calls are on the main port."""
        make: Any = grpc.unary_unary_rpc_method_handler
        load, loaded = inference_pb2.RepositoryModelLoadRequest, inference_pb2.RepositoryModelLoadResponse
        unload, unloaded = inference_pb2.RepositoryModelUnloadRequest, inference_pb2.RepositoryModelUnloadResponse

        async def load_model(request: inference_pb2.RepositoryModelLoadRequest, context: Context) -> Any:
            order = load_order(request.model_name, request.repository_name, request.parameters)
            await self._carry_out(operator_of(context), order)
            return loaded()

        async def unload_model(request: inference_pb2.RepositoryModelUnloadRequest, context: Context) -> Any:
            order = unload_order(request.model_name, request.repository_name, request.parameters)
            await self._carry_out(operator_of(context), order)
            return unloaded()

        handlers = {
            "RepositoryModelLoad": make(load_model, load.FromString, loaded.SerializeToString),
            "RepositoryModelUnload": make(unload_model, unload.FromString, unloaded.SerializeToString),
        }
        return grpc.method_handlers_generic_handler(INFERENCE.full_name, handlers)


def operator_of(context: Context) -> Operator:
    """Return the current call's operator: its caller or, without authentication, its address."""
    caller = current_call.get().caller
    return Operator(context.peer()) if caller is None else Operator(caller.name, caller.models)
