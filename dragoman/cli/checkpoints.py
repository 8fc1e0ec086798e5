"""`dragoman average` and `add-tokens`: checkpoints made of checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from dragoman.model.errors import InputError

app = typer.Typer()


@app.command()
def average(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Stages or runs of one model.")],
    output: Annotated[Path, typer.Option(help="Checkpoint to write.")],
    half: Annotated[bool, typer.Option("--half", help="Round weights to half precision: half the size.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a checkpoint with the mean of the weights of several."""
    from dragoman.model.checkpoint_folder import CheckpointFolder

    _refuse_to_replace(output, force)
    folders = [CheckpointFolder.load(path) for path in checkpoints]
    for folder in folders[1:]:
        folders[0].refuse_other_model(folder)

    from dragoman.model.average import average_checkpoints  # with torch, which takes seconds to load

    average_checkpoints(checkpoints).save(output, half)
    typer.echo(f"wrote {output}: the mean of {len(checkpoints)} checkpoints")


def _refuse_to_replace(checkpoint: Path, force: bool) -> None:
    from dragoman.model.checkpoint_folder import WEIGHTS_FILE
    from dragoman.model.files import refuse_unwritable

    refuse_unwritable(checkpoint, is_folder=True)
    if (checkpoint / WEIGHTS_FILE).exists() and not force:
        raise InputError(f"{checkpoint}: there is a checkpoint already; --force replaces it")


@app.command()
def add_tokens(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint to start with.")],
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT", help="The texts that its tokens were learnt from.")],
    output: Annotated[Path, typer.Option(help="Checkpoint to write.")],
    vocab_size: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens that it is to have.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a checkpoint whose vocabulary has more tokens, to be trained further."""
    from dragoman.model.checkpoint_folder import CheckpointFolder
    from dragoman.model.corpus import read_lines

    _refuse_to_replace(output, force)
    vocabulary = CheckpointFolder.load(checkpoint).tokenizers.byte_level()
    tokenizer = vocabulary.extended([line for path in texts for line in read_lines(path)], vocab_size)

    from dragoman.model.checkpoint import Checkpoint  # with torch, which takes seconds to load
    from dragoman.model.growth import with_more_tokens

    with_more_tokens(Checkpoint.load(checkpoint), tokenizer).save(output)
    typer.echo(f"wrote {output}: {tokenizer.vocab_size - vocabulary.vocab_size} more tokens")
