"""From a checkpoint to a bundle: trace the graphs, prove them right, describe them, and put the directory in its place."""

import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import onnx_ir

from dragoman.export.arguments import (
    ExportError,
    QualityTexts,
    check_dimensions,
    check_heads,
    check_name,
    check_output,
    check_precision,
)
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
from dragoman.export.caches import Cache, Role
from dragoman.export.calibration import calibrate, calibration_sources
from dragoman.export.cpu import keep_sums_apart, keep_time_axis
from dragoman.export.graphs import EncoderGraph, StepGraph
from dragoman.export.half import DTYPES, halved, store_halved
from dragoman.export.parity import ParityReport
from dragoman.export.progress import STEPS, Progress, Say
from dragoman.export.quality import verify_quantized
from dragoman.export.quantize import ScaleCounts, quantize
from dragoman.export.scorer_graph import ScorerGraph
from dragoman.export.tensor_names import STEP_INPUTS, output_name
from dragoman.export.tracing import input_output_names, trace, write, write_sharing
from dragoman.export.verify import greedy_sources, verify
from dragoman.export.verify_half import verify_half
from dragoman.model.card import read_domain
from dragoman.model.checkpoint import WEIGHTS_FILE, Checkpoint

# By default: the last of `greedy_sources`, which are sentences, and random ids before them.
NUM_CALIBRATION_SOURCES = 64


def export_checkpoint(
    checkpoint_dir: Path,
    output: Path,
    precision: str = "fp32",
    name: str | None = None,
    is_forced: bool = False,
    calibration: Sequence[str] | None = None,
    quality: QualityTexts | None = None,
    say: Say | None = None,
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

    Raises:
        CheckpointError: If the checkpoint cannot be read.
        CardError: If there is a card that cannot be read.
        ExportError: If it cannot be exported as asked, or the output is taken.
        ParityError: If the graphs do not answer as the checkpoint does.
    """
    chosen = check_precision(precision, calibration is not None, quality is not None)
    progress = Progress(STEPS[chosen], say)
    output = output.resolve()
    check_output(output, is_forced)
    checkpoint = Checkpoint.load(checkpoint_dir)
    name = checkpoint.name if name is None else name
    check_name(name)
    check_heads(checkpoint.model.config)
    check_dimensions(checkpoint.model.config)
    progress.done("read the checkpoint")
    max_positions = checkpoint.model.config.max_source_positions
    ids = None if calibration is None else calibration_sources(checkpoint.tokenizers.source, calibration, max_positions)
    domain = read_domain(checkpoint_dir)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{output.parent}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as staging:
        directory = Path(staging) / "bundle"
        directory.mkdir()
        caches, report = _write_files(checkpoint, directory, chosen, ids, quality, progress)
        origin = Origin(hash_file(checkpoint_dir / WEIGHTS_FILE), version("torch"), version("onnx"))
        manifest = _describe(checkpoint, name, chosen, directory, caches, origin, report)
        (directory / MANIFEST_FILE).write_bytes(_to_json(msgspec.structs.replace(manifest, domain=domain)))
        Bundle.open(directory, is_checked=False)  # its checksums were worked out from these very files a moment ago
        check_output(output, is_forced)
        _put(directory, output, Path(staging) / "replaced")
    progress.done("describe")
    return Bundle.open(output, is_checked=False)


def _write_files(
    checkpoint: Checkpoint,
    directory: Path,
    precision: Precision,
    calibration: Sequence[list[int]] | None,
    quality: QualityTexts | None,
    progress: Progress,
) -> tuple[list[Cache], ParityReport]:
    """Write everything but the manifest, and verify it; return the caches of the decode step and how close the graphs are."""
    model = halved(checkpoint.model, DTYPES[precision]) if precision in DTYPES else checkpoint.model
    graphs = [trace(graph(model)) for graph in (EncoderGraph, StepGraph, ScorerGraph)]
    for graph in graphs:
        if precision in DTYPES:
            store_halved(graph, DTYPES[precision])
        else:
            keep_sums_apart(graph)
    if precision in DTYPES:
        _write_graphs(graphs, directory)
        progress.done("write the graphs")
        report = verify_half(checkpoint, directory, precision, quality, progress)
    elif precision == "int8":
        with tempfile.TemporaryDirectory(prefix="fp32.", dir=directory.parent) as single:
            _write_graphs(graphs, Path(single))
            progress.done("write the graphs")
            report = verify(checkpoint, Path(single), progress=progress)
            counts = _quantize_graphs(graphs, checkpoint, calibration, progress)
            _write_graphs(graphs, directory)
            progress.done("quantise")
        changes = verify_quantized(checkpoint, directory, counts, quality, progress)
        report = msgspec.structs.replace(report, quality=changes)
    else:
        _write_graphs(graphs, directory)
        progress.done("write the graphs")
        report = verify(checkpoint, directory, progress=progress)
    (directory / TOKENIZER_DIRECTORY).mkdir()
    checkpoint.tokenizers.save(directory / TOKENIZER_DIRECTORY)
    (directory / PARITY_FILE).write_bytes(_to_json(report))
    caches = _declared_caches(graphs[1])
    traced = [names for graph in graphs for names in input_output_names(graph)]
    assert Tensors(*traced) == Tensors.of_caches(caches), "the graphs have other tensors than the format"
    return caches, report


def _declared_caches(decoder: onnx_ir.Model) -> list[Cache]:
    """Return the caches of a decode step as its inputs have them: what it also gives out it writes."""
    written = set(input_output_names(decoder)[1])
    caches = []
    for value in decoder.graph.inputs[len(STEP_INPUTS) :]:
        assert value.name is not None and value.shape is not None
        _, *row = (size if isinstance(size, int) else str(size.value) for size in value.shape)
        caches.append(msgspec.convert({"name": value.name, "role": _role(value.name, written), "shape": row}, Cache))
    return caches


def _role(name: str, written: set[str]) -> Role:
    return "self" if output_name(name) in written else "cross"


def _write_graphs(graphs: Sequence[onnx_ir.Model], directory: Path) -> None:
    """Write encoder, decode step and scorer."""
    encoder, decoder, scorer = graphs
    write(encoder, directory / ENCODER_FILE, ENCODER_WEIGHTS_FILE)
    write(decoder, directory / DECODER_FILE, DECODER_WEIGHTS_FILE)
    write_sharing(scorer, directory / SCORER_FILE, [directory / ENCODER_FILE, directory / DECODER_FILE])


def _quantize_graphs(
    graphs: Sequence[onnx_ir.Model], checkpoint: Checkpoint, calibration: Sequence[list[int]] | None, progress: Progress
) -> ScaleCounts:
    """Quantise encoder, decode step and scorer; return how many scales of which kind the first two have."""
    ranges = calibrate(checkpoint.model, calibration or greedy_sources(checkpoint)[-NUM_CALIBRATION_SOURCES:])
    progress.done("calibrate")
    encoder, decoder, _ = [quantize(graph, ranges) for graph in graphs]
    keep_time_axis(graphs[1])
    return ScaleCounts(encoder.num_constant + decoder.num_constant, encoder.num_row + decoder.num_row)


def _describe(
    checkpoint: Checkpoint,
    name: str,
    precision: Precision,
    directory: Path,
    caches: list[Cache],
    origin: Origin,
    report: ParityReport,
) -> Manifest:
    """Describe the files in a directory."""
    dimensions = check_dimensions(checkpoint.model.config)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = Manifest(
        name=name,
        version="unknown",
        precision=precision,
        **msgspec.structs.asdict(dimensions),
        caches=caches,
        num_choices=dimensions.target_vocab_size,
        tensors=Tensors.of_caches(caches),
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
