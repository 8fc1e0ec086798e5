"""`dragoman load` and `load-compare`, whose options are declared in their own package."""

from typing import Any

import typer

app = typer.Typer()

_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# Read when the command is called: `--help` goes there too.
_ELSEWHERE: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True},
}


@app.command(**_ELSEWHERE)
def load(context: typer.Context) -> None:
    """Put load on running servers and measure what their callers see."""
    from dragoman.load.command import app as load_app

    raise typer.Exit(load_app(context.args, prog_name="dragoman load", standalone_mode=False, **_HELP))


@app.command(name="load-compare", **_ELSEWHERE)
def load_compare(context: typer.Context) -> None:
    """Compare two results of `load` and say which differences are beyond noise."""
    from dragoman.load.command import compare_app

    raise typer.Exit(compare_app(context.args, prog_name="dragoman load-compare", standalone_mode=False, **_HELP))
