"""Connections of the command line: TLS files, health checks, and failures explained in one line."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from dragoman.client.connection_failures import advise
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


def in_one_line(error: CallError, server: str, is_tls: bool) -> str:
    """Return the line about a failed call: why the server, as the user named it, was not reached and what to do, or its answer."""
    if isinstance(error, DeadlineExceeded) and error.message == "Deadline Exceeded":  # gRPC's own words: no server said so
        return f"{server}: no answer in time ({error.code})"
    if isinstance(error, Unavailable) and (advice := advise(error.message, is_tls)):
        return f"{server}: {advice}"
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
