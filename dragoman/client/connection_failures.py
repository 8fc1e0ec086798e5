"""Failed connections: known causes as gRPC words them, our line about each, and the advice of the command line."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a failed connection, found by a pattern in gRPC's description or in our message."""

    pattern: str
    message: str  # the client's; empty where it leaves gRPC's description as it is
    advice: str  # the command line's, with flags
    tls_advice: str = ""  # where it is another


_RUNNING: Final = "is `dragoman serve` running? --server names another"
_HANDSHAKE: Final = "the TLS handshake failed: "
_NOT_TRUSTED: Final = "the server's certificate is not trusted ({why}); is it of the authority that was given?"
# The first that is found counts. Of grpcio 1.75 and 1.85.
_CAUSES: Final = (
    # Of a name with several addresses gRPC tells one: another may have failed for another reason.
    Cause(
        r"nothing answers there \((?P<at>\S+): Connection refused",
        "",
        f"nothing answers at {{at}} (connection refused); {_RUNNING}; where it speaks TLS, --ca turns that on",
        f"nothing answers at {{at}} (connection refused); {_RUNNING}; "
        "where it asks for a certificate, --certificate and --key name ours",
    ),
    Cause(
        r"(?P<why>Connection refused)",
        "nothing answers there ({at}{why}); is the server running?",
        f"nothing answers there (connection refused); {_RUNNING}",
    ),
    Cause(
        r"unix\S*:.*(?P<why>No such file or directory)",
        "there is no such socket ({why}); is the server running?",
        f"there is no such socket; {_RUNNING}",
    ),
    Cause(r"lookup error|lookup failed|looked up|errors resolving|DNS resolution", "", f"the name is not known; {_RUNNING}"),
    Cause(
        r"Hostname Verification|in peer certificate|not for this name",
        "the server's certificate is not for this name; call it by one that the certificate has",
        f"{_HANDSHAKE}the certificate is for another name; --server-name says which it has",
    ),
    Cause(r"(?P<why>certificate (?:has expired|is not yet valid))", _NOT_TRUSTED, f"{_HANDSHAKE}the {{why}}"),
    Cause(
        r"(?:CERTIFICATE_VERIFY_FAILED: |not trusted \()(?P<why>[^:()]+)",
        _NOT_TRUSTED,
        f"{_HANDSHAKE}the certificate is not trusted ({{why}}); --ca names the authority that it is of",
    ),
    Cause(
        r"WRONG_VERSION_NUMBER|no TLS is spoken",
        "no TLS is spoken there; call it without credentials",
        f"{_HANDSHAKE}the server speaks plain text; leave --ca out",
    ),
    Cause(r"handshake failed (?:.*OPENSSL_internal:|\()(?P<why>\w+)", "the TLS handshake failed ({why})", f"{_HANDSHAKE}{{why}}"),
    Cause(
        r"(?P<why>Socket closed|Connection reset by peer|Broken pipe)",
        "the connection was closed at once ({at}{why}); is it a Dragoman server, and does it want TLS or a client's certificate?",
        "it closed the connection; where it speaks TLS only, --ca turns that on",
        "it closed the connection; where it asks for a certificate, --certificate and --key name ours",
    ),
    Cause(
        r"http1\.x|HTTP/2|not speak gRPC",
        "what answers there does not speak gRPC; is it the port of a Dragoman server?",
        "what answers there does not speak gRPC; --server names the gRPC port, not metrics'",
    ),
    Cause(
        r"Failed to connect to remote host: (?:connect: )?(?P<why>[^:()]+)(?: \(\d+\))?$",
        "it cannot be reached ({at}{why}); is the address right?",
        f"it cannot be reached; {_RUNNING}",
    ),
    Cause(r"No route to host|unreachable|[Tt]imed out|[Tt]imeout|cannot be reached", "", f"it cannot be reached; {_RUNNING}"),
)
_CONNECTION: Final = re.compile(
    r"(?:failed to connect to all addresses|connections to all backends failing); last error: "
    r"(?:[A-Z_]+: )?(?P<peer>(?:ipv4|ipv6|unix|unix-abstract|vsock):\S+): .+",
    re.DOTALL,
)
_LOOK_UPS: Final = (
    re.compile(r"errors resolving (?P<name>\S+): \[.*?(?P<cause>[^:\[\]]+)\]", re.DOTALL),
    re.compile(r"DNS resolution failed for (?P<name>\S+): .*?(?P<cause>[^:]+)", re.DOTALL),
)


def explain(details: str, target: str = "") -> str | None:
    """Return the line about a connection that failed for a known reason; None for anything else.

    Args:
        details: gRPC's description; of a name with several addresses it is about one.
        target: Server as the caller named it; empty for the address that gRPC names.
    """
    for pattern in _LOOK_UPS:
        if found := pattern.fullmatch(details):
            return f"{target or found['name']}: the name cannot be looked up ({found['cause'].strip()}); is it right?"
    if not (failure := _CONNECTION.fullmatch(details)):
        return None
    peer = unquote(failure["peer"]).removeprefix("ipv4:").removeprefix("ipv6:")
    at = "" if target in ("", peer) else f"{peer}: "
    for cause in _CAUSES:
        if cause.message and (found := re.search(cause.pattern, details.strip(), re.DOTALL)):
            return f"{target or peer}: {cause.message.format(at=at, **found.groupdict())}"
    return None


def advise(message: str, is_tls: bool) -> str | None:
    """Return the advice about a connection that failed with this message, in flags of the command line; None for anything else."""
    for cause in _CAUSES:
        if found := re.search(cause.pattern, message, re.DOTALL):
            advice = cause.tls_advice if is_tls and cause.tls_advice else cause.advice
            return advice.format(**found.groupdict())
    return None
