"""`dragoman train`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.connection import CallFailed
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.model.training.preparation import Preparation

app = typer.Typer()


class Device(StrEnum):
    """Where PyTorch computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="Training configuration, TOML.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the text files; by default the configuration's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Checkpoint to write or to resume; by default runs/NAME.")] = None,
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    initial_checkpoint: Annotated[Path | None, typer.Option(help="Go on from this one; by default the configuration's.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to PyTorch.")] = 0,
    example: Annotated[bool, typer.Option("--example", help="Print a configuration with every setting, and end.")] = False,
) -> None:
    """Train a model on parallel text; run it again to resume."""
    if example:
        from dragoman.model.training.example import EXAMPLE

        if config is not None:
            raise InputError("--example prints a configuration and takes none: leave out CONFIG")
        typer.echo(EXAMPLE, nl=False)
        return
    if config is None:
        raise InputError("no CONFIG given; `dragoman train --example > NAME.toml` writes one to begin with")
    prepared = _prepare(config, data, output, initial_checkpoint)

    import torch  # seconds, so everything that can be wrong without it has been said

    from dragoman.model.training.progress import progress_on
    from dragoman.model.training.trainer import Trainer

    if threads:
        torch.set_num_threads(threads)
    chosen = "cuda" if device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available()) else "cpu"
    if chosen == "cuda" and not torch.cuda.is_available():
        raise CallFailed("--device cuda: PyTorch sees no CUDA device")
    Trainer(prepared, torch.device(chosen)).run(progress_on(sys.stderr))
    typer.echo(f"wrote {prepared.output}")


def _prepare(config: Path, data: Path | None, output: Path | None, initial_checkpoint: Path | None) -> "Preparation":
    """Check everything that needs no torch, and say what will be done and what looks wrong."""
    from dragoman.model.training.file import TrainingFile
    from dragoman.model.training.preparation import prepare
    from dragoman.model.training.progress import say

    file = TrainingFile.load(config)
    if initial_checkpoint is not None:
        file = file.going_on_from(initial_checkpoint)
    prepared = prepare(file, data or config.parent, output or Path("runs") / file.fields["name"])
    for line in prepared.summary():
        say(line)
    for warning in prepared.warnings:
        say(f"warning: {warning}")
    return prepared
