"""Commands about checkpoints and bundles: `dragoman import`, `export` and `sign`."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import ForceOption, HalfOption, JsonOption, in_groups, report, tidy_when_terminated
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.export.arguments import QualityTexts, Shortlist

app = typer.Typer()

_BUNDLE = "Bundle"
_MOST_TOKENS = 2**20


def _option(help_: str) -> Any:
    return typer.Option(help=help_, rich_help_panel=_BUNDLE)


@dataclass(frozen=True)
class BundleOptions:
    """Options of a bundle: number formats, and the texts that it is made with."""

    precision: Annotated[str, _option("Number format of the weights.")] = "fp32"
    calibration: Annotated[
        Path | None, _option("For int8: source text to calibrate with, one sentence a line; there is a default.")
    ] = None
    quality_source: Annotated[
        Path | None, _option("For all but fp32: text that must lose no more than 0.3 BLEU and 0.2 chrF, one sentence a line.")
    ] = None
    quality_reference: Annotated[Path | None, _option("Its translation, line by line.")] = None
    shortlist: Annotated[
        list[Path] | None, _option("Text in the target language: choose from its tokens alone. May be given several times.")
    ] = None
    shortlist_size: Annotated[int | None, _option("Keep so many of these tokens, the most frequent.")] = None
    cache_precision: Annotated[
        str | None, _option("For int8: fp32 keeps keys and values in single precision; by default int8.")
    ] = None

    @property
    def is_default(self) -> bool:
        """Whether none of them is given."""
        return all(getattr(self, field.name) in (field.default, []) for field in fields(self))

    def check(self) -> None:
        """Raise `InputError` if they do not go together."""
        from dragoman.export.arguments import check_cache_precision, check_precision

        if (self.quality_source is None) != (self.quality_reference is None):
            raise InputError("--quality-source and --quality-reference go together")
        if self.shortlist_size is not None and not self.shortlist:
            raise InputError("--shortlist-size goes with --shortlist")
        precision = check_precision(self.precision, self.calibration is not None, self.quality_source is not None)
        check_cache_precision(precision, self.cache_precision)

    def read(self) -> "tuple[Sequence[str] | None, QualityTexts | None, Shortlist | None]":
        """Read the texts: to calibrate with, to judge quality by, to choose tokens from.

        Raises:
            InputError: Naming a file that cannot be read, or a size that keeps no token.
        """
        from dragoman.export.arguments import QualityTexts, Shortlist
        from dragoman.model.corpus import read_lines, read_parallel

        texts = None
        if self.quality_source is not None and self.quality_reference is not None:
            texts = QualityTexts(*read_parallel(self.quality_source, self.quality_reference))
        listed = None
        if self.shortlist:
            listed = Shortlist([line for path in self.shortlist for line in read_lines(path)], self.shortlist_size)
        return None if self.calibration is None else read_lines(self.calibration), texts, listed


@app.command(name="import")
@in_groups
@tidy_when_terminated()
def import_(
    bundle: BundleOptions,
    checkpoint: Annotated[
        str, typer.Argument(help="Folder that `save_pretrained` wrote, or the name of a repository of the Hugging Face hub.")
    ],
    output: Annotated[Path, typer.Argument(help="Checkpoint to write.")],
    name: Annotated[str | None, typer.Option(help="Name of the model; by default the folder's.")] = None,
    force: ForceOption = False,
    revision: Annotated[str | None, typer.Option(help="Of a repository: a branch, a tag or a commit.")] = None,
    source_language: Annotated[str, typer.Option(metavar="CODE", help="Source language where a request names none.")] = "",
    target_language: Annotated[str, typer.Option(metavar="CODE", help="Target language where a request names none.")] = "",
    task: Annotated[str, typer.Option(help="One of the configuration's tasks, for example `summarization` of T5.")] = "",
    max_source_tokens: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Longest source; by default the checkpoint's.")
    ] = None,
    max_target_tokens: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Longest answer; by default the checkpoint's.")
    ] = None,
    special_tokens_in_text: Annotated[
        bool,
        typer.Option("--special-tokens-in-text", help="Special tokens that a text names are tokens where a request does not say."),
    ] = False,
    half: HalfOption = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with Transformers, which must be installed.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="BUNDLE", help="Bundle to write of the checkpoint.", rich_help_panel=_BUNDLE)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint of another library's: Marian, M2M100, NLLB, BART, mBART, Pegasus, T5 and its relatives."""
    from dragoman.model.importers.hub import fetch, is_name

    if export is None and not bundle.is_default:
        raise InputError("--precision, --calibration, --quality-…, --shortlist… and --cache-precision go with --export")
    if export is not None:  # what the export would refuse after the import
        from dragoman.export.arguments import check_output

        bundle.check()
        check_output(export, force)
        places = export.resolve(), output.resolve()
        if any(one.is_relative_to(other) for one, other in (places, places[::-1])):
            raise InputError(f"{export}: the checkpoint and the bundle need a place each")
        bundle.read()
    if name is not None:
        from dragoman.export.arguments import check_name

        check_name(name)
    folder = Path(checkpoint)
    if folder.exists() or not is_name(checkpoint):
        if revision is not None:
            raise InputError(f"--revision is of repositories, and {checkpoint} is a folder")
    else:
        folder = fetch(checkpoint, revision)

    # With torch, which takes seconds to load.
    from dragoman.model.importers.importing import ImportOptions, default_name, import_checkpoint
    from dragoman.model.importers.languages import PromptOptions
    from dragoman.model.importers.weights import Limits

    said = os.path.abspath(checkpoint) if folder == Path(checkpoint) else checkpoint
    options = ImportOptions(
        name=name or default_name(os.path.basename(said), "model"),
        limits=Limits(max_source_tokens, max_target_tokens),
        prompts=PromptOptions(source_language=source_language, target_language=target_language, task=task),
        is_half=half,
        is_forced=force,
        is_checked=check,
        reads_special_tokens=special_tokens_in_text,
    )
    result = import_checkpoint(folder, output, options)
    text = "\n".join([*result.lines(), f"wrote {output}: {options.name}"])
    report(as_json, text, checkpoint=output, name=options.name, **asdict(result))
    if export is not None:
        _export(output, export, bundle, as_json, force=force)


@app.command()
@in_groups
@tidy_when_terminated()
def export(
    bundle: BundleOptions,
    checkpoint: Annotated[Path, typer.Argument(help="Trained checkpoint.")],
    output: Annotated[Path, typer.Argument(help="Bundle to write.")],
    name: Annotated[str | None, typer.Option(help="Name of the served model; by default the checkpoint's.")] = None,
    force: ForceOption = False,
    source_language: Annotated[str, typer.Option(help="Source language; of several, the one where a request names none.")] = "",
    target_language: Annotated[str, typer.Option(help="Target language; likewise.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to an ONNX bundle, and check that it computes the same."""
    _export(checkpoint, output, bundle, as_json, name, force, source_language, target_language)


def _export(
    checkpoint: Path,
    output: Path,
    options: BundleOptions,
    as_json: bool,
    name: str | None = None,
    force: bool = False,
    source_language: str = "",
    target_language: str = "",
) -> None:
    """Export a checkpoint and print the report; all that can be wrong with the arguments is found before PyTorch is loaded."""
    import msgspec

    from dragoman.export.arguments import check_dimensions, check_heads, check_name, check_output, with_asked_languages
    from dragoman.model.checkpoint_folder import CheckpointFolder

    options.check()
    if name is not None:
        check_name(name)
    check_output(output, force)
    folder = CheckpointFolder.load(checkpoint)
    check_heads(folder.config)
    languages = with_asked_languages(folder.languages, source_language, target_language)
    check_dimensions(folder.config, folder.template, languages, folder.defaults)
    lines, texts, listed = options.read()

    # Threads of PyTorch that wait in a loop take the cores from ONNX Runtime's, which compute the other half of the comparison.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from dragoman.export.exporter import export_checkpoint  # it loads torch, which takes seconds

    bundle = export_checkpoint(
        checkpoint,
        output,
        options.precision,
        name,
        force,
        lines,
        texts,
        lambda line: typer.echo(line, err=True),
        listed,
        languages,
        options.cache_precision,
    )
    manifest = bundle.manifest
    parity, changed = manifest.parity, manifest.parity.quality
    told = [f"wrote {output}: {manifest.name} version {manifest.version}, {manifest.precision}"]
    if changed is not None:
        scores = "" if changed.bleu_change is None else f", BLEU {changed.bleu_change:+.2f}, chrF {changed.chrf_change:+.2f}"
        told.append(
            f"in 8 bits: {changed.agreement:.1%} of the likeliest tokens are those of PyTorch in single precision, a token's "
            f"log-probability moves by {changed.mean_log_prob_difference:.3f} on the average{scores}"
        )
    told.append(
        f"{'' if changed is None else 'before that: '}log-probabilities within {parity.max_log_prob_difference:.1e} of PyTorch, "
        f"{parity.num_token_mismatches} of {parity.num_sentences} greedy answers differ"
    )
    if listed is not None:
        told.append(f"chooses from {manifest.num_choices} of {manifest.target_vocab_size} tokens")
    told.append(f"verified on: {parity.device} ({parity.processor})")
    described = {"name": manifest.name, "version": manifest.version, "precision": manifest.precision}
    report(as_json, "\n".join(told), bundle=output, **described, parity=msgspec.to_builtins(parity))


@app.command()
def sign(
    bundle: Annotated[Path, typer.Argument(help="Bundle to sign, or a `model.toml`.")],
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="PEM file of a private Ed25519 key: openssl genpkey -algorithm ed25519 -out FILE.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Sign a bundle: write `bundle.json.sig` beside its manifest, whose checksums cover every file.

    Every file is compared with the manifest before.
    """
    from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError
    from dragoman.export.signing import sign as write_signature

    if not bundle.is_dir():
        if bundle.name != "model.toml":
            raise BundleError(f"{bundle}: neither a bundle's folder nor a model.toml")
        identity = write_signature(bundle, key)
        report(as_json, f"signed {bundle} with key {identity}", signed=bundle, key=identity)
        return
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    identity = write_signature(bundle / MANIFEST_FILE, key, opened.digest)
    text = f"signed {bundle}: {manifest.name} version {manifest.version}, with key {identity}"
    report(as_json, text, signed=bundle, name=manifest.name, version=manifest.version, key=identity)
