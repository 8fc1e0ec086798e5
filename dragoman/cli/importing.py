"""`dragoman import`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.termination import tidy_when_terminated
from dragoman.model.errors import InputError

app = typer.Typer()

_EXPORT = "Export, too"
_MOST_TOKENS = 2**20


@app.command(name="import")
@tidy_when_terminated()
def import_(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder that `save_pretrained` wrote, or the name of a repository of the Hugging Face hub.")
    ],
    output: Annotated[Path, typer.Argument(help="Checkpoint to write.")],
    name: Annotated[str | None, typer.Option(help="Name of the model; by default the folder's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint, and a bundle, that is there.")] = False,
    revision: Annotated[str | None, typer.Option(help="Of a repository: a branch, a tag or a commit.")] = None,
    source_language: Annotated[str, typer.Option(metavar="CODE", help="Language read where a request does not say.")] = "",
    target_language: Annotated[str, typer.Option(metavar="CODE", help="Language written where a request does not say.")] = "",
    task: Annotated[str, typer.Option(help="One of the configuration's tasks, for example `summarization` of T5.")] = "",
    max_source_tokens: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Longest source; by default what the checkpoint says.")
    ] = None,
    max_target_tokens: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Longest answer; by default what the checkpoint says.")
    ] = None,
    special_tokens_in_text: Annotated[
        bool,
        typer.Option("--special-tokens-in-text", help="Special tokens that a text names are tokens where a request does not say."),
    ] = False,
    half: Annotated[bool, typer.Option("--half", help="Round weights to half precision: half the size.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with Transformers, which must be installed.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="BUNDLE", help="Bundle to write of the checkpoint.", rich_help_panel=_EXPORT)
    ] = None,
    precision: Annotated[str, typer.Option(help="Number format of the bundle's weights.", rich_help_panel=_EXPORT)] = "fp32",
    calibration: Annotated[
        Path | None, typer.Option(help="For int8: source text to calibrate with, one sentence a line.", rich_help_panel=_EXPORT)
    ] = None,
    quality_source: Annotated[
        Path | None,
        typer.Option(help="For all but fp32: text that must lose no more than 0.3 BLEU and 0.2 chrF.", rich_help_panel=_EXPORT),
    ] = None,
    quality_reference: Annotated[Path | None, typer.Option(help="Its translation, line by line.", rich_help_panel=_EXPORT)] = None,
    shortlist: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text in the target language: choose from its tokens alone. May be given several times.", rich_help_panel=_EXPORT
        ),
    ] = None,
    shortlist_size: Annotated[
        int | None, typer.Option(help="Keep so many of these tokens, the most frequent.", rich_help_panel=_EXPORT)
    ] = None,
    weight_bits: Annotated[
        int, typer.Option(help="For int8: 7 makes products fast on x86 without VNNI.", rich_help_panel=_EXPORT)
    ] = 8,
    cache_precision: Annotated[
        str | None, typer.Option(help="For int8: int8 keeps keys and values in a quarter of the memory.", rich_help_panel=_EXPORT)
    ] = None,
) -> None:
    """Make a checkpoint of another library's: Marian, M2M100, NLLB, BART, mBART, Pegasus, T5 and its relatives."""
    from dragoman.model.importers.hub import fetch, is_name

    of_export = calibration, quality_source, quality_reference, shortlist, shortlist_size, cache_precision
    if export is None and (precision != "fp32" or weight_bits != 8 or any(of_export)):
        raise InputError(
            "--precision, --calibration, --quality-…, --shortlist…, --weight-bits and --cache-precision go with --export"
        )
    if shortlist_size is not None and not shortlist:
        raise InputError("--shortlist-size goes with --shortlist")
    if export is not None:
        bits = precision, weight_bits, cache_precision
        _check_export(export, output, calibration, quality_source, quality_reference, force, *bits)
        from dragoman.cli import exporting

        exporting.read_texts(calibration, quality_source, quality_reference, shortlist, shortlist_size)
    if name is not None:
        from dragoman.export.arguments import check_name

        check_name(name)
    folder = Path(checkpoint)
    if folder.exists() or not is_name(checkpoint):
        if revision is not None:
            raise InputError(f"--revision is of repositories, and {checkpoint} is a folder")
    else:
        folder = fetch(checkpoint, revision)

    from dragoman.model.importers.importing import Order, default_name, import_checkpoint  # loads torch, which takes seconds
    from dragoman.model.importers.languages import Wishes
    from dragoman.model.importers.weights import Limits

    said = os.path.abspath(checkpoint) if folder == Path(checkpoint) else checkpoint
    order = Order(
        name=name or default_name(os.path.basename(said), "model"),
        limits=Limits(max_source_tokens, max_target_tokens),
        wishes=Wishes(source_language=source_language, target_language=target_language, task=task),
        is_half=half,
        is_forced=force,
        is_checked=check,
        reads_special_tokens=special_tokens_in_text,
    )
    for line in import_checkpoint(folder, output, order).lines():
        typer.echo(line)
    typer.echo(f"wrote {output}: {order.name}")
    if export is not None:
        exporting.export(
            output,
            export,
            precision=precision,
            force=force,
            calibration=calibration,
            quality_source=quality_source,
            quality_reference=quality_reference,
            shortlist=shortlist,
            shortlist_size=shortlist_size,
            weight_bits=weight_bits,
            cache_precision=cache_precision,
        )


def _check_export(
    bundle: Path,
    checkpoint: Path,
    calibration: Path | None,
    quality_source: Path | None,
    quality_reference: Path | None,
    force: bool,
    precision: str,
    weight_bits: int,
    cache_precision: str | None,
) -> None:
    """Refuse what the export would refuse after the import, before it."""
    from dragoman.export.arguments import check_bits, check_output, check_precision

    if (quality_source is None) != (quality_reference is None):
        raise InputError("--quality-source and --quality-reference go together")
    check_bits(check_precision(precision, calibration is not None, quality_source is not None), weight_bits, cache_precision)
    check_output(bundle, force)
    places = bundle.resolve(), checkpoint.resolve()
    if any(one.is_relative_to(other) for one, other in (places, places[::-1])):
        raise InputError(f"{bundle}: the checkpoint and the bundle need a place each")
