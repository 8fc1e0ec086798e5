"""What one connection may have, and how many there may be: settings as gRPC core knows them."""

import resource
from typing import Any

import structlog

from dragoman.server.config import ServerConfig

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
