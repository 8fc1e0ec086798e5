"""The front door: one command line for training, evaluation, export, serving and calling.

Each command imports its package when it is called, so that `dragoman serve` never loads PyTorch.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

from dragoman.cli import (
    attending,
    calling,
    checkpoints,
    evaluating,
    exporting,
    gpu,
    importing,
    loading,
    models,
    perplexity,
    pulling,
    serving,
    signing,
    texts,
    training,
    translating,
)
from dragoman.cli.connection import CallFailed, Interrupted
from dragoman.load.plain_help import PlainCommand
from dragoman.model.errors import InputError

app = typer.Typer(
    name="dragoman",
    help="Train, export, serve and call encoder-decoder Transformers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# As `dragoman --help` shows them.
for panel, groups in {
    "Call a server": (translating, models, calling, attending),
    "Serve": (serving, pulling, gpu),
    "Train and export": (training, evaluating, perplexity, importing, exporting, signing, checkpoints, texts),
    "Measure": (loading,),
}.items():
    for group in groups:
        for command in group.app.registered_commands:
            command.rich_help_panel, command.cls = panel, PlainCommand
        for several in group.app.registered_groups:
            several.rich_help_panel = panel
            for command in several.typer_instance.registered_commands if several.typer_instance else ():
                command.cls = PlainCommand
        app.add_typer(group.app)


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

    What the user got wrong is a line on standard error and exit code 2, a call that failed one and exit code 1, Ctrl-C is 130.
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
    """Return a message and what is to be told beside it, as one line."""
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
    """Keep Python from writing at its end what standard output did not take."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_call_error(error: Exception) -> bool:
    """Tell a failed call from a bug, without loading the client for commands that call nobody."""
    errors = sys.modules.get("dragoman.client.errors")
    return errors is not None and isinstance(error, errors.CallError)


def _fail(message: str, code: int) -> NoReturn:
    print(f"dragoman: {message}", file=sys.stderr)
    sys.exit(code)
