"""The gRPC server: puts services, interceptors, credentials and options together."""

from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from dragoman.inference import inference_pb2_grpc
from dragoman.server.addresses import in_url
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.core.core import CLOSE_SECONDS, TELL_SECONDS, Core
from dragoman.server.faces.grpc.connections import connection_options
from dragoman.server.faces.grpc.generation import GenerationServicer
from dragoman.server.faces.grpc.health import Health
from dragoman.server.faces.grpc.interceptors import CallInterceptor
from dragoman.server.faces.grpc.methods import OWN_METHODS
from dragoman.server.faces.grpc.pace import Pace
from dragoman.server.faces.grpc.reflection import Reflection
from dragoman.server.faces.grpc.security import AuthInterceptor
from dragoman.server.faces.grpc.streams import Streams
from dragoman.server.faces.grpc.tls import credentials, peer_names
from dragoman.server.faces.oip.methods import OPEN_INFERENCE_METHODS
from dragoman.server.faces.oip.service import InferenceServicer
from dragoman.server.faces.tls_files import TlsFiles
from dragoman.v1 import generation_pb2_grpc

MAX_PENDING_CALLS = 16_384


class _Unregistered:
    """What generated code is given in place of a server, so that its methods are found by their names and are not registered.

    For every call that it takes up, grpc.aio waits anew for the next one of each registered method, which costs time for each of
    them. What is registered has a place of its own where calls wait to be taken up; all others share one.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Register nothing."""


class GrpcServer:
    """The gRPC face of the server. Make it with `build_server`, inside the event loop.

    Attributes:
        port: Where it listens.
        health: What is answered to those who ask for it.
        tls: The files that it shows; None where nothing is encrypted.
    """

    def __init__(self, server: grpc.aio.Server, port: int, core: Core, health: Health, tls: TlsFiles | None) -> None:
        self._server = server
        self._core = core
        self.port = port
        self.health = health
        self.tls = tls

    async def start(self) -> int:
        """Start answering; return the port."""
        self.update_health()
        await self._server.start()
        return self.port

    def update_health(self) -> None:
        """Publish how the models are now; call it whenever one becomes ready, stops being so, comes or goes."""
        core = self._core
        core.note_models()
        self.health.update(core.models.all(), is_ready=core.is_ready, is_draining=core.is_draining)

    async def tell_health(self) -> None:
        """Publish how the models are now, and wait a moment until those who watch have been told."""
        self.update_health()
        await self.health.all_told(TELL_SECONDS)

    async def stop(self) -> None:
        """Close the port, for a process that goes on: calls that come at this moment end as `CANCELLED`."""
        await self._server.stop(CLOSE_SECONDS)


def build_server(config: ServerConfig, core: Core) -> GrpcServer:
    """Return a server that listens and does not answer yet.

    Args:
        config: Address, limits, credentials.
        core: What answers.

    Raises:
        ConfigError: If the port is taken or credentials cannot be used.
    """
    pace = Pace(config.max_messages_per_second) if config.max_messages_per_second else None
    methods = {**OWN_METHODS, **OPEN_INFERENCE_METHODS}
    around = CallInterceptor(core.calls, core.generation.max_characters, peer_names, pace, core.generation.deadlines, methods)
    interceptors: list[grpc.aio.ServerInterceptor] = [around]
    tls = TlsFiles.of(config)
    if core.callers is not None:
        interceptors.append(AuthInterceptor(core.callers, methods))
        if core.callers.has_tokens and tls is None:
            structlog.get_logger().warning(
                "bearer tokens travel unencrypted: set tls_certificate and tls_key, or end TLS before us"
            )
    server = grpc.aio.server(interceptors=interceptors, options=_options(config))
    health = Health()
    streams = Streams(core)
    generation = GenerationServicer(core, config.max_message_bytes, streams)
    generation_pb2_grpc.add_GenerationServicer_to_server(generation, _Unregistered(server))  # type: ignore[no-untyped-call]
    inference = InferenceServicer(core, config.max_message_bytes, streams)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, _Unregistered(server))  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)  # registered: a probe does not wait behind all other calls
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(), _Unregistered(server))
    return GrpcServer(server, _listen(server, config, None if tls is None else credentials(tls)), core, health, tls)


def _listen(server: grpc.aio.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None) -> int:
    """Bind the port and return it."""
    address = f"{in_url(config.host)}:{config.port}"
    try:
        return server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"port: cannot listen on {address}; is another process using it?") from error


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Return gRPC's options; names are gRPC core's."""
    options: list[tuple[str, Any]] = [
        # Without this, two servers could share a port without knowing, each getting half of the connections. Front ends of one
        # server are to share it, and the process that starts them sees to it that nobody else does.
        ("grpc.so_reuseport", int(config.front_ends > 1)),
        # Calls that arrive while the event loop is busy wait to be taken up. gRPC core would end some as CANCELLED from 1,000 on
        # and all from 3,000 on; refusing is ours to do, with a status that says why and when to come back. But each takes some
        # 20 KB, and seconds pass before the last of so many is taken up: there has to be an end.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # What a stream may send before it is read stays at 64 KiB. gRPC would let it grow to megabytes on a fast network, for each
        # of a connection's streams; a message that is being read has as much as it needs.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
    ]
    return options + connection_options(config)
