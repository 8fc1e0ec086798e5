"""From a checkpoint to a bundle: trace the graphs, prove them right, describe them, and put the directory in its place."""

import os
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import msgspec
import onnx_ir

from dragoman.export.bundle import (
    DECODER_FILE,
    DECODER_WEIGHTS_FILE,
    ENCODER_FILE,
    ENCODER_WEIGHTS_FILE,
    MANIFEST_FILE,
    PARITY_FILE,
    SCORER_FILE,
    TOKENIZER_DIRECTORY,
    Bundle,
    FileEntry,
    Manifest,
    Origin,
    Precision,
    Tensors,
    content_version,
    hash_file,
)
from dragoman.export.calibration import calibrate, calibration_sources
from dragoman.export.cpu import keep_sums_apart, keep_time_axis
from dragoman.export.graphs import EncoderGraph, StepGraph
from dragoman.export.half import DTYPES, halved, store_halved
from dragoman.export.parity import ParityReport
from dragoman.export.quality import QualityTexts, verify_quantized
from dragoman.export.quantize import ScaleCounts, quantize
from dragoman.export.scorer_graph import ScorerGraph
from dragoman.export.tracing import input_output_names, trace, write, write_sharing
from dragoman.export.verify import greedy_sources, verify
from dragoman.export.verify_half import verify_half
from dragoman.model.card import read_domain
from dragoman.model.checkpoint import WEIGHTS_FILE, Checkpoint
from dragoman.model.errors import InputError

DEFAULT_MAX_NEW_TOKENS = 256
HEAD_DIM_MULTIPLE = 8
IMPLEMENTED: tuple[Precision, ...] = ("fp32", "int8", "fp16", "bf16")
# By default: the last of `greedy_sources`, which are sentences, and random ids before them.
NUM_CALIBRATION_SOURCES = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ExportError(InputError):
    """An export that cannot be done; the message says why."""


def export_checkpoint(
    checkpoint_dir: Path,
    output: Path,
    precision: str = "fp32",
    name: str | None = None,
    is_forced: bool = False,
    calibration: Sequence[str] | None = None,
    quality: QualityTexts | None = None,
) -> Bundle:
    """Export a checkpoint; the bundle appears whole and verified, or not at all.

    Args:
        checkpoint_dir: That `Checkpoint.save` wrote.
        output: The directory to make.
        precision: One of `IMPLEMENTED`.
        name: Of the served model; the checkpoint's own where none is given.
        is_forced: Let the bundle take the place of one that is already there.
        calibration: Texts to calibrate int8 with; by default sentences of several languages and random tokens.
        quality: Texts on which another precision must translate as well as fp32.

    Raises:
        CheckpointError: If the checkpoint cannot be read.
        CardError: If there is a card that cannot be read.
        ExportError: If it cannot be exported as asked, or the output is taken.
        ParityError: If the graphs do not answer as the checkpoint does.
    """
    chosen = _check_precision(precision)
    if chosen != "int8" and calibration is not None:
        raise ExportError(f"texts for calibration go with int8, not {chosen}")
    if chosen == "fp32" and quality is not None:
        raise ExportError("texts for quality go with int8, fp16 and bf16, not fp32")
    if quality is not None and find_spec("sacrebleu") is None:
        raise ExportError("BLEU and chrF need sacrebleu, of the extra `evaluate`")
    output = output.resolve()
    _check_output(output, is_forced)
    checkpoint = Checkpoint.load(checkpoint_dir)
    name = checkpoint.name if name is None else name
    if NAME.fullmatch(name) is None:
        raise ExportError(f"name must be letters, digits, '.', '_' and '-', at most 128 of them, not {name!r}")
    if checkpoint.model.config.head_dim % HEAD_DIM_MULTIPLE:
        raise ExportError(
            f"heads must be a multiple of {HEAD_DIM_MULTIPLE} wide for ONNX Runtime's attention; "
            f"{checkpoint.model.config.num_heads} heads of a d_model of {checkpoint.model.config.d_model} are not"
        )
    max_positions = checkpoint.model.config.max_source_positions
    ids = None if calibration is None else calibration_sources(checkpoint.tokenizer, calibration, max_positions)
    domain = read_domain(checkpoint_dir)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{output.parent}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as staging:
        directory = Path(staging) / "bundle"
        directory.mkdir()
        tensors, report = _write_files(checkpoint, directory, chosen, ids, quality)
        origin = Origin(hash_file(checkpoint_dir / WEIGHTS_FILE), version("torch"), version("onnx"))
        manifest = _describe(checkpoint, name, chosen, directory, tensors, origin, report)
        (directory / MANIFEST_FILE).write_bytes(_to_json(msgspec.structs.replace(manifest, domain=domain)))
        Bundle.open(directory)
        _check_output(output, is_forced)
        _put(directory, output, Path(staging) / "replaced")
    return Bundle.open(output, is_checked=False)


def _check_precision(precision: str) -> Precision:
    """Return a precision that this release exports."""
    found = next((known for known in get_args(Precision) if known == precision), None)
    if found is None:
        raise ExportError(f"precision must be {' or '.join(get_args(Precision))}, not {precision!r}")
    if found not in IMPLEMENTED:
        raise ExportError(f"precision {found} is not exported yet; there is {' and '.join(IMPLEMENTED)}")
    chosen: Precision = found
    return chosen


def _check_output(output: Path, is_forced: bool) -> None:
    """Refuse an output that holds something, unless it is a bundle to be replaced."""
    if not os.path.lexists(output):
        return
    if not output.is_dir():
        raise ExportError(f"{output}: exists and is not a directory")
    if any(output.iterdir()):
        if not is_forced:
            raise ExportError(f"{output}: exists and is not empty")
        if not (output / MANIFEST_FILE).is_file():
            raise ExportError(f"{output}: exists and is not a bundle; it will not be replaced")


def _write_files(
    checkpoint: Checkpoint,
    directory: Path,
    precision: Precision,
    calibration: Sequence[list[int]] | None,
    quality: QualityTexts | None,
) -> tuple[Tensors, ParityReport]:
    """Write everything but the manifest, and verify it; return what the graphs have and how close they are."""
    model = halved(checkpoint.model, DTYPES[precision]) if precision in DTYPES else checkpoint.model
    graphs = [trace(graph(model)) for graph in (EncoderGraph, StepGraph, ScorerGraph)]
    for graph in graphs:
        if precision in DTYPES:
            store_halved(graph, DTYPES[precision])
        else:
            keep_sums_apart(graph)
    if precision in DTYPES:
        _write_graphs(graphs, directory)
        report = verify_half(checkpoint, directory, precision, quality)
    elif precision == "int8":
        with tempfile.TemporaryDirectory(prefix="fp32.", dir=directory.parent) as single:
            _write_graphs(graphs, Path(single))
            report = verify(checkpoint, Path(single))
            counts = _quantize_graphs(graphs, checkpoint, calibration)
            _write_graphs(graphs, directory)
        report = msgspec.structs.replace(report, quality=verify_quantized(checkpoint, directory, counts, quality))
    else:
        _write_graphs(graphs, directory)
        report = verify(checkpoint, directory)
    (directory / TOKENIZER_DIRECTORY).mkdir()
    checkpoint.tokenizer.save(directory / TOKENIZER_DIRECTORY)
    (directory / PARITY_FILE).write_bytes(_to_json(report))
    return Tensors(*(names for graph in graphs for names in input_output_names(graph))), report


def _write_graphs(graphs: Sequence[onnx_ir.Model], directory: Path) -> None:
    """Write encoder, decode step and scorer."""
    encoder, decoder, scorer = graphs
    write(encoder, directory / ENCODER_FILE, ENCODER_WEIGHTS_FILE)
    write(decoder, directory / DECODER_FILE, DECODER_WEIGHTS_FILE)
    write_sharing(scorer, directory / SCORER_FILE, [directory / ENCODER_FILE, directory / DECODER_FILE])


def _quantize_graphs(
    graphs: Sequence[onnx_ir.Model], checkpoint: Checkpoint, calibration: Sequence[list[int]] | None
) -> ScaleCounts:
    """Quantise encoder, decode step and scorer; return how many scales of which kind the first two have."""
    ranges = calibrate(checkpoint.model, calibration or greedy_sources(checkpoint)[-NUM_CALIBRATION_SOURCES:])
    encoder, decoder, _ = [quantize(graph, ranges) for graph in graphs]
    keep_time_axis(graphs[1])
    return ScaleCounts(encoder.num_constant + decoder.num_constant, encoder.num_row + decoder.num_row)


def _describe(
    checkpoint: Checkpoint,
    name: str,
    precision: Precision,
    directory: Path,
    tensors: Tensors,
    origin: Origin,
    report: ParityReport,
) -> Manifest:
    """Describe the files in a directory."""
    config = checkpoint.model.config
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = Manifest(
        name=name,
        version="unknown",
        precision=precision,
        d_model=config.d_model,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_encoder_layers=config.num_encoder_layers,
        num_decoder_layers=config.num_decoder_layers,
        source_vocab_size=config.source_vocab_size,
        target_vocab_size=config.target_vocab_size,
        pad_id=config.pad_id,
        eos_id=config.eos_id,
        decoder_start_id=config.decoder_start_id,
        max_source_tokens=config.max_source_positions,
        max_target_tokens=config.max_target_positions,
        default_max_new_tokens=min(DEFAULT_MAX_NEW_TOKENS, config.max_target_positions),
        tensors=tensors,
        files={path.relative_to(directory).as_posix(): FileEntry(path.stat().st_size, hash_file(path)) for path in paths},
        origin=origin,
        parity=report.headline(),
    )
    return msgspec.structs.replace(manifest, version=content_version(manifest))


def _to_json(struct: msgspec.Struct) -> bytes:
    """Return a struct as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(struct), indent=2) + b"\n"


def _put(directory: Path, output: Path, replaced: Path) -> None:
    """Move a finished bundle to its place; one that was there is moved away first, and back if that fails.

    A name that holds a directory cannot be given another in one call, so a reader may find nothing for an instant, never a half.
    """
    if not output.exists() or not any(output.iterdir()):
        os.rename(directory, output)
        return
    os.rename(output, replaced)
    try:
        os.rename(directory, output)
    except BaseException:
        os.rename(replaced, output)
        raise
