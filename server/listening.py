"""Helpers for listening ports: addresses, certificate dates, bearer tokens."""

import errno
import hashlib
import socket
import ssl
from typing import NoReturn

from dragoman.server.config import ConfigError

# X509_V_FLAG_NO_CHECK_TIME of OpenSSL, not named by Python: accept expired certificates to read their dates.
_NO_CHECK_TIME = 0x200000
MAX_TOKEN_CHARACTERS = 4096


def addresses_of(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Return the addresses that gRPC listens on: all of a name's; for any-IPv4, any-IPv6 if that accepts both.

    Raises:
        OSError: If the host does not exist.
        UnicodeError: If IDNA cannot encode the name.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if socket.has_dualstack_ipv6() and any(address[0] in ("0.0.0.0", "::") for _, address in addresses):
        return [(socket.AddressFamily.AF_INET6, ("::", port, 0, 0))]
    return [(family, tuple(address)) for family, address in addresses]


def in_url(host: str) -> str:
    """Return a host as in URLs: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def cannot_listen(setting: str, host: str, port: int, error: BaseException | None) -> ConfigError:
    """Return the error that names the setting of a port; without an `OSError`, the host name is invalid."""
    if not isinstance(error, OSError):
        return ConfigError(f"{setting}: cannot listen on {host}:{port}: no such host")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{setting}: cannot listen on {host}:{port}; is another process using it?")
    return ConfigError(f"{setting}: cannot listen on {host}:{port}: {error.strerror or error}")


def read_dates(context: ssl.SSLContext, certificate: bytes) -> tuple[float, float]:
    """Return a certificate's validity, begin and end in seconds since 1970, from an in-memory handshake with its server context.

    Raises:
        ssl.SSLError: If no client could accept the certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    client.load_verify_locations(cadata=text_of(certificate))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = context.wrap_bio(to_server, to_client, server_side=True)
    while not _is_done(asking):
        _is_done(answering)
    shown = asking.getpeercert()
    assert shown
    return ssl.cert_time_to_seconds(str(shown["notBefore"])), ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _is_done(end: ssl.SSLObject) -> bool:
    """Continue a handshake; return whether this end has finished."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def text_of(certificates: bytes) -> str:
    """Return PEM certificates as text, without non-ASCII characters."""
    return certificates.decode("ascii", errors="ignore")


def is_token(text: str) -> bool:
    """Return whether a text is a valid token: printable ASCII without spaces, at most `MAX_TOKEN_CHARACTERS`."""
    return 0 < len(text) <= MAX_TOKEN_CHARACTERS and text.isascii() and text.isprintable() and " " not in text


def digest_of(token: str) -> bytes:
    """Return the SHA-256 digest of a token, even an invalid one."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def no_password() -> NoReturn:
    """Raise `ValueError`: password callback for keys, which must not be encrypted."""
    raise ValueError("the key is encrypted")
