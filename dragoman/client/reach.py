"""What the command line says of a call that failed: one line, in its flags, and what to do where the server was not reached."""

import re
from dataclasses import dataclass
from typing import Final

from dragoman.client.errors import CallError, DeadlineExceeded, Unavailable
from dragoman.client.flags import in_flags


@dataclass(frozen=True, slots=True)
class Cause:
    """A way for a connection to fail.

    Attributes:
        pattern: Found in what the client says of it, in its own words or in gRPC's.
        reason: What the command line says; may have the pattern's groups in it.
        is_tls: Whether that is for connections with TLS only, or for others only; None for both.
    """

    pattern: str
    reason: str
    is_tls: bool | None = None


_WHERE: Final = "is `dragoman serve` running? --server names another"
_HANDSHAKE: Final = "the TLS handshake failed: "
_CLOSED: Final = r"Socket closed|Connection reset|Broken pipe|closed at once"
# The first that is found is told.
_CAUSES: Final = (
    # Of a name with several addresses gRPC tells one: another may have failed for another reason.
    Cause(
        r"nothing answers there \((?P<at>\S+): Connection refused",
        f"nothing answers at {{at}} (connection refused); {_WHERE}; where it speaks TLS, --ca turns that on",
        is_tls=False,
    ),
    Cause(
        r"nothing answers there \((?P<at>\S+): Connection refused",
        f"nothing answers at {{at}} (connection refused); {_WHERE}; where it asks for a certificate, "
        "--certificate and --key name ours",
        is_tls=True,
    ),
    Cause(r"Connection refused", f"nothing answers there (connection refused); {_WHERE}"),
    Cause(r"unix\S*:.*No such file or directory", f"there is no such socket; {_WHERE}"),
    Cause(r"lookup error|lookup failed|looked up|errors resolving|DNS resolution", f"the name is not known; {_WHERE}"),
    Cause(
        r"Hostname Verification|in peer certificate|not for this name",
        f"{_HANDSHAKE}the certificate is for another name; --server-name says which it has",
    ),
    Cause(r"certificate (?P<why>has expired|is not yet valid)", f"{_HANDSHAKE}the certificate {{why}}"),
    Cause(
        r"(?:CERTIFICATE_VERIFY_FAILED: |not trusted \()(?P<why>[^:()]+)",
        f"{_HANDSHAKE}the certificate is not trusted ({{why}}); --ca names the authority that it is of",
    ),
    Cause(r"WRONG_VERSION_NUMBER|no TLS is spoken", f"{_HANDSHAKE}the server speaks plain text; leave --ca out"),
    Cause(r"OPENSSL_internal:(?P<why>\w+)", f"{_HANDSHAKE}{{why}}"),
    Cause(r"[Hh]andshake failed \((?P<why>\w+)\)", f"{_HANDSHAKE}{{why}}"),
    Cause(_CLOSED, "it closed the connection; where it asks for a certificate, --certificate and --key name ours", is_tls=True),
    Cause(_CLOSED, "it closed the connection; where it speaks TLS only, --ca turns that on", is_tls=False),
    Cause(r"http1\.x|HTTP/2|not speak gRPC", "what answers there does not speak gRPC; --server names the gRPC port, not metrics'"),
    Cause(r"No route to host|unreachable|[Tt]imed out|[Tt]imeout|cannot be reached", f"it cannot be reached; {_WHERE}"),
)


def in_one_line(error: CallError, server: str, is_tls: bool) -> str:
    """Return what to say of a failed call: why the server was not reached and what to do, or what it answered.

    Args:
        error: How the call failed.
        server: As the user named it.
        is_tls: Whether TLS was spoken.
    """
    if isinstance(error, DeadlineExceeded) and error.message == "Deadline Exceeded":  # gRPC's own words: no server said so
        return f"{server}: no answer in time ({error.code})"
    if isinstance(error, Unavailable):
        for cause in _CAUSES:
            found = re.search(cause.pattern, error.message, re.DOTALL)
            if found is not None and cause.is_tls in (None, is_tls):
                return f"{server}: {cause.reason.format(**found.groupdict())}"
    return f"{in_flags(error.message)} ({error.code})"
