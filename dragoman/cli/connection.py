"""How a command connects to the server it asks."""

from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.sync import Client


def connect(server: str, timeout: float, token: str | None, ca: Path | None) -> "Client":
    """Connect to a server, over TLS if its certificate authority is given."""
    import grpc

    from dragoman.client.certificates import read_certificates
    from dragoman.client.sync import Client

    credentials = None if ca is None else grpc.ssl_channel_credentials(read_certificates(ca))
    try:
        return Client(server, timeout_seconds=timeout, token=token, credentials=credentials)
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        flags = {"target": "--server", "timeout_seconds": "--timeout", "token": "--token"}
        raise InputError(f"{flags.get(field, field)}: {reason}") from error
