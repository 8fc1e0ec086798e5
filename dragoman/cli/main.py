"""The command line, for training, evaluation, export, serving and calling.

Each command imports its package when it is called, so that `dragoman serve` never loads PyTorch.
"""

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from dragoman.cli import bulk, calling, evaluating, exporting, models, serving, training
from dragoman.cli.options import CallFailed, Interrupted
from dragoman.load.plain_help import PlainCommand
from dragoman.model.errors import InputError

app = typer.Typer(
    name="dragoman",
    help="Train, export, serve and call encoder-decoder Transformers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
measuring = typer.Typer()
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# Read when the command is called: `--help` goes there too.
_ELSEWHERE: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True},
}


@measuring.command(**_ELSEWHERE)
def load(context: typer.Context) -> None:
    """Put load on running servers and measure what their callers see."""
    from dragoman.load.command import app as load_app

    raise typer.Exit(load_app(context.args, prog_name="dragoman load", standalone_mode=False, **_HELP))


@measuring.command(name="load-compare", **_ELSEWHERE)
def load_compare(context: typer.Context) -> None:
    """Compare two results of `load` and say which differences are beyond noise."""
    from dragoman.load.command import compare_app

    raise typer.Exit(compare_app(context.args, prog_name="dragoman load-compare", standalone_mode=False, **_HELP))


# Panels of `dragoman --help`.
for panel, groups in {
    "Call a server": (calling.app, models.app),
    "Serve": (serving.app,),
    "Translate files": (bulk.app,),
    "Train and export": (training.app, evaluating.app, exporting.app),
    "Measure": (measuring,),
}.items():
    for group in groups:
        for command in group.registered_commands:
            command.rich_help_panel, command.cls = panel, PlainCommand
        for several in group.registered_groups:
            several.rich_help_panel = panel
            for command in several.typer_instance.registered_commands if several.typer_instance else ():
                command.cls = PlainCommand
        app.add_typer(group)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(version("dragoman"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Train, export, serve and call encoder-decoder Transformers."""


def main() -> None:
    """Run the command line.

    Invalid input is a line on standard error and exit code 2, a failed call a line and exit code 1, Ctrl-C is 130.
    """
    # ONNX Runtime would otherwise report on the models to its maker, and keep a database for that in the home folder.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines would stand among the log's, and ours say the same
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="dragoman", standalone_mode=False))
    except InputError as error:
        _fail(_with_notes(str(error), error), 2)
    except typer.TyperException as error:  # the arguments are not the command's
        _fail(error.format_message(), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Interrupted as interrupt:
        _fail(_with_notes(str(interrupt), interrupt), 130)
    except ModuleNotFoundError as error:
        _fail(_how_to_install(error), 2)
    except OSError as error:  # a file or standard output that cannot be used
        if error.errno is None:
            raise
        _discard_output()
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror), 2)
    except (CallFailed, FloatingPointError) as error:  # the latter is training that diverged
        _fail(_with_notes(str(error), error), 1)
    except Exception as error:
        if not _is_call_error(error):
            raise
        _fail(f"{error} ({getattr(error, 'code', '')})", 1)


def _with_notes(message: str, error: BaseException) -> str:
    """Return a message and the notes of an error, as one line."""
    return "; ".join([message, *getattr(error, "__notes__", ())])


def _how_to_install(error: ModuleNotFoundError) -> str:
    """Return which package is missing and how to add it; raises the error where it is not one that may be."""
    from dragoman.extras import extras_for, install_command

    module = (error.name or "").partition(".")[0]
    extras = extras_for(sys.argv[1:], module)
    if extras is None:
        raise error
    return f"this command needs {module}, which is not installed: {install_command(*extras)}"


def _discard_output() -> None:
    """Discard unwritten output, which Python would write at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_call_error(error: Exception) -> bool:
    """Return whether an error is a failed call and no bug, without loading the client for commands without calls."""
    errors = sys.modules.get("dragoman.client.errors")
    return errors is not None and isinstance(error, errors.CallError)


def _fail(message: str, code: int) -> NoReturn:
    print(f"dragoman: {message}", file=sys.stderr)
    sys.exit(code)
