"""`dragoman models`: lists what a server has, and asks its admin service for something else."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dragoman.cli.connection import CallFailed, connect, open_client
from dragoman.cli.options import (
    DEFAULT_SERVER,
    SERVER,
    AuthorityOption,
    CertificateOption,
    JsonOption,
    KeyOption,
    ServerNameOption,
    ServerOption,
    TokenOption,
)
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.repository import ModelStatus, RepositoryClient

app = typer.Typer()
models_app = typer.Typer(
    name="models", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False
)

DEFAULT_ADMIN: Final = "127.0.0.1:8502"
AdminOption = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="DRAGOMAN_ADMIN_SERVER",
        help="Address of the admin service: the server's admin_host and admin_port.",
        rich_help_panel=SERVER,
    ),
]
AdminTimeoutOption = Annotated[
    float, typer.Option(min=0.001, help="Seconds to wait for the change; it goes on after that.", rich_help_panel=SERVER)
]
AdminTokenOption = Annotated[
    str | None, typer.Option(envvar="DRAGOMAN_ADMIN_TOKEN", help="Bearer token of an operator.", rich_help_panel=SERVER)
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]


@models_app.callback()
def models(
    context: typer.Context,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the server to be ready.")] = 0.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """List a server's models; with --wait, as soon as all are ready.

    With their languages, defaults and versions; --json has all of each.
    The commands below ask a server's admin service, which has an address
    of its own (admin_port): their options stand behind them.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from dragoman.client.reach import Tls, why_not_serving
    from dragoman.client.tables import print_models

    if math.isnan(wait):  # would never be over
        raise InputError("--wait: nan is not a number of 0 or more")
    tls = Tls(ca, certificate, key, server_name)
    with open_client(server, 5.0, token, tls, is_retrying=False) as client:
        end = time.monotonic() + wait
        while wait and (reason := why_not_serving(client, server, "", ca is not None)):
            if time.monotonic() > end:
                raise CallFailed(f"not ready within {wait:g} s; {reason}")
            time.sleep(0.1)
    with connect(server, 60.0, token, ca, certificate, key, server_name) as client:
        print_models(client.models(), sys.stdout, as_json)


def _refuse_options(context: typer.Context) -> None:
    """Refuse options of the list that are given for another command: they would have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{parameter.opts[0]}: stands behind {context.invoked_subcommand}, if that has it")


@contextmanager
def _administer(
    server: str,
    timeout: float,
    token: str | None,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    server_name: str,
) -> "Iterator[RepositoryClient]":
    """Connect to the admin service of a server.

    Raises:
        InputError: If one of the options cannot be used, naming it.
        CallFailed: If a call in the block fails.
    """
    from dragoman.client.errors import CallError, DeadlineExceeded, Unavailable, Unimplemented
    from dragoman.client.reach import Tls, in_one_line
    from dragoman.client.repository import RepositoryClient

    tls = Tls(ca, certificate, key, server_name)
    credentials, options = tls.credentials(), dict(tls.options())
    try:
        client = RepositoryClient(server, timeout_seconds=timeout, token=token, credentials=credentials, options=options)
    except ValueError as error:
        field, separator, reason = str(error).partition(": ")
        flags = {"target": "--server", "timeout_seconds": "--timeout", "token": "--token"}
        raise InputError(f"{flags[field]}{separator}{reason}" if field in flags else str(error)) from error
    with client:
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
            raise CallFailed(in_one_line(error, server, is_tls=ca is not None).removeprefix("--") + hint) from error


def _change(change: "Callable[[RepositoryClient], ModelStatus]", as_json: bool, *connection: object) -> None:
    """Ask for a change, wait for it, and print how the model is then."""
    from dragoman.client.tables import print_repository

    with _administer(*connection) as client:  # type: ignore[arg-type]
        print_repository([change(client)], sys.stdout, as_json)


@models_app.command(name="list")
def list_(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Only this one.")] = "",
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 60.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Tell what has become of every version, with reasons and problems."""
    from dragoman.client.tables import print_repository

    with _administer(server, timeout, token, ca, certificate, key, server_name) as client:
        found, problem = client.models(model)
    print_repository(found, sys.stdout, as_json)
    if problem:
        typer.echo(f"dragoman: the folder of models cannot be looked at: {problem}", err=True)


@models_app.command()
def refresh(
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 600.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Look at all folders now, and wait until all is done."""
    from dragoman.client.tables import print_repository

    with _administer(server, timeout, token, ca, certificate, key, server_name) as client:
        print_repository(client.refresh()[0], sys.stdout, as_json)


@models_app.command()
def load(
    model: ModelArgument,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="Beside the policy's; without it, the policy's.")] = "",
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 600.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Serve a version beside those that the policy asks for.

    Without a version, serve what the policy asks for: that undoes unload and rollback.
    """
    _change(lambda client: client.load(model, version), as_json, server, timeout, token, ca, certificate, key, server_name)


@models_app.command()
def unload(
    model: ModelArgument,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="Only this one; without it, the whole model.")] = "",
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 600.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Serve a model, or one version of it, no more."""
    _change(lambda client: client.unload(model, version), as_json, server, timeout, token, ca, certificate, key, server_name)


@models_app.command()
def reload(
    model: ModelArgument,
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 600.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Look at a model's folder now, and try again what was refused.

    The exit code is 1 if something of what the policy asks for cannot be served.
    """
    _change(lambda client: client.reload(model), as_json, server, timeout, token, ca, certificate, key, server_name)


@models_app.command()
def rollback(
    model: ModelArgument,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="By default the one that answered before.")] = "",
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 600.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Have an earlier version answer all requests that name none.

    It holds until `dragoman models load MODEL`, or until the server ends.
    """
    _change(lambda client: client.rollback(model, version), as_json, server, timeout, token, ca, certificate, key, server_name)


@models_app.command()
def label(
    model: ModelArgument,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Such as stable or canary.")],
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="Without it the label stands for none.")] = "",
    as_json: JsonOption = False,
    server: AdminOption = DEFAULT_ADMIN,
    timeout: AdminTimeoutOption = 600.0,
    token: AdminTokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Have a label stand for a version, or for none."""
    _change(
        lambda client: client.set_label(model, label, version),
        as_json,
        server,
        timeout,
        token,
        ca,
        certificate,
        key,
        server_name,
    )


app.add_typer(models_app)
