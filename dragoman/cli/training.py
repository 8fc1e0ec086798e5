"""`dragoman train` and `evaluate`."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.connection import connect
from dragoman.cli.options import AuthorityOption, BeamsOption, JsonOption, LengthPenaltyOption, TokenOption
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.model.preparation import Preparation

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
        from dragoman.model.training_example import EXAMPLE

        if config is not None:
            raise InputError("--example prints a configuration and takes none: leave out CONFIG")
        typer.echo(EXAMPLE, nl=False)
        return
    if config is None:
        raise InputError("no CONFIG given; `dragoman train --example > NAME.toml` writes one to begin with")
    prepared = _prepare(config, data, output, initial_checkpoint)

    import torch  # seconds, so everything that can be wrong without it has been said

    from dragoman.model.train import Trainer
    from dragoman.model.training_progress import progress_on

    if threads:
        torch.set_num_threads(threads)
    chosen = "cuda" if device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available()) else "cpu"
    if chosen == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no CUDA device")
    Trainer(prepared, torch.device(chosen)).run(progress_on(sys.stderr))
    typer.echo(f"wrote {prepared.output}")


def _prepare(config: Path, data: Path | None, output: Path | None, initial_checkpoint: Path | None) -> "Preparation":
    """Check everything that needs no torch, and say what will be done and what looks wrong."""
    from dragoman.model.preparation import prepare
    from dragoman.model.training_file import TrainingFile
    from dragoman.model.training_progress import say

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
def evaluate(
    source: Annotated[Path, typer.Option(help="Text to translate, one sentence a line.")],
    reference: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Translate with a checkpoint, in PyTorch.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Translate with a bundle, in this process.")] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Translate with a running server.")] = None,
    model: Annotated[str, typer.Option(help="Which of the server's models.")] = "",
    num_beams: BeamsOption = 1,
    length_penalty: LengthPenaltyOption = None,
    lowercase: Annotated[bool, typer.Option(help="Score without case.")] = False,
    as_json: JsonOption = False,
    token: TokenOption = None,
    ca: AuthorityOption = None,
) -> None:
    """Translate a text and print BLEU and chrF with sacreBLEU's signatures."""
    from dragoman.model.corpus import read_parallel
    from dragoman.model.quality import score

    if sum(side is not None for side in (checkpoint, bundle, server)) != 1:
        raise InputError("give exactly one of --checkpoint, --bundle and --server")
    if server is None and (model or ca is not None):
        raise InputError("--model and --ca go with --server")
    if length_penalty is not None and num_beams == 1:
        raise InputError("--length-penalty goes with --num-beams above 1")
    sources, references = read_parallel(source, reference)
    if checkpoint is not None:
        hypotheses = _translate_with_checkpoint(checkpoint, sources, num_beams, length_penalty)
    elif bundle is not None:
        hypotheses = _translate_with_bundle(bundle, sources, num_beams, length_penalty)
    else:
        from dragoman.client.search import Search

        assert server is not None
        search = Search(num_beams=num_beams, length_penalty=length_penalty)
        with connect(server, 60.0, token, ca) as client:
            hypotheses = [result.text for result in client.generate_many(sources, model=model, search=search)]
    scores = score(hypotheses, references, lowercase)
    if as_json:
        typer.echo(json.dumps(scores.to_dict()))
    else:
        typer.echo(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}\nchrF {scores.chrf:.2f}  {scores.chrf_signature}")


def _translate_with_checkpoint(checkpoint: Path, sources: list[str], num_beams: int, length_penalty: float | None) -> list[str]:
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.evaluate import translate as translate_with_checkpoint

    loaded = Checkpoint.load(checkpoint)
    penalty = 1.0 if length_penalty is None else length_penalty
    return translate_with_checkpoint(loaded.model, loaded.tokenizer, sources, num_beams, penalty)


def _translate_with_bundle(bundle: Path, sources: list[str], num_beams: int, length_penalty: float | None) -> list[str]:
    from dragoman.server.engine.messages import SearchOptions
    from dragoman.server.offline import OfflineTranslator
    from dragoman.server.telemetry.logs import configure_logging

    configure_logging("warning", "console")  # standard output is for the scores
    search = SearchOptions(num_beams=num_beams, length_penalty=1.0 if length_penalty is None else length_penalty)
    return OfflineTranslator(bundle).translate(sources, search=search)
