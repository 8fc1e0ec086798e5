"""From a checkpoint to a bundle: trace the graphs, prove them right, describe them, and put the directory in its place."""

import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import msgspec

from export.bundle import (
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
from export.graphs import EncoderGraph, StepGraph
from export.parity import ParityReport
from export.scorer_graph import ScorerGraph
from export.tracing import input_output_names, trace, write, write_sharing
from export.verify import verify
from model.checkpoint import WEIGHTS_FILE, Checkpoint
from model.errors import InputError

DEFAULT_MAX_NEW_TOKENS = 256
HEAD_DIM_MULTIPLE = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ExportError(InputError):
    """An export that cannot be done; the message says why."""


def export_checkpoint(
    checkpoint_dir: Path, output: Path, precision: str = "fp32", name: str | None = None, is_forced: bool = False
) -> Bundle:
    """Export a checkpoint; the bundle appears whole and verified, or not at all.

    Args:
        checkpoint_dir: That `Checkpoint.save` wrote.
        output: The directory to make.
        precision: Only `fp32` so far.
        name: Of the served model; the checkpoint's own where none is given.
        is_forced: Let the bundle take the place of one that is already there.

    Raises:
        CheckpointError: If the checkpoint cannot be read.
        ExportError: If it cannot be exported as asked, or the output is taken.
        ParityError: If the graphs do not answer as the checkpoint does.
    """
    if precision not in get_args(Precision):
        raise ExportError(f"precision must be {' or '.join(get_args(Precision))}, not {precision!r}")
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
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{output.parent}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as staging:
        directory = Path(staging) / "bundle"
        directory.mkdir()
        tensors, report = _write_files(checkpoint, directory)
        origin = Origin(hash_file(checkpoint_dir / WEIGHTS_FILE), version("torch"), version("onnx"))
        manifest = _describe(checkpoint, name, directory, tensors, origin, report)
        (directory / MANIFEST_FILE).write_bytes(_to_json(manifest))
        Bundle.open(directory)
        _check_output(output, is_forced)
        _put(directory, output, Path(staging) / "replaced")
    return Bundle.open(output, is_checked=False)


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


def _write_files(checkpoint: Checkpoint, directory: Path) -> tuple[Tensors, ParityReport]:
    """Write everything but the manifest, and verify it; return what the graphs have and how close they are."""
    graphs = [trace(graph(checkpoint.model)) for graph in (EncoderGraph, StepGraph, ScorerGraph)]
    write(graphs[0], directory / ENCODER_FILE, ENCODER_WEIGHTS_FILE)
    write(graphs[1], directory / DECODER_FILE, DECODER_WEIGHTS_FILE)
    write_sharing(graphs[2], directory / SCORER_FILE, [directory / ENCODER_FILE, directory / DECODER_FILE])
    (directory / TOKENIZER_DIRECTORY).mkdir()
    checkpoint.tokenizer.save(directory / TOKENIZER_DIRECTORY)
    report = verify(checkpoint, directory)
    (directory / PARITY_FILE).write_bytes(_to_json(report))
    return Tensors(*(names for graph in graphs for names in input_output_names(graph))), report


def _describe(
    checkpoint: Checkpoint, name: str, directory: Path, tensors: Tensors, origin: Origin, report: ParityReport
) -> Manifest:
    """Describe the files in a directory."""
    config = checkpoint.model.config
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = Manifest(
        name=name,
        version="unknown",
        precision="fp32",
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
