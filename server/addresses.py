"""What a host stands for: addresses to listen on."""

import socket


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
