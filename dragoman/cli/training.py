"""Commands that train: `dragoman train`, `average`, `add-tokens`, and texts to train on: `nearest`, `augment`."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import CallFailed, ForceOption, HalfOption
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
    """Check everything that needs no torch, and print the plan and warnings."""
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


@app.command()
def average(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Stages or runs of one model.")],
    output: Annotated[Path, typer.Option(help="Checkpoint to write.")],
    half: HalfOption = False,
    force: ForceOption = False,
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
    force: ForceOption = False,
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


@app.command()
def nearest(
    candidates: Annotated[list[Path], typer.Argument(metavar="CANDIDATES", help="Equally many lines for each reference.")],
    reference: Annotated[Path, typer.Option(help="One sentence a line.")],
    output: Annotated[Path, typer.Option(help="Text to write, gzipped where its name ends in .gz.")],
) -> None:
    """Write the candidate of each reference that is nearest to it, by sentence BLEU: text to train a model on."""
    from dragoman.model.corpus import read_lines, write_lines
    from dragoman.model.files import refuse_unwritable
    from dragoman.model.nearest import choose_nearest

    refuse_unwritable(output)
    chosen = choose_nearest(read_lines(reference), {str(path): read_lines(path) for path in candidates})
    write_lines(output, chosen)
    typer.echo(f"wrote {output}: {len(chosen)} lines")


@app.command()
def augment(
    source: Annotated[Path, typer.Option(help="Text to make more of, one sentence a line.")],
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    source_language: Annotated[str, typer.Option(help="Language of the source, such as en.")],
    target_language: Annotated[str, typer.Option(help="Language of the target, such as de.")],
    output_source: Annotated[Path, typer.Option(help="Text to write, gzipped where its name ends in .gz.")],
    output_target: Annotated[Path, typer.Option(help="Its translation.")],
    copies: Annotated[int, typer.Option(min=0, help="How often each sentence with a noun phrase is changed.")] = 6,
    phrases: Annotated[int, typer.Option(min=0, help="Short phrases around each very rare word.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the phrases; the aligner has its own.")] = 1,
    aligner: Annotated[str, typer.Option(help="The program eflomal-align: name or path.")] = "eflomal-align",
) -> None:
    """Write more parallel text for rare words: sentences with other sentences' phrases, and phrases by themselves."""
    from dragoman.model.augment import Augmenter, determiners_of
    from dragoman.model.corpus import read_parallel, write_lines
    from dragoman.model.files import refuse_unwritable
    from dragoman.model.phrases import align

    if len({path.resolve() for path in (source, target, output_source, output_target)}) < 4:
        raise InputError("source, target, --output-source and --output-target must be four files")
    for path in (output_source, output_target):
        refuse_unwritable(path)
    determiners = determiners_of(source_language), determiners_of(target_language)
    augmenter = Augmenter(align(*read_parallel(source, target), aligner), determiners, seed)
    sentences, short = augmenter.substituted(copies), augmenter.short(phrases)
    if not sentences and not short:
        raise InputError(f"nothing can be made of {source} and {target}: too little text, or no linked phrases in it")
    write_lines(output_source, [text for text, _ in (*sentences, *short)])
    write_lines(output_target, [text for _, text in (*sentences, *short)])
    typer.echo(f"wrote {output_source} and {output_target}: {len(sentences)} sentences, {len(short)} phrases")
