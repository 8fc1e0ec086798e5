"""Options that several commands share, in groups, and connections to the server that they name."""

import inspect
import json
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar, get_type_hints

import typer

from dragoman.client.search import DENIABLE, FLAG_FIELDS, Search, Term, denial, flag, flag_help
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.repository import RepositoryClient
    from dragoman.client.sync import Client

DEFAULT_SERVER: Final = "127.0.0.1:8500"
TERMINATED: Final = 128 + signal.SIGTERM
# Panels of `--help`.
SERVER: Final = "Server"
SEARCH: Final = "Search"
AnyClient = TypeVar("AnyClient")


class CallFailed(Exception):
    """A call or another attempt failed; the message is one line, in flags. The command line prints it and exits with 1."""


class Interrupted(Exception):
    """Ctrl-C came, and there is something to tell. The command line prints the message and exits with 130."""


def in_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Expand parameters that are groups into their options: those of `Search`, or a dataclass whose fields are annotated."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    names: dict[str, list[str]] = {}
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        options = [parameter.replace(annotation=hints[parameter.name])] if group is None else list(_options(group))
        names[parameter.name] = [option.name for option in options]
        parameters += options

    @wraps(command)
    def run(**values: Any) -> None:
        given = {name: kind(**{option: values.pop(option) for option in names[name]}) for name, kind in groups.items()}
        command(**values, **given)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if group is Search:
            if field.name not in FLAG_FIELDS:
                continue
            if field.name == "terms":
                settings = {"parser": Term.parse, "metavar": "SOURCE=TARGET"}
                hint = Annotated[list[Any], search_option(field.name, **settings)]
            else:
                hint = Annotated[hint, search_option(field.name)]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)


def search_option(field: str, **settings: Any) -> Any:
    """Return the option for a field of `Search`."""
    names = f"{flag(field)}/{denial(field)}" if field in DENIABLE else flag(field)
    return typer.Option(names, help=flag_help(field), rich_help_panel=SEARCH, **settings)


def server_option(help_: str, **settings: Any) -> Any:
    """Return an option of the panel about the server."""
    return typer.Option(help=help_, rich_help_panel=SERVER, **settings)


ConcurrencyOption = Annotated[int, server_option("Requests under way at once.", min=1, max=1000)]
TimeoutOption = Annotated[float, server_option("Seconds for each request, retries included.", min=0.001)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output that is there.")]
HalfOption = Annotated[bool, typer.Option("--half", help="Round weights to half precision: half the size.")]


@dataclass(frozen=True)
class ModelOptions:
    """The model of a request, its version and its languages."""

    model: Annotated[str, typer.Option(metavar="NAME", help="Which of the server's models; may be left out where it has one.")] = ""
    model_version: Annotated[
        str, typer.Option(metavar="VERSION", help="Its version, by name, content or label; by default the policy's choice.")
    ] = ""
    source_language: Annotated[
        str, typer.Option("--from", metavar="LANGUAGE", help="Language of the texts, such as en; by default the model's.")
    ] = ""
    target_language: Annotated[
        str, typer.Option("--to", metavar="LANGUAGE", help="Language of the translations, such as de; by default the model's.")
    ] = ""


@dataclass(frozen=True)
class Connection:
    """Address, token and TLS settings of a server."""

    server: Annotated[
        str, server_option("Address of the server; the port may be left out.", metavar="HOST:PORT", envvar="DRAGOMAN_SERVER")
    ] = DEFAULT_SERVER
    token: Annotated[str | None, server_option("Bearer token.", envvar="DRAGOMAN_TOKEN")] = None
    ca: Annotated[Path | None, server_option("PEM file of the server's certificate authority; turns TLS on.", metavar="FILE")] = (
        None
    )
    certificate: Annotated[
        Path | None, server_option("PEM file of our certificate, where the server asks for one.", metavar="FILE")
    ] = None
    key: Annotated[Path | None, server_option("PEM file of the private key of --certificate.", metavar="FILE")] = None
    server_name: Annotated[str, server_option("Name in the server's certificate, if not the one of --server.", metavar="NAME")] = ""

    @contextmanager
    def connect(self, timeout: float = 60.0) -> "Iterator[Client]":
        """Connect to the server.

        Raises:
            InputError: If an option cannot be used, naming it.
            CallFailed: If a call in the block fails.
            Interrupted: If Ctrl-C ends the block, with notes; Typer would make an exit code of it and forget them.
        """
        from dragoman.client.errors import CallError

        with self.client(timeout) as client:
            try:
                yield client
            except CallError as error:
                raise _with_notes(CallFailed(self.explain(error)), error) from error
            except KeyboardInterrupt as interrupt:
                if not hasattr(interrupt, "__notes__"):
                    raise
                raise _with_notes(Interrupted("interrupted"), interrupt) from interrupt

    def client(self, timeout: float, is_retrying: bool = True) -> "Client":
        """Return a client; raises `InputError` naming the option that it cannot use."""
        from dragoman.client.retry import DEFAULT_RETRY, RetryPolicy
        from dragoman.client.sync import Client

        return self._make(Client, timeout, retry=DEFAULT_RETRY if is_retrying else RetryPolicy(max_attempts=1))

    def explain(self, error: Any) -> str:
        """Return the line about a call that failed."""
        from dragoman.client.reach import in_one_line

        return in_one_line(error, self.server, is_tls=self.ca is not None)

    def _make(self, kind: Callable[..., AnyClient], timeout: float, **settings: object) -> AnyClient:
        from dragoman.client.reach import Tls

        tls = Tls(self.ca, self.certificate, self.key, self.server_name)
        settings |= {"credentials": tls.credentials(), "options": tls.options(), "token": self.token}
        try:
            return kind(self.server, timeout_seconds=timeout, **settings)
        except ValueError as error:
            field, separator, reason = str(error).partition(": ")
            flags = {"target": "--server", "timeout_seconds": "--timeout", "token": "--token"}
            raise InputError(f"{flags[field]}{separator}{reason}" if field in flags else str(error)) from error


@dataclass(frozen=True)
class OptionalConnection(Connection):
    """A server that a command uses only if it is named."""

    server: Annotated[str, server_option("Use a running server.", metavar="HOST:PORT")] = ""


@dataclass(frozen=True)
class AdminConnection(Connection):
    """The admin service of a server."""

    server: Annotated[
        str,
        server_option(
            "Address of the admin service: the server's admin_host and admin_port.",
            metavar="HOST:PORT",
            envvar="DRAGOMAN_ADMIN_SERVER",
        ),
    ] = "127.0.0.1:8502"
    token: Annotated[str | None, server_option("Bearer token of an operator.", envvar="DRAGOMAN_ADMIN_TOKEN")] = None

    @contextmanager
    def administer(self, timeout: float) -> "Iterator[RepositoryClient]":
        """Connect to the admin service; raises as `connect`."""
        from dragoman.client.errors import CallError, DeadlineExceeded, Unavailable, Unimplemented
        from dragoman.client.repository import RepositoryClient

        with self._make(RepositoryClient, timeout) as client:
            try:
                yield client
            except CallError as error:
                hint = ""
                if isinstance(error, Unimplemented):
                    hint = "; --server names the admin service, which has a port of its own: the setting admin_port"
                elif isinstance(error, Unavailable) and "refused" in error.message:
                    hint = "; the admin service is there if admin_port is set"
                elif isinstance(error, DeadlineExceeded):
                    hint = "; what has begun goes on: `dragoman models list` tells how it is"
                # The model is no option here, but an argument.
                raise CallFailed(self.explain(error).removeprefix("--") + hint) from error


def given(context: typer.Context) -> dict[str, str]:
    """Return the flags given on the command line, by parameter; variables of the environment do not count."""
    return {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and (source := context.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    }


def refuse_given(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise `InputError` for a flag of these parameters that is given, with the reason why it has no effect."""
    for name, given_flag in given(context).items():
        if name in names:
            raise InputError(f"{given_flag} {reason}")


def report(as_json: bool, text: object, /, **values: object) -> None:
    """Print a result as text, or as one line of JSON."""
    typer.echo(json.dumps(values, ensure_ascii=False, default=str) if as_json else str(text))


@contextmanager
def tidy_when_terminated() -> Iterator[None]:
    """Exit at SIGTERM, removing unfinished output, as at Ctrl-C; also a decorator of functions."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def _with_notes(error: Exception, cause: BaseException) -> Exception:
    """Return the error with the notes of another."""
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error
