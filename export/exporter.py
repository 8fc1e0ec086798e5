"""From a checkpoint to a bundle: trace the graphs, prove them right, describe them, and put the directory in its place."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir

from dragoman.export.alignment import choose_heads
from dragoman.export.answering import make_samples
from dragoman.export.architectures import architecture_of, check_architecture
from dragoman.export.arguments import (
    ExportError,
    QualityTexts,
    Shortlist,
    check_cache_precision,
    check_dimensions,
    check_heads,
    check_name,
    check_output,
    check_precision,
)
from dragoman.export.building import STEP, Recipe, build_graphs
from dragoman.export.bundle import SHORTLIST_FILE, Bundle, hash_file
from dragoman.export.calibration import calibration_sources
from dragoman.export.fields import CachePrecision
from dragoman.export.manifest import (
    CARD_FILE,
    MANIFEST_FILE,
    PARITY_FILE,
    SAMPLES_FILE,
    TOKENIZER_DIRECTORY,
    FileEntry,
    Manifest,
    Origin,
    content_version,
    told,
)
from dragoman.export.progress import Progress, Say, steps_of
from dragoman.export.proof.cases import SENTENCES, greedy_sources
from dragoman.export.proof.report import ParityReport
from dragoman.export.samples import Samples
from dragoman.export.shortlist import choose_shortlist
from dragoman.export.tensors import STEP_INPUTS, Cache, Tensors, is_packed
from dragoman.export.tracing import input_output_names
from dragoman.model.card import domain_of, is_of_one_sentence, read_card
from dragoman.model.checkpoint import WEIGHTS_FILE, Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.files import put_directory
from dragoman.model.generation import Languages
from dragoman.model.networks.backend import attention_scale


def export_checkpoint(
    checkpoint_dir: Path,
    output: Path,
    precision: str = "fp32",
    name: str | None = None,
    is_forced: bool = False,
    calibration: Sequence[str] | None = None,
    quality: QualityTexts | None = None,
    say: Say | None = None,
    shortlist: Shortlist | None = None,
    languages: Languages | None = None,
    cache_precision: str | None = None,
) -> Bundle:
    """Export a checkpoint; the bundle appears whole and verified, or not at all.

    Args:
        checkpoint_dir: That `Checkpoint.save` wrote.
        output: The directory to make.
        precision: fp32, int8, fp16 or bf16.
        name: Of the served model; the checkpoint's own where none is given.
        is_forced: Let the bundle take the place of one that is already there.
        calibration: Texts to calibrate int8 with; by default sentences of several languages and random tokens.
        quality: Texts on which another precision must translate as well as fp32.
        say: Told a line when a step is done, see `progress`.
        shortlist: Texts whose tokens the model is to choose from.
        languages: In place of the checkpoint's, where given.
        cache_precision: Of int8's caches: int8 or fp32; by default int8 where the architecture can have it.

    Raises:
        CheckpointError: If the checkpoint cannot be read.
        CardError: If there is a card that cannot be read.
        ExportError: If it cannot be exported as asked, or the output is taken.
        ParityError: If the graphs do not answer as the checkpoint does.
    """
    chosen = check_precision(precision, calibration is not None, quality is not None)
    check_cache_precision(chosen, cache_precision)
    progress = Progress(steps_of(chosen, shortlist is not None), say)
    output = output.resolve()
    check_output(output, is_forced)
    checkpoint = Checkpoint.load(checkpoint_dir)
    checkpoint = checkpoint if languages is None else replace(checkpoint, languages=languages)
    name = checkpoint.name if name is None else name
    check_name(name)
    config, tokenizers = checkpoint.model.config, checkpoint.tokenizers
    architecture = check_architecture(config, chosen, cache_precision)
    has_integer_caches = chosen == "int8" and cache_precision != "fp32" and architecture.has_integer_caches
    has_queries = architecture.has_queries and is_packed(chosen)
    if architecture.has_heads:
        check_heads(config)
    check_dimensions(config, checkpoint.template, checkpoint.languages, checkpoint.defaults)
    listed = None
    if shortlist is not None:
        forced = checkpoint.template, checkpoint.languages
        listed = choose_shortlist(shortlist.texts, tokenizers.target, config, *forced, shortlist.size)
    progress.done("read the checkpoint")
    ids = None if calibration is None else calibration_sources(tokenizers.source, calibration, config.max_source_positions)
    card = read_card(checkpoint_dir)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{output.parent}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as staging:
        directory = Path(staging) / "bundle"
        directory.mkdir()
        heads = []
        if has_queries:
            heads = choose_heads(checkpoint.model, ids or greedy_sources(checkpoint)[-len(SENTENCES) :])
            progress.done("choose heads that align")
        cache_type: CachePrecision | None = "int8" if has_integer_caches else None
        scale = attention_scale(config) if heads else None
        has_log_probs = is_packed(chosen) and listed is None and not architecture.has_prompts
        recipe = Recipe(chosen, ids, quality, listed, cache_type, heads, scale, has_log_probs)
        graphs, report = build_graphs(checkpoint, directory, recipe, progress)
        caches = _declared_caches(graphs, config, recipe)
        samples = make_samples(checkpoint, directory, recipe, report.tolerance)
        progress.done("answer samples")
        _write_the_rest(checkpoint, directory, listed, report, samples, card)
        origin = Origin(hash_file(checkpoint_dir / WEIGHTS_FILE), version("torch"), version("onnx"))
        manifest = _describe(checkpoint, name, recipe, directory, caches, origin, report)
        manifest = msgspec.structs.replace(manifest, domain=domain_of(card), one_sentence=is_of_one_sentence(card))
        (directory / MANIFEST_FILE).write_bytes(_to_json(told(manifest)))
        Bundle.open(directory, is_checked=False)  # its checksums were worked out from these very files a moment ago
        check_output(output, is_forced)
        put_directory(directory, output, Path(staging) / "replaced")
    progress.done("describe")
    return Bundle.open(output, is_checked=False)


def _write_the_rest(
    checkpoint: Checkpoint, directory: Path, listed: Sequence[int] | None, report: ParityReport, samples: Samples, card: str
) -> None:
    """Write what lies beside the graphs, but for the manifest."""
    (directory / TOKENIZER_DIRECTORY).mkdir()
    checkpoint.tokenizers.save(directory / TOKENIZER_DIRECTORY)
    (directory / PARITY_FILE).write_bytes(_to_json(report))
    (directory / SAMPLES_FILE).write_bytes(msgspec.json.encode(samples) + b"\n")
    if listed is not None:
        (directory / SHORTLIST_FILE).write_bytes(msgspec.json.encode({"ids": listed}) + b"\n")
    if card:
        (directory / CARD_FILE).write_text(card, encoding="utf-8")


def _declared_caches(graphs: Sequence[onnx_ir.Model], config: ModelConfig, recipe: Recipe) -> list[Cache]:
    """Return the caches of a decode step, which are its inputs, in the numbers that these have."""
    architecture = architecture_of(config)
    caches = []
    inputs = graphs[STEP].graph.inputs[len(STEP_INPUTS) :]
    for cache, value in zip(architecture.caches(config), inputs, strict=True):
        assert value.shape is not None
        row = [size if isinstance(size, int) else str(size.value) for size in value.shape][1:]
        assert (value.name, row) == (cache.name, cache.shape), "the decode step has other caches than are declared"
        is_integer = value.dtype is onnx_ir.DataType.INT8
        caches.append(msgspec.structs.replace(cache, precision="int8") if is_integer else cache)
    expected = _tensors(config, caches, recipe)
    traced = [names for graph in graphs for names in input_output_names(graph)]
    assert Tensors(*traced) == expected, "the graphs have other tensors than the format"
    return caches


def _tensors(config: ModelConfig, caches: Sequence[Cache], recipe: Recipe) -> Tensors:
    """Return the tensors of the graphs of a recipe."""
    outputs = {"has_queries": bool(recipe.alignment), "has_log_probs": recipe.has_log_probs}
    return architecture_of(config).tensors(config, caches, is_packed(recipe.precision), **outputs)


def _describe(
    checkpoint: Checkpoint,
    name: str,
    recipe: Recipe,
    directory: Path,
    caches: list[Cache],
    origin: Origin,
    report: ParityReport,
) -> Manifest:
    """Describe the files in a directory."""
    config = checkpoint.model.config
    architecture = architecture_of(config)
    dimensions = check_dimensions(config, checkpoint.template, checkpoint.languages, checkpoint.defaults)
    num_attention_layers = architecture.num_attention_layers(config)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = Manifest(
        name=name,
        version="unknown",
        precision=recipe.precision,
        is_pair_safe=recipe.precision == "int8",
        architecture=config.architecture,
        has_prompts=architecture.has_prompts,
        num_attention_layers=None if num_attention_layers == config.num_decoder_layers else num_attention_layers,
        **msgspec.structs.asdict(dimensions),
        caches=caches,
        num_choices=dimensions.target_vocab_size if recipe.shortlist is None else len(recipe.shortlist),
        alignment=tuple(recipe.alignment),
        can_skip_log_probs=recipe.has_log_probs,
        tensors=_tensors(config, caches, recipe),
        files={path.relative_to(directory).as_posix(): FileEntry(path.stat().st_size, hash_file(path)) for path in paths},
        origin=origin,
        parity=report.headline(),
        template=checkpoint.template,
        languages=checkpoint.languages,
        defaults=checkpoint.defaults,
    )
    return msgspec.structs.replace(manifest, version=content_version(manifest))


def _to_json(fields: msgspec.Struct | dict[str, Any]) -> bytes:
    """Return fields as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"
