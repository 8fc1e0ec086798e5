"""`dragoman models`: lists a server's models, and asks its admin service for changes."""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import AdminConnection, CallFailed, Connection, JsonOption, given, in_groups, server_option
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.client.repository import ModelStatus, RepositoryClient

app = typer.Typer()
models_app = typer.Typer(
    name="models", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False
)

TimeoutOption = Annotated[float, server_option("Seconds to wait for the change; it goes on after that.", min=0.001)]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]


@models_app.callback()
@in_groups
def models(
    context: typer.Context,
    connection: Connection,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the server to be ready.")] = 0.0,
) -> None:
    """List a server's models; with --wait, as soon as all are ready.

    With their languages, defaults and versions; --json has all of each.
    The commands below ask a server's admin service, which has an address
    of its own (admin_port): their options stand behind them.
    """
    if context.invoked_subcommand is not None:
        for flag in given(context).values():  # it would have no effect
            raise InputError(f"{flag}: stands behind {context.invoked_subcommand}, if that has it")
        return
    from dragoman.client.reach import why_not_serving
    from dragoman.client.tables import print_models

    if math.isnan(wait):  # would never be over
        raise InputError("--wait: nan is not a number of 0 or more")
    with connection.client(5.0, is_retrying=False) as client:
        end = time.monotonic() + wait
        while wait and (reason := why_not_serving(client, connection.server, "", connection.ca is not None)):
            if time.monotonic() > end:
                raise CallFailed(f"not ready within {wait:g} s; {reason}")
            time.sleep(0.1)
    with connection.connect() as client:
        print_models(client.models(), sys.stdout, as_json)


def _change(
    change: "Callable[[RepositoryClient], list[ModelStatus]]", connection: AdminConnection, timeout: float, as_json: bool
) -> None:
    """Ask for a change, wait for it, and print the models' states after it."""
    from dragoman.client.tables import print_repository

    with connection.administer(timeout) as client:
        changed = change(client)
    print_repository(changed, sys.stdout, as_json)


@models_app.command(name="list")
@in_groups
def list_(
    connection: AdminConnection,
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Only this one.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Print the state of every version, with reasons and problems."""
    from dragoman.client.tables import print_repository

    with connection.administer(timeout) as client:
        found, problem = client.models(model)
    print_repository(found, sys.stdout, as_json)
    if problem:
        typer.echo(f"dragoman: the folder of models cannot be looked at: {problem}", err=True)


@models_app.command()
@in_groups
def refresh(connection: AdminConnection, as_json: JsonOption = False, timeout: TimeoutOption = 600.0) -> None:
    """Reconcile all models with their folders now, and wait until all is done."""
    _change(lambda client: client.refresh()[0], connection, timeout, as_json)


@models_app.command()
@in_groups
def load(
    connection: AdminConnection,
    model: ModelArgument,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="Beside the policy's; without it, the policy's.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Serve a version beside those that the policy asks for.

    Without a version, serve what the policy asks for: that undoes unload and rollback.
    """
    _change(lambda client: [client.load(model, version)], connection, timeout, as_json)


@models_app.command()
@in_groups
def unload(
    connection: AdminConnection,
    model: ModelArgument,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="Only this one; without it, the whole model.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Serve a model, or one version of it, no more."""
    _change(lambda client: [client.unload(model, version)], connection, timeout, as_json)


@models_app.command()
@in_groups
def reload(connection: AdminConnection, model: ModelArgument, as_json: JsonOption = False, timeout: TimeoutOption = 600.0) -> None:
    """Reconcile a model with its folder now, and retry refused versions.

    The exit code is 1 if something of what the policy asks for cannot be served.
    """
    _change(lambda client: [client.reload(model)], connection, timeout, as_json)


@models_app.command()
@in_groups
def rollback(
    connection: AdminConnection,
    model: ModelArgument,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="By default the one that answered before.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Route all requests that name no version to an earlier one.

    It holds until `dragoman models load MODEL`, or until the server ends.
    """
    _change(lambda client: [client.rollback(model, version)], connection, timeout, as_json)


@models_app.command()
@in_groups
def label(
    connection: AdminConnection,
    model: ModelArgument,
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Such as stable or canary.")],
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="Without it the label stands for none.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Set a label to a version, or to none."""
    _change(lambda client: [client.set_label(model, label, version)], connection, timeout, as_json)


@models_app.command()
@in_groups
def put_glossary(
    connection: AdminConnection,
    model: ModelArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="NAME.tsv or NAME.tbx.")],
    as_json: JsonOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Write a glossary into the model's folder, under the name of a file.

    The server checks it before; one of this name is replaced.
    """
    content, format = file.read_bytes(), file.suffix.lower().removeprefix(".")
    _change(lambda client: [client.put_glossary(model, file.stem, content, format)], connection, timeout, as_json)


@models_app.command()
@in_groups
def delete_glossary(
    connection: AdminConnection,
    model: ModelArgument,
    glossary: Annotated[str, typer.Argument(metavar="GLOSSARY", help="Name of the glossary.")],
    as_json: JsonOption = False,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Remove a glossary from the model's folder."""
    _change(lambda client: [client.delete_glossary(model, glossary)], connection, timeout, as_json)


app.add_typer(models_app)
