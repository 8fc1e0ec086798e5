"""How a command connects to the server it asks."""

from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.sync import Client


def connect(
    server: str,
    timeout: float,
    token: str | None = None,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    server_name: str = "",
) -> "Client":
    """Connect to a server; the values are those of the options, and the last four say how TLS is spoken.

    Raises:
        InputError: If one of them cannot be used, naming the option.
    """
    from dragoman.client.certificates import Tls
    from dragoman.client.sync import Client

    tls = Tls(ca, certificate, key, server_name)
    credentials = tls.credentials()
    try:
        return Client(server, timeout_seconds=timeout, token=token, credentials=credentials, options=tls.options())
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        flags = {"target": "--server", "timeout_seconds": "--timeout", "token": "--token"}
        raise InputError(f"{flags.get(field, field)}: {reason}") from error
