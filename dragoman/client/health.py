"""One question about a server's health, as load balancers ask it: for probes that cannot ask gRPC themselves."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from dragoman.client.certificates import read_certificates
from dragoman.client.settings import ChannelOptions
from dragoman.client.sync import Client
from dragoman.model.errors import InputError


@dataclass(frozen=True, slots=True)
class HealthTls:
    """How to speak to a server with TLS.

    Attributes:
        authority: PEM file of the server's certificate authority; None for plain text.
        certificate: PEM file of our own certificate, for a server that asks for one.
        key: PEM file of its private key.
        server_name: Name that the server's certificate must have, where it is not the one we call; empty for that one.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError("--certificate and --key go together")
        if self.authority is None and (self.certificate is not None or self.server_name):
            raise InputError("--certificate, --key and --server-name go with --ca")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Read the files.

        Raises:
            InputError: If one cannot be read or holds no certificate.
        """
        if self.authority is None:
            return None
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(read_certificates(self.authority))
        try:
            key = self.key.read_bytes()
        except OSError as error:
            raise InputError(f"{self.key}: {error.strerror}") from error
        return grpc.ssl_channel_credentials(read_certificates(self.authority), key, read_certificates(self.certificate))

    def options(self) -> ChannelOptions:
        """Return the options of the channel."""
        return {"grpc.ssl_target_name_override": self.server_name} if self.server_name else {}


def is_serving(target: str, service: str, timeout_seconds: float, tls: HealthTls) -> bool:
    """Ask a server once whether a service serves; one that cannot be reached does not.

    Args:
        target: The server.
        service: Name of grpc.health.v1: empty or `readiness`, `liveness`, or a model's name.
        timeout_seconds: Time for the question.
        tls: How to speak to it.

    Raises:
        InputError: If a file or an argument cannot be used.
        CallError: If the server does not know the service, or does not answer in time.
    """
    try:
        client = Client(target, timeout_seconds=timeout_seconds, credentials=tls.credentials(), options=tls.options())
    except ValueError as error:
        raise InputError(str(error).replace("target", "--server", 1)) from error
    with client:
        return client.is_ready(service)
