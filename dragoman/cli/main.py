"""The front door: one command line for training, evaluation, export, serving and calling.

Each command imports its package when it is called, so that `dragoman serve` never loads PyTorch.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

from dragoman.cli import calling, checkpoints, evaluating, exporting, loading, serving, texts, training
from dragoman.model.errors import InputError

app = typer.Typer(
    name="dragoman",
    help="Train, export, serve and call encoder-decoder Transformers.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (training, evaluating, checkpoints, texts, exporting, serving, calling, loading):
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

    What the user got wrong is a line on standard error and exit code 2, a call that failed one and exit code 1.
    """
    # ONNX Runtime would otherwise report on the models to its maker, and keep a database for that in the home folder.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines would stand among the log's, and ours say the same
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except InputError as error:
        _fail(str(error), 2)
    except typer.TyperException as error:  # the arguments are not the command's
        _fail(error.format_message(), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        extra = _extra((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this command needs {error.name}: pip install 'dragoman[{extra}]'", 2)
    except OSError as error:  # a file or standard output that cannot be used
        if error.errno is None:
            raise
        _discard_output()
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror), 2)
    except FloatingPointError as error:  # training that diverged
        _fail(str(error), 1)
    except Exception as error:
        if not _is_call_error(error):
            raise
        _fail(f"{error} ({getattr(error, 'code', '')})", 1)


def _extra(module: str) -> str | None:
    """Name the optional dependencies that a module comes with; None for a module that is not optional."""
    if sys.argv[1:2] == ["export"] and module in ("torch", "safetensors"):
        return "export"
    for extra, modules in {
        "train": ("torch", "safetensors", "matplotlib"),
        "evaluate": ("sacrebleu",),
        "export": ("onnx", "onnx_ir", "onnxscript"),
        "cpu": ("onnxruntime",),
    }.items():
        if module in modules:
            return extra
    return None


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
