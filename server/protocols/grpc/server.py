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
from dragoman.server.service.service import CLOSE_SECONDS, HEALTH_SECONDS, Service
from dragoman.v1 import generation_pb2_grpc

# Limit of calls that queue while the event loop is busy, each of some 20 KB.
MAX_PENDING_CALLS = 16_384
# Open files beside connections: engines, metrics port, logs, bundles.
OTHER_FILES = 256
# Tolerated pings above the allowed rate; gRPC's default.
MAX_PING_STRIKES = 2
# Allowed keepalive interval: our clients ping every 20 s, gRPC's at most every 10 s.
MIN_PING_INTERVAL_SECONDS = 10.0
# A TLS handshake over a slow link takes a second or two.
HANDSHAKE_SECONDS = 10.0
# With `keepalive_seconds`, a vanished client is noticed within a minute.
PING_TIMEOUT_SECONDS = 20.0


class _Unregistered:
    """A server for generated code that registers handlers by name only: grpc.aio polls every registered method per call."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Ignore registered handlers."""


class GrpcServer:
    """The gRPC server: binds its port when created, in the event loop, and serves once started; `tls` is None without TLS."""

    def __init__(self, config: ServerConfig, service: Service) -> None:
        """Bind the port; raise `ConfigError` if it is taken or credentials cannot be used."""
        self._service = service
        self.tls = TlsFiles.of(config)
        interceptor = CallInterceptor(
            service.calls,
            {**OWN_METHODS, **OPEN_INFERENCE_METHODS},
            service.generation,
            service.in_flight,
            config.max_messages_per_second,
        )
        if service.callers is not None and service.callers.has_tokens and self.tls is None:
            structlog.get_logger().warning(
                "bearer tokens travel unencrypted: set tls_certificate and tls_key, or end TLS before us"
            )
        self._server = grpc.aio.server(interceptors=[interceptor], options=_options(config))
        self.health = Health()
        unregistered = _Unregistered(self._server)
        generation, inference = (
            GenerationServicer(service, config.max_message_bytes),
            InferenceServicer(service, config.max_message_bytes),
        )
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, unregistered)  # type: ignore[no-untyped-call]
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, unregistered)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)  # registered, so probes do not queue behind calls
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(), unregistered)
        self.port = listen(self._server, "port", config.host, config.port, self.tls)

    async def start(self) -> int:
        """Start serving; return the port."""
        self.update_health()
        await self._server.start()
        return self.port

    def update_health(self) -> None:
        """Publish the models' states; call it whenever one is added, removed, or changes readiness."""
        service = self._service
        service.note_models()
        self.health.update(service.models.all(), is_ready=service.is_ready, is_draining=service.is_draining)

    async def publish_health(self) -> None:
        """Publish the models' states, and wait up to `HEALTH_SECONDS` until watchers have them."""
        self.update_health()
        await self.health.all_told(HEALTH_SECONDS)

    async def stop(self) -> None:
        """Close the port without ending the process; calls that arrive meanwhile end as `CANCELLED`."""
        await self._server.stop(CLOSE_SECONDS)


def listen(server: grpc.aio.Server, setting: str, host: str, port: int, tls: TlsFiles | None) -> int:
    """Bind a server's port, with reloadable TLS, and return it; raise `ConfigError` if it is taken."""
    address = f"{in_url(host)}:{port}"
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, credentials(tls))
    except RuntimeError as error:
        raise ConfigError(f"{setting}: cannot listen on {address}; is another process using it?") from error


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow later calls of `reload` of the files."""
    seen = files.contents

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return new files, None if unchanged; gRPC calls this on its own thread at each handshake."""
        nonlocal seen
        if seen is files.contents:
            return None
        seen = files.contents
        return _configuration(seen)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(seen),
        fetch,  # type: ignore[arg-type]  # the stub lacks None for unchanged
        require_client_authentication=seen.client_ca is not None,
    )


def _configuration(contents: Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.client_ca)


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Return the server's gRPC core options."""
    return [
        # By default two servers could share a port unnoticed. Only frontends of one server share it; their parent ensures that.
        ("grpc.so_reuseport", int(config.front_ends > 1)),
        # gRPC core's defaults cancel some pending calls above 1,000 and all above 3,000.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # Keep the unread window of each stream at 64 KiB; BDP probing would let it grow to megabytes on a fast network.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        *connection_options(config),
    ]


def connection_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Return the gRPC core options of connections."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        # Until the client's SETTINGS, and until it acknowledges ours; gRPC's defaults are minutes.
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.http2.settings_timeout", _milliseconds(HANDSHAKE_SECONDS)),
        # Notice vanished clients within a minute, and allow clients the same.
        ("grpc.keepalive_time_ms", _milliseconds(config.keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", _milliseconds(PING_TIMEOUT_SECONDS)),
        # For gRPC core's own pings, which the option above does not cover; default a minute.
        ("grpc.http2.ping_timeout_ms", _milliseconds(PING_TIMEOUT_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _milliseconds(MIN_PING_INTERVAL_SECONDS)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    ]
    if config.max_connections:
        allow_files(config.max_connections * (2 if config.http else 1))  # the HTTP port has the same limit
        options.append(("grpc.max_allowed_incoming_connections", config.max_connections))
    if config.max_connection_idle_seconds:
        options.append(("grpc.max_connection_idle_ms", _milliseconds(config.max_connection_idle_seconds)))
    if config.max_connection_age_seconds:
        # gRPC adds jitter of up to 10% to the age, so that clients do not all reconnect at once.
        options.append(("grpc.max_connection_age_ms", _milliseconds(config.max_connection_age_seconds)))
        if config.max_connection_age_grace_seconds:  # gRPC's default is unlimited
            options.append(("grpc.max_connection_age_grace_ms", _milliseconds(config.max_connection_age_grace_seconds)))
    return options


def allow_files(num_connections: int) -> None:
    """Raise this process's limit of open files to one per connection plus `OTHER_FILES`; warn if the hard limit is too low."""
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
