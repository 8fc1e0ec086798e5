"""The gRPC server: puts services, interceptors, credentials and options together."""

from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.core.core import CLOSE_SECONDS, Core
from dragoman.server.faces.grpc.generation import GenerationServicer
from dragoman.server.faces.grpc.health import GENERATION, Health
from dragoman.server.faces.grpc.interceptors import CallInterceptor
from dragoman.server.faces.grpc.security import AuthInterceptor, tls_credentials
from dragoman.server.faces.grpc.tls import peer_names
from dragoman.v1 import generation_pb2_grpc

MAX_PENDING_CALLS = 2**31 - 1


class GrpcServer:
    """The gRPC face of the server. Make it with `build_server`, inside the event loop."""

    def __init__(self, server: grpc.aio.Server, port: int, core: Core, health: Health) -> None:
        self._server = server
        self._core = core
        self._health = health
        self.port = port

    async def start(self) -> int:
        """Start answering; return the port."""
        await self.update_health()
        await self._server.start()
        return self.port

    async def update_health(self) -> None:
        """Publish how the models are now; call it whenever one becomes ready, stops being so, comes or goes."""
        await self._health.update(self._core.models.all(), self._core.is_draining)

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
    interceptors: list[grpc.aio.ServerInterceptor] = [CallInterceptor(core.calls, core.generation.max_characters, peer_names)]
    credentials = tls_credentials(config)
    if core.callers is not None:
        interceptors.append(AuthInterceptor(core.callers))
        if core.callers.has_tokens and credentials is None:
            structlog.get_logger().warning(
                "bearer tokens travel unencrypted: set tls_certificate and tls_key, or end TLS before us"
            )
    server = grpc.aio.server(interceptors=interceptors, options=_options(config))
    health = Health()
    servicer = GenerationServicer(core, config.max_message_bytes)
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if config.reflection:
        names = [GENERATION, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
    return GrpcServer(server, _listen(server, config, credentials), core, health)


def _listen(server: grpc.aio.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None) -> int:
    """Bind the port and return it."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        return server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"port: cannot listen on {address}; is another process using it?") from error


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Return gRPC's options; names are gRPC core's."""
    options: list[tuple[str, Any]] = [
        # Without this, two servers could share a port without knowing, each getting half of the connections.
        ("grpc.so_reuseport", 0),
        # Calls that arrive while the event loop is busy wait to be taken up. gRPC core would end some as CANCELLED from 1,000 on
        # and all from 3,000 on; refusing is ours to do, with a status that says why and when to come back.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # What a stream may send before it is read stays at 64 KiB. gRPC would let it grow to megabytes on a fast network, for each
        # of a connection's streams; a message that is being read has as much as it needs.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Notice clients that vanished within a minute, and allow clients to do the same.
        ("grpc.keepalive_time_ms", 40_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
    if config.max_connection_age_seconds:
        # gRPC lengthens or shortens each connection's age by up to a tenth, so that clients do not all come back at once.
        options.append(("grpc.max_connection_age_ms", max(1, round(config.max_connection_age_seconds * 1000))))
        if config.max_connection_age_grace_seconds:  # gRPC's own default is for ever
            options.append(("grpc.max_connection_age_grace_ms", max(1, round(config.max_connection_age_grace_seconds * 1000))))
    return options
