"""The gRPC server: services, interceptors, credentials and options."""

import resource
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from dragoman.inference import inference_pb2_grpc
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.listening import in_url
from dragoman.server.protocols.grpc.generation import GenerationServicer
from dragoman.server.protocols.grpc.health import Health, Reflection
from dragoman.server.protocols.grpc.interceptors import OWN_METHODS, CallInterceptor
from dragoman.server.protocols.openinference.service import OPEN_INFERENCE_METHODS, InferenceServicer
from dragoman.server.protocols.tls import Contents, TlsFiles
from dragoman.server.service.service import CLOSE_SECONDS, TELL_SECONDS, Core
from dragoman.v1 import generation_pb2_grpc

# Calls that arrive while the event loop is busy wait to be taken up, each with some 20 KB.
MAX_PENDING_CALLS = 16_384
# Files that are open beside connections: engines, the metrics port, logs, bundles.
OTHER_FILES = 256
# Pings more often than is allowed that are forgiven until something is sent; gRPC's own default.
MAX_PING_STRIKES = 2
# A client may ask every 10 s whether the server is there; our own clients do so every 20 s, gRPC's at most every 10 s.
MIN_PING_INTERVAL_SECONDS = 10.0
# With TLS over a slow link a handshake takes a second or two.
HANDSHAKE_SECONDS = 10.0
# Time for the answer to a ping: with `keepalive_seconds` a client that vanished is noticed within a minute.
PING_TIMEOUT_SECONDS = 20.0


class _Unregistered:
    """Takes the place of a server in generated code, so that methods are found by their names and are not registered.

    For every call that it takes up, grpc.aio waits anew for the next one of each registered method, which costs time for each of
    them. A registered method has a queue of pending calls of its own; all others share one.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Register nothing."""


class GrpcServer:
    """Listens once it is made, inside the event loop, and answers once it is started.

    Attributes:
        port: Its port.
        health: Its health service.
        tls: Its certificates; None without TLS.
    """

    def __init__(self, config: ServerConfig, core: Core) -> None:
        """Take the port.

        Args:
            config: Address, limits, credentials.
            core: What answers.

        Raises:
            ConfigError: If the port is taken or credentials cannot be used.
        """
        self._core = core
        self.tls = TlsFiles.of(config)
        interceptor = CallInterceptor(
            core.calls,
            {**OWN_METHODS, **OPEN_INFERENCE_METHODS},
            core.generation,
            core.in_flight,
            config.max_messages_per_second,
        )
        if core.callers is not None and core.callers.has_tokens and self.tls is None:
            structlog.get_logger().warning(
                "bearer tokens travel unencrypted: set tls_certificate and tls_key, or end TLS before us"
            )
        self._server = grpc.aio.server(interceptors=[interceptor], options=_options(config))
        self.health = Health()
        unregistered = _Unregistered(self._server)
        generation, inference = (
            GenerationServicer(core, config.max_message_bytes),
            InferenceServicer(core, config.max_message_bytes),
        )
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, unregistered)  # type: ignore[no-untyped-call]
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, unregistered)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)  # registered: a probe does not wait behind calls
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(), unregistered)
        self.port = listen(self._server, "port", config.host, config.port, self.tls)

    async def start(self) -> int:
        """Start answering; return the port."""
        self.update_health()
        await self._server.start()
        return self.port

    def update_health(self) -> None:
        """Publish the models' states; to be called whenever one becomes ready, stops being so, comes or goes."""
        core = self._core
        core.note_models()
        self.health.update(core.models.all(), is_ready=core.is_ready, is_draining=core.is_draining)

    async def tell_health(self) -> None:
        """Publish the models' states, and wait a moment until watchers have them."""
        self.update_health()
        await self.health.all_told(TELL_SECONDS)

    async def stop(self) -> None:
        """Close the port, for a process that goes on: calls that come at this moment end as `CANCELLED`."""
        await self._server.stop(CLOSE_SECONDS)


def listen(server: grpc.aio.Server, setting: str, host: str, port: int, tls: TlsFiles | None) -> int:
    """Bind a server's port, with TLS that follows its files, and return it.

    Raises:
        ConfigError: If it is taken.
    """
    address = f"{in_url(host)}:{port}"
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, credentials(tls))
    except RuntimeError as error:
        raise ConfigError(f"{setting}: cannot listen on {address}; is another process using it?") from error


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow every later `reload` of the files."""
    seen = files.contents

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return new files, if there are any; gRPC asks at each handshake, on a thread of its own."""
        nonlocal seen
        if seen is files.contents:
            return None
        seen = files.contents
        return _configuration(seen)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(seen),
        fetch,  # type: ignore[arg-type]  # its stub does not know that None stands for nothing new
        require_client_authentication=seen.client_ca is not None,
    )


def _configuration(contents: Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.client_ca)


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Return gRPC's options; names are gRPC core's."""
    return [
        # Without this, two servers could share a port without knowing, each getting half of the connections. Frontends of one
        # server are to share it, and the process that starts them sees to it that nobody else does.
        ("grpc.so_reuseport", int(config.front_ends > 1)),
        # gRPC core would end some pending calls as CANCELLED from 1,000 on and all from 3,000 on.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # A stream may send 64 KiB before it is read. gRPC would let that grow to megabytes on a fast network, for each of a
        # connection's streams; a message that is being read has as much as it needs.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        *connection_options(config),
    ]


def connection_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Return gRPC's options for connections; names are gRPC core's."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        # Until the client has sent its SETTINGS, and then until it has acknowledged ours; gRPC's own defaults are minutes.
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.http2.settings_timeout", _milliseconds(HANDSHAKE_SECONDS)),
        # Notice clients that vanished within a minute, and allow clients to do the same.
        ("grpc.keepalive_time_ms", _milliseconds(config.keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", _milliseconds(PING_TIMEOUT_SECONDS)),
        # gRPC core pings for reasons of its own, too, and waits a minute for the answer to those, whatever the option above says.
        ("grpc.http2.ping_timeout_ms", _milliseconds(PING_TIMEOUT_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _milliseconds(MIN_PING_INTERVAL_SECONDS)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    ]
    if config.max_connections:
        allow_files(config.max_connections * (2 if config.http else 1))  # as many over HTTP
        options.append(("grpc.max_allowed_incoming_connections", config.max_connections))
    if config.max_connection_idle_seconds:
        options.append(("grpc.max_connection_idle_ms", _milliseconds(config.max_connection_idle_seconds)))
    if config.max_connection_age_seconds:
        # gRPC lengthens or shortens each connection's age by up to a tenth, so that clients do not all come back at once.
        options.append(("grpc.max_connection_age_ms", _milliseconds(config.max_connection_age_seconds)))
        if config.max_connection_age_grace_seconds:  # gRPC's own default is for ever
            options.append(("grpc.max_connection_age_grace_ms", _milliseconds(config.max_connection_age_grace_seconds)))
    return options


def allow_files(num_connections: int) -> None:
    """Raise this process's limit of open files, as far as it may, to one for each connection; warn where that is not far enough."""
    needed = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        structlog.get_logger().warning(
            "fewer files may be open than max_connections asks for", max_connections=num_connections, max_files=allowed
        )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
