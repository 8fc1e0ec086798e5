"""Commands that serve: `dragoman serve`, `pull` and `gpu-check`."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import CallFailed, JsonOption, report, tidy_when_terminated
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.server.runtime.device.check import Finding
    from dragoman.server.runtime.device.device import Device
    from dragoman.server.stores.cache import Progress

app = typer.Typer()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every other setting of docs/settings.md is a flag too, for example --max-slots 128.",
)
def serve(
    context: typer.Context,
    models: Annotated[
        str | None, typer.Option(help="Folder of models, or an address: s3://, gs://, az://, https://, oci://.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of all ports, 127.0.0.1 by default; 0.0.0.0 for all interfaces.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port of the same in JSON; 0 takes a free one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port of metrics and probes; 0 takes a free one.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings, TOML; flags and environment go before it.")] = None,
) -> None:
    """Serve models over gRPC and HTTP until SIGTERM or Ctrl-C, then drain."""
    from dragoman.server.main import serve as run_server
    from dragoman.server.stores.store import StoreError

    flags = {"models": models, "host": host, "port": port, "http_port": http_port, "metrics_port": metrics_port}
    flags |= _parse_flags(context.args)
    try:
        run_server(flags, config)
    except StoreError as error:
        raise CallFailed(str(error)) from error


def _parse_flags(arguments: list[str]) -> dict[str, str]:
    """Read `--some-name value` and `--some-name=value` into setting names and texts."""
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise InputError(f"{argument}: not a flag")
        name, separator, value = argument[2:].partition("=")
        if not separator:
            following = next(rest, None)
            if following is None:
                raise InputError(f"{argument}: lacks a value")
            value = following
        flags[name.replace("-", "_")] = value
    return flags


@app.command(
    epilog="Credentials are found where each store's own tools look for them: docs/models.md. An interrupted pull is resumed."
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
        Path | None, typer.Option(metavar="FOLDER", help="Folder of files by their SHA-256; by default .cache in the folder.")
    ] = None,
    cache_gib: Annotated[float, typer.Option(min=0.001, help="How much may be kept there.")] = 20.0,
    silence: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long a store may be silent.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Copy bundles from a store, each file checked before anything opens it.

    Prints a line for each bundle: its model, its version, the SHA-256 of its manifest and its folder.
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
        found = {"name": bundle.manifest.name, "version": bundle.manifest.version, "sha256": bundle.digest}
        report(as_json, bundle, **found, folder=bundle.placed.directory, is_new=bundle.is_new)


@contextmanager
def _progress() -> "Iterator[Progress]":
    """Return the function that shows downloads: bars on a terminal, otherwise a line for each finished file."""
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


@app.command(epilog="Other settings are read as `dragoman serve` reads them: flags, DRAGOMAN_…, --config.")
def gpu_check(
    bundle: Annotated[Path, typer.Argument(help="Bundle in fp16 or bf16.")],
    device: Annotated[
        str | None, typer.Option(help="cuda or cuda:N; cpu rehearses it without a GPU, for an fp16 bundle.", show_default="cuda")
    ] = None,
    max_slots: Annotated[int | None, typer.Option(help="As the server's.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="As the server's.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings of the server, TOML; flags and environment go before it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Try everything that serving a bundle on a GPU takes; the exit code is 0 if all of it works.

    Each line says what was tried, whether it works, and what to do if not.
    """
    from dragoman.server.config import load
    from dragoman.server.runtime.device.check import KERNEL_VARIABLE, GpuCheck, Wanted, cuda_findings

    os.environ[KERNEL_VARIABLE] = "1"  # read when a session is made
    flags = {"models": bundle.parent, "device": device, "max_slots": max_slots, "gpu_memory_gib": gpu_memory_gib}
    settings = load(flags, config)
    ordinal = _ordinal(settings.device)
    wanted = Wanted(settings.max_slots, max_bytes=settings.gpu_memory_bytes)

    def open_device() -> "Device":
        if ordinal is None:
            from dragoman.server.runtime.device.device import HostDevice

            return HostDevice()
        from dragoman.server.runtime.device.cuda import CudaDevice

        return CudaDevice(ordinal)

    def findings() -> "Iterator[Finding]":
        has_device = True
        if ordinal is not None:
            for finding in cuda_findings(ordinal):
                has_device &= finding.is_good
                yield finding
        if has_device:
            yield from GpuCheck(bundle, open_device, wanted).run()

    is_good = True
    for finding in findings():
        report(as_json, finding, **asdict(finding))
        is_good &= finding.is_good
    raise typer.Exit(int(not is_good))


def _ordinal(device: str) -> int | None:
    """Return a CUDA device's number, the first one's where any would do; None for the CPU."""
    if device == "cpu":
        return None
    return int(device.partition(":")[2] or 0)
