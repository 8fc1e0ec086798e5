"""Commands that evaluate a model: `dragoman evaluate` and `perplexity`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import (
    ConcurrencyOption,
    JsonOption,
    ModelOptions,
    OptionalConnection,
    in_groups,
    refuse_given,
    report,
    search_option,
)
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dragoman.model.quality import Scores

app = typer.Typer()
CheckpointOption = Annotated[Path | None, typer.Option(help="Use a checkpoint, in PyTorch.")]


@app.command()
@in_groups
def evaluate(
    context: typer.Context,
    model: ModelOptions,
    connection: OptionalConnection,
    source: Annotated[Path, typer.Option(help="Text to translate, one sentence a line.")],
    reference: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    checkpoint: CheckpointOption = None,
    bundle: Annotated[Path | None, typer.Option(help="Use a bundle, in this process.")] = None,
    num_beams: Annotated[int | None, search_option("num_beams", min=1)] = None,
    length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Score without case.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Translate a text and print BLEU and chrF with sacreBLEU's signatures.

    Give one of --checkpoint, --bundle and --server. Neither text may have a blank line.
    """
    from dragoman.model.corpus import read_parallel

    if sum(map(bool, (checkpoint, bundle, connection.server))) != 1:
        raise InputError("give exactly one of --checkpoint, --bundle and --server")
    if not connection.server:
        refuse_given(context, {*asdict(connection), "model", "model_version"}, "goes with --server")
    if checkpoint is not None:
        refuse_given(context, {"source_language", "target_language"}, "goes with --server or --bundle")
    if length_penalty is not None and num_beams in ((1,) if connection.server else (None, 1)):
        raise InputError("--length-penalty goes with --num-beams above 1")
    sources, references = read_parallel(source, reference)
    if connection.server:
        from dragoman.client.lines import naming_refused

        with connection.connect() as client:
            score = _load_score()
            results = client.generate_many(sources, **asdict(model), num_beams=num_beams, length_penalty=length_penalty)
            hypotheses = [result.text for result in naming_refused(results, lambda number: f"{source}, line {number}")]
    elif checkpoint is not None:
        from dragoman.model.checkpoint_folder import CheckpointFolder

        CheckpointFolder.load(checkpoint)  # before PyTorch, which takes seconds to load
        score = _load_score()
        hypotheses = _translate_with_checkpoint(checkpoint, sources, num_beams or 1, length_penalty)
    else:
        from dragoman.export.bundle import Bundle

        assert bundle is not None
        Bundle.open(bundle, is_checked=False)
        score = _load_score()
        languages = {"source_language": model.source_language, "target_language": model.target_language}
        hypotheses = _translate_with_bundle(
            bundle, source, sources, num_beams=num_beams, length_penalty=length_penalty, **languages
        )
    scores = score(hypotheses, references, lowercase)
    text = f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}\nchrF {scores.chrf:.2f}  {scores.chrf_signature}"
    report(as_json, text, **asdict(scores))


def _load_score() -> "Callable[[list[str], list[str], bool], Scores]":
    """Load what scores: after everything that could be wrong in a moment, and before the work, for it may not be installed."""
    from dragoman.model.quality import score

    return score


def _translate_with_checkpoint(checkpoint: Path, sources: list[str], num_beams: int, length_penalty: float | None) -> list[str]:
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.evaluate import translate as translate_with_checkpoint

    loaded = Checkpoint.load(checkpoint)
    penalty = 1.0 if length_penalty is None else length_penalty
    return translate_with_checkpoint(loaded.model, loaded.tokenizers, sources, num_beams, penalty)


def _translate_with_bundle(bundle: Path, source: Path, sources: list[str], **options: Any) -> list[str]:
    from dragoman.bulk.translator import Translator
    from dragoman.client.search import in_flags
    from dragoman.server.telemetry.logs import configure_logging

    configure_logging("warning", "console")  # standard output is for the scores
    try:
        done = Translator(bundle, **options)({"text": sources})
    except InputError as error:
        raise InputError(in_flags(str(error))) from error
    for number, reason in enumerate(done["error"], 1):
        if reason is not None:
            raise InputError(f"{source}, line {number}: {reason}")
    return done["translation"]


@app.command()
@in_groups
def perplexity(
    context: typer.Context,
    model: ModelOptions,
    connection: OptionalConnection,
    target: Annotated[Path, typer.Option(metavar="FILE", help="The text, one sentence a line.")],
    source: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its source or beginning, line by line; a language model needs none."),
    ] = None,
    checkpoint: CheckpointOption = None,
    as_json: JsonOption = False,
    concurrency: ConcurrencyOption = 32,
) -> None:
    """Compute perplexity and loss a token of a text.

    Give one of --checkpoint and --server. No line of the text may be blank.
    """
    from dragoman.client.score_files import ScoreOptions, token_log_probs
    from dragoman.model.corpus import read_parallel, read_texts
    from dragoman.model.likelihood import Likelihood

    if bool(checkpoint) == bool(connection.server):
        raise InputError("give exactly one of --checkpoint and --server")
    if not connection.server:
        refuse_given(context, {*asdict(model), *asdict(connection)}, "goes with --server")
    if source is None:
        targets = read_texts(target)
        sources = [""] * len(targets)
    else:
        sources, targets = read_parallel(source, target)
    if checkpoint is None:
        with connection.connect() as client:
            names = str(target) if source is None else f"{source} and {target}"
            options = ScoreOptions(**asdict(model), concurrency=concurrency)
            found = Likelihood.of(token_log_probs(client, sources, targets, names, options))
    else:
        found = Likelihood.of(_by_checkpoint(checkpoint, sources, targets))
    report(as_json, found, **found.to_dict())


def _by_checkpoint(directory: Path, sources: list[str], targets: list[str]) -> list[list[float]]:
    """Compute with PyTorch, which takes seconds to load: the checkpoint is checked before.

    Raises:
        InputError: If it cannot be read, or a line is too long for it.
    """
    from dragoman.model.checkpoint_folder import CheckpointFolder

    CheckpointFolder.load(directory)
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.evaluate import target_log_probs

    loaded = Checkpoint.load(directory)
    return target_log_probs(loaded.model, loaded.tokenizers, sources, targets)
