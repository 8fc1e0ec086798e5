"""gRPC targets for one or several servers, and connections to them."""

import ipaddress
import socket
import time
from collections.abc import Callable

from grpc import aio

from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import Settings, grpc_target, is_grpc_target
from dragoman.load.plan import Server
from dragoman.model.errors import InputError


def resolve(host: str, port: str) -> list[str]:
    """Return the addresses of a host; raises `OSError` if it has none."""
    return [str(address[0]) for *_, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]


def make_server(servers: str, lookup: Callable[[str, str], list[str]] = resolve, *, is_secure: bool = False) -> Server:
    """Return one server as `client.target` reads it, or several `HOST:PORT` with commas between as one target.

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
            return Server(grpc_target(",".join(parts), is_secure=is_secure))
        except ValueError as error:
            raise InputError(str(error).replace("target", "--server", 1)) from error
    hosts = []
    found: list[dict[int, list[str]]] = []  # targets of each server, by the version of IP
    for part in parts:
        host, separator, port = part.rpartition(":")
        if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(f"--server: {part}: not HOST:PORT")
        hosts.append(host.strip("[]"))
        found.append({4: [], 6: []})
        try:
            addresses = lookup(hosts[-1], port)
        except OSError as error:
            raise InputError(f"--server: {part}: {error.strerror or error}") from error
        for address in addresses:
            version = ipaddress.ip_address(address).version
            found[-1][version].append(f"{address}:{port}" if version == 4 else f"[{address}]:{port}")
    for version in (4, 6):
        if all(targets[version] for targets in found):
            unique = dict.fromkeys(target for targets in found for target in targets[version])
            return Server(f"ipv{version}:" + ",".join(unique), hosts[0])
    raise InputError("--server: some have IPv4 addresses only and some IPv6 addresses only")


def split_target(target: str) -> list[str]:
    """Return a target for each address of one that `make_server` made of several; a single one is as it was."""
    scheme, _, addresses = target.partition(":")
    return [f"{scheme}:{address}" for address in addresses.split(",")] if scheme in ("ipv4", "ipv6") else [target]


def open_channel(server: Server) -> aio.Channel:
    """Return a channel to a server, with the options that the client has; it connects when it is first used."""
    settings = Settings(server.target, 1.0, RetryPolicy(), server.token, server.options(), time.monotonic, server.pem is not None)
    channel: aio.Channel = settings.channel(aio, server.credentials())
    return channel
