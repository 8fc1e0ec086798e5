"""Connections of the command line: TLS files, health checks, and failures explained in one line."""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from dragoman.client.errors import CallError, DeadlineExceeded, ModelNotFound, Unavailable
from dragoman.client.search import in_flags
from dragoman.client.settings import ChannelOptions
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.sync import Client


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the files for TLS, which can be passed to another process; None where there is none."""

    authority: bytes
    certificate: bytes | None = None
    key: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what gRPC makes of them."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of a connection; without an authority it is plain text. Raises `InputError` if one lacks another."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = ("--certificate", "--key") if self.key is None else ("--key", "--certificate")
            raise InputError(f"{given} is given without {missing}: --certificate and --key go together")
        if self.authority is None and (self.certificate is not None or self.server_name):
            raise InputError("--certificate, --key and --server-name go with --ca, which turns TLS on")

    def read(self) -> Pem | None:
        """Read the files, None for plain text; raises `InputError` if one is unreadable or wrong, or the key another's."""
        if self.authority is None:
            return None
        authority = read_certificates(self.authority)
        if self.certificate is None or self.key is None:
            return Pem(authority)
        return Pem(authority, read_certificates(self.certificate), _read_key(self.key, self.certificate))

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel, None for plain text; raises as `read`."""
        pem = self.read()
        return None if pem is None else pem.credentials()

    def options(self) -> ChannelOptions:
        """Return the options of a channel."""
        return {"grpc.ssl_target_name_override": self.server_name} if self.server_name else {}


PLAIN = Tls()


def read_certificates(path: Path) -> bytes:
    """Read a PEM file of certificates; raises `InputError` if it is none."""
    return _read(path, lambda context: context.load_verify_locations(cafile=path), "a PEM file of certificates")


def _read_key(path: Path, certificate: Path) -> bytes:
    """Read the private key of a certificate, which is read already."""

    def load(context: ssl.SSLContext) -> None:
        # Without a password here OpenSSL would ask the terminal for that of an encrypted key; gRPC takes none of those.
        context.load_cert_chain(certificate, path, password="")

    return _read(path, load, "a PEM file of a private key without a password", f"the key of {certificate}")


def _read(path: Path, load: Callable[[ssl.SSLContext], None], kind: str, other: str = "") -> bytes:
    try:
        content = path.read_bytes()
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    except ssl.SSLError as error:
        wanted = other if error.reason == "KEY_VALUES_MISMATCH" else kind
        raise InputError(f"{path}: not {wanted}") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    return content


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a failed connection: a pattern of its message, the advice, and whether that is for TLS or plain text only."""

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
    """Return the line about a failed call: why the server, as the user named it, was not reached and what to do, or its answer."""
    if isinstance(error, DeadlineExceeded) and error.message == "Deadline Exceeded":  # gRPC's own words: no server said so
        return f"{server}: no answer in time ({error.code})"
    if isinstance(error, Unavailable):
        for cause in _CAUSES:
            found = re.search(cause.pattern, error.message, re.DOTALL)
            if found is not None and cause.is_tls in (None, is_tls):
                return f"{server}: {cause.reason.format(**found.groupdict())}"
    return f"{in_flags(error.message)} ({error.code})"


def why_not_serving(client: "Client", server: str, service: str, is_tls: bool) -> str:
    """Ask a server once whether a service serves; return the reason in one line, empty if it does.

    Services are those of grpc.health.v1: empty or `readiness`, `liveness`, or a model's name.
    """
    try:
        if client.is_ready(service):
            return ""
    except ModelNotFound:
        return f"{server}: no service {service!r}; there are liveness, readiness and the models by their names"
    except CallError as error:
        return in_one_line(error, server, is_tls)
    # It said no or said nothing: what it does with another question tells which.
    try:
        client.models()
    except CallError as error:
        reason = in_one_line(error, server, is_tls)
        if reason.startswith(f"{server}: "):
            return reason
    return f"{server}: {service or 'readiness'} is not serving, the server says"
