"""How senders connect to a server, and the probe before them."""

import time

import grpc
from grpc import aio

from dragoman.client.aio import AsyncClient
from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import Settings
from dragoman.load.plan import Server
from dragoman.model.errors import InputError


def open_channel(server: Server) -> aio.Channel:
    """Return a channel to a server, with the options that the client has; it connects when it is first used."""
    settings = Settings(server.target, 1.0, RetryPolicy(), server.token, _options(server), time.monotonic)
    credentials = _credentials(server)
    if credentials is None:
        return aio.insecure_channel(server.target, settings.channel_options())
    return aio.secure_channel(server.target, credentials, settings.channel_options())


def open_client(server: Server, timeout_seconds: float) -> AsyncClient:
    """Return a client of a server.

    Raises:
        InputError: If the token cannot be sent.
    """
    try:
        return AsyncClient(
            server.target,
            timeout_seconds=timeout_seconds,
            credentials=_credentials(server),
            token=server.token,
            options=_options(server),
        )
    except ValueError as error:
        raise InputError(f"--{error}".replace("--target", "--server", 1)) from error


def _credentials(server: Server) -> grpc.ChannelCredentials | None:
    return None if server.pem is None else server.pem.credentials()


def _options(server: Server) -> dict[str, str | int]:
    options: dict[str, str | int] = {}
    if server.authority is not None:
        options["grpc.default_authority"] = server.authority
    if server.server_name:
        options["grpc.ssl_target_name_override"] = server.server_name
    return options
