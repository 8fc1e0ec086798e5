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
from dragoman.server.protocols.grpc.interceptors import OWN_METHODS, AuthInterceptor, CallInterceptor, Context
from dragoman.server.protocols.openinference.service import OPEN_INFERENCE_METHODS, InferenceServicer
from dragoman.server.protocols.tls import Contents, TlsFiles
from dragoman.server.service.in_flight import MessageRate
from dragoman.server.service.service import CLOSE_SECONDS, TELL_SECONDS, Core
from dragoman.v1 import generation_pb2_grpc

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
        make_room(config.max_connections * (2 if config.http else 1))  # as many over HTTP
        options.append(("grpc.max_allowed_incoming_connections", config.max_connections))
    if config.max_connection_idle_seconds:
        options.append(("grpc.max_connection_idle_ms", _milliseconds(config.max_connection_idle_seconds)))
    if config.max_connection_age_seconds:
        # gRPC lengthens or shortens each connection's age by up to a tenth, so that clients do not all come back at once.
        options.append(("grpc.max_connection_age_ms", _milliseconds(config.max_connection_age_seconds)))
        if config.max_connection_age_grace_seconds:  # gRPC's own default is for ever
            options.append(("grpc.max_connection_age_grace_ms", _milliseconds(config.max_connection_age_grace_seconds)))
    return options


def make_room(num_connections: int) -> None:
    """Let this process have a file open for each of so many connections, as far as it may; say so where it may not."""
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


# Kinds of names that say who a client is, by gRPC's keys; an address says only where somebody was.
_NAMES = ("peer_dns", "peer_uri", "peer_email")
_ALL_ALTERNATIVES = "x509_subject_alternative_name"
_COMMON_NAME = "x509_common_name"


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials for a port, which follow every later `reload` of the files."""
    seen = files.contents

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return what is new since the last time, if anything is; gRPC asks at each handshake, on a thread of its own."""
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


def peer_names(context: Context) -> tuple[str, ...]:
    """Return the names in the certificate that the client has shown and the server has verified, as they are written there.

    Args:
        context: Of the RPC.

    Returns:
        Its subject alternative names: DNS names, URIs, then e-mail addresses. The subject's common name only where it has no
        alternative names of any kind, addresses included. Empty without a certificate. Names that are not printable are left out.
    """
    shown = context.auth_context()
    keys = _NAMES if _ALL_ALTERNATIVES in shown else (_COMMON_NAME,)
    names = (value.decode(errors="replace") for key in keys for value in shown.get(key, ()))
    return tuple(name for name in names if name and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name)


def _configuration(contents: Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.client_ca)


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
    rate = MessageRate(config.max_messages_per_second) if config.max_messages_per_second else None
    methods = {**OWN_METHODS, **OPEN_INFERENCE_METHODS}
    around = CallInterceptor(
        core.calls, core.generation.max_characters, peer_names, rate, core.generation.deadlines, methods, core.in_flight
    )
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
    generation = GenerationServicer(core, config.max_message_bytes)
    generation_pb2_grpc.add_GenerationServicer_to_server(generation, _Unregistered(server))  # type: ignore[no-untyped-call]
    inference = InferenceServicer(core, config.max_message_bytes)
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
