"""The certificates that a command line is given, checked when read: gRPC would say what is wrong at the first call only."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from dragoman.client.settings import ChannelOptions
from dragoman.model.errors import InputError


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of the files that TLS needs, which can be handed to another process.

    Attributes:
        authority: Certificates of the server's authority.
        certificate: Our own certificate, for a server that asks for one; None for none.
        key: Its private key; None for none.
    """

    authority: bytes
    certificate: bytes | None = None
    key: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what gRPC makes of them."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


@dataclass(frozen=True, slots=True)
class Tls:
    """How to speak to a server with TLS: the options --ca, --certificate, --key and --server-name.

    Attributes:
        authority: PEM file of the server's certificate authority; None for plain text.
        certificate: PEM file of our own certificate, for a server that asks for one.
        key: PEM file of its private key.
        server_name: Name that the server's certificate must have, where it is not the one we call; empty for that one.

    Raises:
        InputError: If one is given without another that it needs.
    """

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
        """Read the files; None for plain text.

        Raises:
            InputError: If one cannot be read, holds no certificate, or the key is not the certificate's.
        """
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
    """Read a PEM file of certificates.

    Raises:
        InputError: If it cannot be read or is not one.
    """
    try:
        content = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise InputError(f"{path}: not a PEM file of certificates") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    return content


def _read_key(path: Path, certificate: Path) -> bytes:
    """Read the private key of a certificate, which is read already."""
    try:
        content = path.read_bytes()
        # Without an answer here OpenSSL would ask the terminal for the password of an encrypted key; gRPC takes none of those.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, path, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"{path}: not the key of {certificate}") from error
        raise InputError(f"{path}: not a PEM file of a private key without a password") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    return content
