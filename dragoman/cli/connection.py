"""Connections of commands to a server, and errors of failed calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.reach import Tls
    from dragoman.client.sync import Client


class CallFailed(Exception):
    """A call or another attempt failed; the message says it in one line, by flags. The command line prints it and exits with 1."""


class Interrupted(Exception):
    """Ctrl-C came, and there is something to tell. The command line prints the message and exits with 130."""


@contextmanager
def connect(
    server: str,
    timeout: float,
    token: str | None = None,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    server_name: str = "",
) -> "Iterator[Client]":
    """Connect to a server; the values are those of the options, and the last four say how TLS is spoken.

    Raises:
        InputError: If one of them cannot be used, naming the option.
        CallFailed: If a call in the block fails.
        Interrupted: If Ctrl-C ends the block, with notes; Typer would make an exit code of it and forget them.
    """
    from dragoman.client.errors import CallError
    from dragoman.client.reach import Tls, in_one_line

    tls = Tls(ca, certificate, key, server_name)
    with open_client(server, timeout, token, tls) as client:
        try:
            yield client
        except CallError as error:
            raise _with_notes(CallFailed(in_one_line(error, server, is_tls=ca is not None)), error) from error
        except KeyboardInterrupt as interrupt:
            if not hasattr(interrupt, "__notes__"):
                raise
            raise _with_notes(Interrupted("interrupted"), interrupt) from interrupt


def open_client(server: str, timeout: float, token: str | None, tls: "Tls", is_retrying: bool = True) -> "Client":
    """Return a client; raises `InputError` naming the option that it cannot use."""
    from dragoman.client.retry import DEFAULT_RETRY, RetryPolicy
    from dragoman.client.sync import Client

    credentials = tls.credentials()
    retry = DEFAULT_RETRY if is_retrying else RetryPolicy(max_attempts=1)
    try:
        return Client(server, timeout_seconds=timeout, retry=retry, token=token, credentials=credentials, options=tls.options())
    except ValueError as error:
        field, separator, reason = str(error).partition(": ")
        flags = {"target": "--server", "timeout_seconds": "--timeout", "token": "--token"}
        raise InputError(f"{flags[field]}{separator}{reason}" if field in flags else str(error)) from error


def _with_notes(error: Exception, cause: BaseException) -> Exception:
    """Return the error with the notes of another."""
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error
