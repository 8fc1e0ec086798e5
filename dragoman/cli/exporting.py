"""`dragoman export`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.termination import tidy_when_terminated
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.export.arguments import QualityTexts, Shortlist

app = typer.Typer()


@app.command()
@tidy_when_terminated()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Trained checkpoint.")],
    output: Annotated[Path, typer.Argument(help="Bundle to write.")],
    precision: Annotated[str, typer.Option(help="Number format of the weights.")] = "fp32",
    name: Annotated[str | None, typer.Option(help="Name of the served model; by default the checkpoint's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="For int8: source text to calibrate with, one sentence a line; there is a default.")
    ] = None,
    quality_source: Annotated[
        Path | None,
        typer.Option(help="For all but fp32: text that must lose no more than 0.3 BLEU and 0.2 chrF, one sentence a line."),
    ] = None,
    quality_reference: Annotated[Path | None, typer.Option(help="Its translation, line by line.")] = None,
    shortlist: Annotated[
        list[Path] | None,
        typer.Option(help="Text in the target language: choose from its tokens alone. May be given several times."),
    ] = None,
    shortlist_size: Annotated[int | None, typer.Option(help="Keep so many of these tokens, the most frequent.")] = None,
    weight_bits: Annotated[
        int, typer.Option(help="For int8: 7 makes products fast on x86 without VNNI, and weights a little coarser.")
    ] = 8,
    cache_precision: Annotated[
        str | None, typer.Option(help="For int8: int8 keeps keys and values in a quarter of the memory; by default fp32.")
    ] = None,
    source_language: Annotated[
        str, typer.Option(help="Language that the model reads; of several, the one where a request does not say.")
    ] = "",
    target_language: Annotated[str, typer.Option(help="Language that it writes; likewise.")] = "",
) -> None:
    """Export a checkpoint to an ONNX bundle, and check that it computes the same."""
    from dragoman.export.arguments import (
        check_bits,
        check_dimensions,
        check_heads,
        check_name,
        check_output,
        check_precision,
        with_asked_languages,
    )
    from dragoman.model.checkpoint_folder import CheckpointFolder

    if (quality_source is None) != (quality_reference is None):
        raise InputError("--quality-source and --quality-reference go together")
    if shortlist_size is not None and not shortlist:
        raise InputError("--shortlist-size goes with --shortlist")
    check_bits(check_precision(precision, calibration is not None, quality_source is not None), weight_bits, cache_precision)
    if name is not None:
        check_name(name)
    check_output(output, force)
    folder = CheckpointFolder.load(checkpoint)
    check_heads(folder.config)
    languages = with_asked_languages(folder.languages, source_language, target_language)
    check_dimensions(folder.config, folder.template, languages, folder.defaults)
    lines, texts, listed = read_texts(calibration, quality_source, quality_reference, shortlist, shortlist_size)

    # Threads of PyTorch that wait in a loop take the cores from ONNX Runtime's, which compute the other half of the comparison.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from dragoman.export.exporter import export_checkpoint  # it loads torch, which takes seconds

    bundle = export_checkpoint(
        checkpoint,
        output,
        precision,
        name,
        force,
        lines,
        texts,
        lambda line: typer.echo(line, err=True),
        listed,
        languages,
        weight_bits,
        cache_precision,
    )
    manifest = bundle.manifest
    parity, changed = manifest.parity, manifest.parity.quality
    typer.echo(f"wrote {output}: {manifest.name} version {manifest.version}, {manifest.precision}")
    if changed is not None:
        scores = "" if changed.bleu_change is None else f", BLEU {changed.bleu_change:+.2f}, chrF {changed.chrf_change:+.2f}"
        typer.echo(
            f"in 8 bits: {changed.agreement:.1%} of the likeliest tokens are those of PyTorch in single precision, a token's "
            f"log-probability moves by {changed.mean_log_prob_difference:.3f} on the average{scores}"
        )
    typer.echo(
        f"{'' if changed is None else 'before that: '}log-probabilities within {parity.max_log_prob_difference:.1e} of PyTorch, "
        f"{parity.num_token_mismatches} of {parity.num_sentences} greedy answers differ"
    )
    if listed is not None:
        typer.echo(f"chooses from {manifest.num_choices} of {manifest.target_vocab_size} tokens")
    typer.echo(f"verified on: {parity.device} ({parity.processor})")


def read_texts(
    calibration: Path | None,
    quality_source: Path | None,
    quality_reference: Path | None,
    shortlist: Sequence[Path] | None,
    shortlist_size: int | None,
) -> "tuple[Sequence[str] | None, QualityTexts | None, Shortlist | None]":
    """Read the texts that an export is given: to calibrate with, to judge quality by, to choose tokens from.

    Raises:
        InputError: Naming the file that is none, or a size that keeps no token.
    """
    from dragoman.export.arguments import QualityTexts, Shortlist
    from dragoman.model.corpus import read_lines, read_parallel

    texts = None
    if quality_source is not None and quality_reference is not None:
        texts = QualityTexts(*read_parallel(quality_source, quality_reference))
    listed = None if not shortlist else Shortlist([line for path in shortlist for line in read_lines(path)], shortlist_size)
    return None if calibration is None else read_lines(calibration), texts, listed
