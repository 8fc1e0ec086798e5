"""What a caller may give as the server to call, and what gRPC is told: the one place where addresses are read."""

import ipaddress
import re
from typing import Final

DEFAULT_PORT: Final = 8500

# What gRPC itself understands, and is left to it: https://grpc.github.io/grpc/core/md_doc_naming.html
_GRPC_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"})
_PLAIN_SCHEMES = frozenset({"http", "grpc"})
_TLS_SCHEMES = frozenset({"https", "grpcs"})

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_GRPC_TARGET = re.compile(rf"(?:{'|'.join(sorted(_GRPC_SCHEMES))}):.+", re.DOTALL)
_ADDRESS = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?P<port>:.*)?", re.DOTALL)
_NOT_IN_A_HOST = re.compile(r"[^\w.-]")


def grpc_target(target: str, *, is_secure: bool = False) -> str:
    """Return the target for gRPC.

    `HOST:PORT`, and `HOST` alone with our port, where a host is a name, an IPv4 address or an IPv6 address in brackets; the same
    after `http://` or `grpc://`, and, where there are credentials for TLS, after `https://` or `grpcs://`. What names one of gRPC's
    own schemes (`dns:///name:8500`, `unix:/path`, `ipv4:10.0.0.1:8500,10.0.0.2:8500`, `xds:///name`) is returned as it is.

    Args:
        target: As the caller gave it.
        is_secure: Whether the connection has credentials.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is none of these; the message begins with `target: `.
    """
    if not isinstance(target, str):
        raise TypeError(f"target: a str is wanted, such as '127.0.0.1:{DEFAULT_PORT}', not {target!r}")
    if not target:
        raise ValueError(f"target: is empty; HOST:PORT is wanted, such as 127.0.0.1:{DEFAULT_PORT}")
    if is_grpc_target(target):
        return target
    if any(character.isspace() or not character.isprintable() for character in target):
        raise ValueError(f"target: {target!r} has a space or a control character in it")
    if url := _URL.fullmatch(target):
        return _address(_authority(target, url["scheme"].lower(), url["rest"], is_secure), target)
    return _address(target, target)


def is_grpc_target(target: str) -> bool:
    """Tell whether this names one of gRPC's own schemes."""
    return _GRPC_TARGET.fullmatch(target) is not None


def _authority(target: str, scheme: str, rest: str, is_secure: bool) -> str:
    """Return what a URL says of host and port."""
    authority = rest.removesuffix("/")
    if "@" in authority:  # which is not repeated: there may be a password in it
        raise ValueError(f"target: a {scheme}:// address with a user name in it; a bearer token is given as such")
    if scheme in _TLS_SCHEMES and not is_secure:
        raise ValueError(f"target: {target}: {scheme}:// alone does not turn TLS on: give credentials (credentials=, --ca) too")
    if scheme in _PLAIN_SCHEMES and is_secure:
        raise ValueError(f"target: {target}: {scheme}:// is plain text, but credentials for TLS are given")
    if scheme not in _PLAIN_SCHEMES | _TLS_SCHEMES:
        raise ValueError(f"target: {target}: {scheme}:// is not understood; give HOST:PORT")
    if re.search(r"[/?#]", authority):
        raise ValueError(f"target: {target}: a server has no path; give {scheme}://HOST:PORT")
    return authority


def _address(address: str, target: str) -> str:
    """Return `HOST:PORT` of what may be without the port."""
    if "," in address:
        raise ValueError(f"target: {target}: several addresses are given as ipv4:ADDRESS:PORT,ADDRESS:PORT")
    parts = _ADDRESS.fullmatch(address)
    is_bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
    if parts is None or is_bare_ipv6:
        hint = "; an IPv6 address goes in brackets, as in [::1]:8500" if is_bare_ipv6 else ""
        raise ValueError(f"target: {target}: not HOST:PORT{hint}")
    host, port = parts["host"], parts["port"]
    if not host:
        raise ValueError(f"target: {target}: there is no host in it")
    if host.startswith("["):
        _check_ipv6(host[1:-1], target)
    elif wrong := _NOT_IN_A_HOST.search(host):
        raise ValueError(f"target: {target}: {wrong[0]!r} in the host; HOST:PORT is wanted")
    return f"{host}:{DEFAULT_PORT if port is None else _port(port[1:], target)}"


def _check_ipv6(text: str, target: str) -> None:
    address, _, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError as error:
        raise ValueError(f"target: {target}: {address!r} in the brackets is not an IPv6 address") from error
    if _NOT_IN_A_HOST.search(zone):
        raise ValueError(f"target: {target}: {zone!r} is no name of a network interface")


def _port(text: str, target: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536):
        raise ValueError(f"target: {target}: the port {text!r} is not a number from 1 to 65535")
    return int(text)
