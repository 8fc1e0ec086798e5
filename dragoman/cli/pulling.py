"""`dragoman pull`."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.connection import CallFailed
from dragoman.cli.termination import tidy_when_terminated
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.server.stores.cache import Progress

app = typer.Typer()


@app.command(
    epilog="Credentials are found where each store's own tools look for them: docs/models.md. What was interrupted is gone on with."
)
@tidy_when_terminated()
def pull(
    address: Annotated[
        str,
        typer.Argument(
            help="Bundle, folder of models or archive: s3://BUCKET/PATH, gs://…, az://…, https://HOST/PATH, oci://HOST/NAME:TAG "
            "or a folder."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder of models to bring it to, as NAME/VERSION.")],
    sha256: Annotated[
        str, typer.Option(metavar="HEX", help="SHA-256 of an archive, or of the manifest of the one bundle there must be.")
    ] = "",
    require_signatures: Annotated[
        Path | None,
        typer.Option(metavar="KEYS", help="PEM file, or folder of PEM files, of public keys; one must have signed each bundle."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where files are kept by their SHA-256; by default .cache in the folder.")
    ] = None,
    cache_gib: Annotated[float, typer.Option(min=0.001, help="How much may be kept there.")] = 20.0,
    silence: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long a store may be silent.")] = 30.0,
) -> None:
    """Bring bundles here from where they are kept, each file checked before anything opens it.

    Prints a line for each bundle: its model, its version, the SHA-256 of its manifest and where it is.
    """
    from dragoman.export.signing import Keys
    from dragoman.server.stores.address import Address
    from dragoman.server.stores.cache import Cache
    from dragoman.server.stores.pull import CACHE_FOLDER, Order
    from dragoman.server.stores.pull import pull as pull_bundles
    from dragoman.server.stores.store import StoreError

    if sha256 and re.fullmatch(r"[0-9a-fA-F]{64}", sha256) is None:
        raise InputError(f"--sha256: {sha256!r} is not 64 hexadecimal digits")
    place = Address.parse(address)
    keys = None if require_signatures is None else Keys.load(require_signatures)
    kept = Cache(cache or folder / CACHE_FOLDER, cache_gib)
    try:
        with _progress() as on_progress:
            pulled = pull_bundles(
                place,
                folder,
                Order(
                    cache=kept,
                    keys=keys,
                    sha256=sha256.lower(),
                    silence_seconds=silence,
                    on_progress=on_progress,
                    on_address=lambda exact: typer.echo(f"{address} is {exact}", err=True),
                ),
            )
    except StoreError as error:
        raise CallFailed(str(error)) from error
    for bundle in pulled:
        typer.echo(str(bundle))


@contextmanager
def _progress() -> "Iterator[Progress]":
    """Lend what shows downloads: bars on a terminal, otherwise a line for each file that has come."""
    if not sys.stderr.isatty():
        yield _say_when_done
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def show(path: str, size: int, total: int) -> None:
            if path not in tasks:
                tasks[path] = shown.add_task(path, total=total)
            shown.update(tasks[path], completed=size)
            if size == total:
                shown.update(tasks[path], visible=False)

        yield show


def _say_when_done(path: str, size: int, total: int) -> None:
    if size == total:
        typer.echo(f"{path}: {total} bytes", err=True)
