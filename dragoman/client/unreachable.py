"""Why a connection never came about, in one line with what to do: gRPC says it in words of its own insides."""

import re
from typing import Final
from urllib.parse import unquote

# Of grpcio 1.75 and of 1.85. What fits none of these is passed on as it is.
_CONNECTION = re.compile(
    r"(?:failed to connect to all addresses|connections to all backends failing); last error: "
    r"(?:[A-Z_]+: )?(?P<peer>(?:ipv4|ipv6|unix|unix-abstract|vsock):\S+): (?P<cause>.+)",
    re.DOTALL,
)
_LOOK_UPS: Final = (
    re.compile(r"errors resolving (?P<name>\S+): \[.*?(?P<cause>[^:\[\]]+)\]", re.DOTALL),
    re.compile(r"DNS resolution failed for (?P<name>\S+): .*?(?P<cause>[^:]+)", re.DOTALL),
)
_REFUSED = "nothing answers there ({at}{why}); is the server running?"
_NO_SOCKET = "there is no such socket ({why}); is the server running?"
_NO_WAY = "it cannot be reached ({at}{why}); is the address right?"
_CLOSED = "the connection was closed at once ({at}{why}); is it a Dragoman server, and does it want TLS or a client's certificate?"
_NO_TLS = "no TLS is spoken there; call it without credentials"
_NOT_TRUSTED = "the server's certificate is not trusted ({why}); is it of the authority that was given?"
_ANOTHER_NAME = "the server's certificate is not for this name; call it by one that the certificate has"
_NOT_GRPC = "what answers there does not speak gRPC; is it the port of a Dragoman server?"

# The cause as gRPC words it, and what we say: of a name with several addresses also which of them it was.
_CAUSES: Final = (
    (r"(?:Failed to connect to remote host: )?(?:connect: )?(?P<why>Connection refused)(?: \(\d+\))?", _REFUSED),
    (r"connect failed: addr: \S+ error: (?P<why>Connection refused)", _REFUSED),
    (r"(?:connect failed: addr: \S+ error|connect): (?P<why>No such file or directory)(?: \(\d+\))?", _NO_SOCKET),
    (r"Failed to connect to remote host: (?:connect: )?(?P<why>[^:()]+)(?: \(\d+\))?", _NO_WAY),
    (r"(?:recvmsg:|sendmsg:)?(?P<why>Socket closed|Connection reset by peer|Broken pipe)(?: \(\d+\))?", _CLOSED),
    (r"(?:Tls|Ssl) handshake failed .*\bWRONG_VERSION_NUMBER\b.*", _NO_TLS),
    (r"(?:Tls|Ssl) handshake failed .*\bCERTIFICATE_VERIFY_FAILED: (?P<why>[^:]+)(?:: OK)?", _NOT_TRUSTED),
    (r"(?:Tls|Ssl) handshake failed .*\bOPENSSL_internal:(?P<why>[A-Z0-9_]+)\b.*", "the TLS handshake failed ({why})"),
    (r"Custom verification check failed .*Hostname Verification Check failed.*", _ANOTHER_NAME),
    (r"Peer name \S+ is not in peer certificate", _ANOTHER_NAME),
    (r".*Trying to connect an http1\.x server.*|Failed parsing HTTP/2 .*", _NOT_GRPC),
)


def explain(details: str, target: str = "") -> str | None:
    """Return the line for a call that failed with these details.

    Args:
        details: What gRPC says; of a name with several addresses that is the reason of one.
        target: Server as the caller named it; empty for the address that gRPC names.

    Returns:
        None for anything but a connection that never came about, for a reason that is known.
    """
    for pattern in _LOOK_UPS:
        if found := pattern.fullmatch(details):
            return f"{target or found['name']}: the name cannot be looked up ({found['cause'].strip()}); is it right?"
    if not (failure := _CONNECTION.fullmatch(details)):
        return None
    peer = unquote(failure["peer"]).removeprefix("ipv4:").removeprefix("ipv6:")
    for cause, words in _CAUSES:
        if found := re.fullmatch(cause, failure["cause"].strip(), re.DOTALL):
            at = "" if target in ("", peer) else f"{peer}: "
            return f"{target or peer}: {words.format(at=at, **found.groupdict())}"
    return None
