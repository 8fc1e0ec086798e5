"""`dragoman train`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dragoman.model.errors import InputError

app = typer.Typer()


class Device(StrEnum):
    """Where PyTorch computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Training configuration, TOML.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the text files; by default the configuration's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Checkpoint to write or to resume; by default runs/NAME.")] = None,
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    initial_checkpoint: Annotated[Path | None, typer.Option(help="Go on from this one; by default the configuration's.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to PyTorch.")] = 0,
) -> None:
    """Train a model on parallel text; run it again to resume."""
    from dataclasses import replace

    import torch

    from dragoman.model.train import Trainer
    from dragoman.model.training_config import TrainingConfig

    parsed = TrainingConfig.load(config)
    if initial_checkpoint is not None:
        parsed = replace(parsed, initial_checkpoint=str(initial_checkpoint))
    if threads:
        torch.set_num_threads(threads)
    chosen = "cuda" if device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available()) else "cpu"
    if chosen == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no CUDA device")
    folder = output or Path("runs") / parsed.name
    Trainer(parsed, data or config.parent, folder, torch.device(chosen)).run()
    typer.echo(f"wrote {folder}")
