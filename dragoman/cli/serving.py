"""`dragoman serve`."""

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.connection import CallFailed
from dragoman.model.errors import InputError

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
