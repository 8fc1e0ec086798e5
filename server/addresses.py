"""Addresses to listen on, and the error where one cannot be used."""

import errno
import socket

from dragoman.server.config import ConfigError


def addresses_of(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Return what gRPC listens on: every address of a name; for the one of all of IPv4 that of IPv6, too, which takes both.

    Args:
        host: Name or address.
        port: Goes with each.

    Raises:
        OSError: If there is no such host.
        UnicodeError: If it is a name that IDNA cannot encode.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if socket.has_dualstack_ipv6() and any(address[0] in ("0.0.0.0", "::") for _, address in addresses):
        return [(socket.AddressFamily.AF_INET6, ("::", port, 0, 0))]
    return [(family, tuple(address)) for family, address in addresses]


def in_url(host: str) -> str:
    """Return a host as URLs have it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def cannot_listen(setting: str, host: str, port: int, error: BaseException | None) -> ConfigError:
    """Return the error that names the setting of a port; anything but an `OSError` is a name that IDNA cannot encode."""
    if not isinstance(error, OSError):
        return ConfigError(f"{setting}: cannot listen on {host}:{port}: no such host")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{setting}: cannot listen on {host}:{port}; is another process using it?")
    return ConfigError(f"{setting}: cannot listen on {host}:{port}: {error.strerror or error}")
