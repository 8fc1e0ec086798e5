"""gRPC targets for one or several servers, and connections to them."""

import ipaddress
import itertools
import socket
import time
from collections.abc import Callable

import grpc
import msgspec
from grpc import aio

from dragoman.client.aio import AsyncClient
from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import Settings, grpc_target, is_grpc_target
from dragoman.load.plan import Server
from dragoman.model.errors import InputError

Resolve = Callable[[str, str], list[str]]


class Target(msgspec.Struct, frozen=True):
    """Target of a connection."""

    name: str  # for gRPC
    authority: str | None = None  # host that a certificate must name; None for the target's own


def resolve(host: str, port: str) -> list[str]:
    """Return the addresses of a host.

    Raises:
        OSError: If it has none.
    """
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def make_target(servers: str, lookup: Resolve = resolve, *, is_secure: bool = False) -> Target:
    """Return the target for one server as `client.target` reads it, or for several `HOST:PORT` with commas between.

    One alone is gRPC's to look up, again and again, and so is a target of a gRPC scheme with commas of its own.

    Args:
        servers: As the user gave them.
        lookup: Finds the addresses of a host.
        is_secure: Whether TLS will be spoken.

    Raises:
        InputError: If one is malformed or cannot be looked up.
    """
    parts = [part.strip() for part in servers.split(",") if part.strip()]
    if not parts:
        raise InputError("--server: is empty")
    if len(parts) == 1 or is_grpc_target(parts[0]):
        try:
            return Target(grpc_target(",".join(parts), is_secure=is_secure))
        except ValueError as error:
            raise InputError(str(error).replace("target", "--server", 1)) from error
    endpoints: list[tuple[list[str], str]] = []
    hosts = []
    for part in parts:
        host, separator, port = part.rpartition(":")
        if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(f"--server: {part}: not HOST:PORT")
        hosts.append(host.strip("[]"))
        try:
            endpoints.append((lookup(hosts[-1], port), port))
        except OSError as error:
            raise InputError(f"--server: {part}: {error.strerror or error}") from error
    for version in (4, 6):
        chosen = [
            [(address, port) for address in addresses if ipaddress.ip_address(address).version == version]
            for addresses, port in endpoints
        ]
        if all(chosen):
            pairs = itertools.chain.from_iterable(chosen)
            texts = [f"{address}:{port}" if version == 4 else f"[{address}]:{port}" for address, port in dict.fromkeys(pairs)]
            return Target(f"ipv{version}:" + ",".join(texts), hosts[0])
    raise InputError("--server: some have IPv4 addresses only and some IPv6 addresses only")


def split_target(name: str) -> list[str]:
    """Return a target for each address of one that `make_target` made of several; a single one is as it was."""
    scheme, _, addresses = name.partition(":")
    if scheme in ("ipv4", "ipv6") and "," in addresses:
        return [f"{scheme}:{address}" for address in addresses.split(",")]
    return [name]


def open_channel(server: Server) -> aio.Channel:
    """Return a channel to a server, with the options that the client has; it connects when it is first used."""
    settings = Settings(server.target, 1.0, RetryPolicy(), server.token, _options(server), time.monotonic)
    credentials = _credentials(server)
    if credentials is None:
        return aio.insecure_channel(server.target, settings.channel_options())
    return aio.secure_channel(server.target, credentials, settings.channel_options())


def open_client(server: Server, timeout_seconds: float) -> AsyncClient:
    """Return a client of a server.

    Raises:
        InputError: If the token cannot be sent.
    """
    try:
        return AsyncClient(
            server.target,
            timeout_seconds=timeout_seconds,
            credentials=_credentials(server),
            token=server.token,
            options=_options(server),
        )
    except ValueError as error:
        raise InputError(f"--{error}".replace("--target", "--server", 1)) from error


def _credentials(server: Server) -> grpc.ChannelCredentials | None:
    return None if server.pem is None else server.pem.credentials()


def _options(server: Server) -> dict[str, str | int]:
    options: dict[str, str | int] = {}
    if server.authority is not None:
        options["grpc.default_authority"] = server.authority
    if server.server_name:
        options["grpc.ssl_target_name_override"] = server.server_name
    return options
