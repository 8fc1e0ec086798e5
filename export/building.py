"""The graphs of a bundle: traced, rewritten for a precision, written and proved."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx_ir

from dragoman.export.alignment import output_queries
from dragoman.export.architectures import Architecture, architecture_of
from dragoman.export.arguments import QualityTexts
from dragoman.export.calibration import Calibration, calibrate
from dragoman.export.fields import CachePrecision, Precision
from dragoman.export.half import DTYPES, halved, store_halved
from dragoman.export.manifest import AlignmentHead
from dragoman.export.progress import Progress
from dragoman.export.proof.cases import greedy_sources
from dragoman.export.proof.quality import verify_quantized
from dragoman.export.proof.report import ParityReport
from dragoman.export.proof.shortlist import verify_shortlist
from dragoman.export.proof.verify import verify
from dragoman.export.quantize import Ranges, ScaleCounts, quantize, quantize_given_caches, quantize_step_caches, weight_key
from dragoman.export.rewriting import choose_one_in_blocks, keep_sums_apart, keep_time_axis, skip_log_probs
from dragoman.export.shortlist import shortened
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import GraphModule, trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.network import Network
from dragoman.model.networks.transformer import transformer_of

# By default: the last of `greedy_sources`, which are sentences, and random ids before them.
NUM_CALIBRATION_SOURCES = 64
# Index of the decode step's graph.
STEP = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe for the graphs of a checkpoint."""

    precision: Precision  # of weights, caches and arithmetic
    # Sources to calibrate int8 with; by default sentences of several languages and random tokens.
    calibration: Sequence[list[int]] | None = None
    quality: QualityTexts | None = None  # texts on which another precision must translate as well as fp32
    shortlist: Sequence[int] | None = None  # ids that a decode step chooses from, rising; None for all
    cache_precision: CachePrecision | None = None  # of the caches; None for that of the arithmetic between 8-bit products
    alignment: Sequence[AlignmentHead] = ()  # heads whose queries the decode step outputs
    scale: float | None = None  # factor of attention's scores; None for 1/√Dh
    has_log_probs: bool = False  # whether the decode step outputs the log-probabilities of all tokens


def build_graphs(
    checkpoint: Checkpoint, directory: Path, recipe: Recipe, progress: Progress
) -> tuple[list[onnx_ir.Model], ParityReport]:
    """Write encoder, decode step and scorer into a directory, and prove them; return them and how close they are.

    With a shortlist the graphs without one are proved first, as ever, and then those with it against them.

    Raises:
        ParityError: If they do not answer as the checkpoint does.
    """
    half, model = DTYPES.get(recipe.precision), checkpoint.model
    architecture = architecture_of(model.config)
    model = model if half is None else halved(transformer_of(model), half)
    if recipe.shortlist is None:
        graphs, report, _ = _build_whole(checkpoint, model, architecture, directory, recipe, progress)
        return graphs, report
    with tempfile.TemporaryDirectory(prefix="whole.", dir=directory.parent) as folder:
        graphs, report, calibration = _build_whole(checkpoint, model, architecture, Path(folder), recipe, progress)
        graphs[STEP] = _short_step(model, architecture, recipe, recipe.shortlist, calibration)
        write_graphs(graphs, directory)
        found = verify_shortlist(Path(folder), directory, recipe.shortlist, model.config, recipe.precision)
        progress.done("compare the shortlist")
    return graphs, msgspec.structs.replace(report, shortlist=found)


def _build_whole(
    checkpoint: Checkpoint, model: Network, architecture: Architecture, directory: Path, recipe: Recipe, progress: Progress
) -> tuple[list[onnx_ir.Model], ParityReport, Calibration]:
    """Write and prove the graphs that choose from the whole vocabulary; return what int8 was calibrated to, too."""
    modules = enumerate(architecture.modules(model, recipe.precision))
    prepared = (_prepared(module, place, recipe) for place, module in modules)
    if recipe.precision != "int8":
        graphs = write_graphs(prepared, directory)
        progress.done("write the graphs")
        return graphs, verify(checkpoint, directory, recipe.precision, recipe.quality, progress), Calibration({}, {})
    with tempfile.TemporaryDirectory(prefix="fp32.", dir=directory.parent) as single:
        graphs = write_graphs(prepared, Path(single))
        progress.done("write the graphs")
        report = verify(checkpoint, Path(single), "fp32", None, progress)
        calibration = calibrate(model, recipe.calibration or greedy_sources(checkpoint)[-NUM_CALIBRATION_SOURCES:])
        progress.done("calibrate")
        counts = ScaleCounts()
        quantized = (_quantized(graph, i, architecture, recipe, calibration, counts) for i, graph in enumerate(graphs))
        write_graphs(quantized, directory)
        progress.done("quantise")
    changes = verify_quantized(checkpoint, directory, counts, recipe.quality, progress)
    return graphs, msgspec.structs.replace(report, quality=changes), calibration


def _quantized(
    graph: onnx_ir.Model, place: int, architecture: Architecture, recipe: Recipe, calibration: Calibration, counts: ScaleCounts
) -> onnx_ir.Model:
    """Turn the products of encoder, decode step or scorer, in this order, into 8-bit ones; count the first two's scales."""
    found = quantize(graph, calibration.inputs)
    if place == STEP and architecture.has_time_axis:
        keep_time_axis(graph)
    if recipe.cache_precision is not None and place < 2:
        (quantize_given_caches, quantize_step_caches)[place](graph, calibration.caches)
    if place == STEP:
        _add_outputs(graph, recipe, None if recipe.cache_precision is None else calibration.caches)
    if place < 2:
        counts.num_constant += found.num_constant
        counts.num_row += found.num_row
    return graph


def _prepared(module: GraphModule, place: int, recipe: Recipe) -> onnx_ir.Model:
    """Return the graph of encoder, decode step or scorer, in this order, rewritten for a precision but for 8-bit products."""
    graph = trace(module)
    if recipe.precision in DTYPES:
        store_halved(graph, DTYPES[recipe.precision])
    else:
        keep_sums_apart(graph)
        if place == STEP:
            choose_one_in_blocks(graph)
            if recipe.precision != "int8":
                _add_outputs(graph, recipe)
    return graph


def _add_outputs(graph: onnx_ir.Model, recipe: Recipe, ranges: Ranges | None = None) -> None:
    """Give a decode step the outputs that it does not need for itself."""
    if recipe.has_log_probs:
        skip_log_probs(graph)
    output_queries(graph, recipe.alignment, recipe.scale, ranges)


def _short_step(
    model: Network, architecture: Architecture, recipe: Recipe, shortlist: Sequence[int], calibration: Calibration
) -> onnx_ir.Model:
    """Return the decode step that chooses from a shortlist; its 8-bit projection has the scale that the whole one has."""
    graph = _prepared(architecture.step(model, shortlist), STEP, recipe)
    if recipe.precision == "int8":
        decoders = model.decoder, shortened(model.decoder, shortlist)
        whole, short = (weight_key(decoder.output_weight.detach().numpy().T) for decoder in decoders)
        inputs = calibration.inputs
        known = {**inputs, **({short: inputs[whole]} if whole in inputs else {})}
        _quantized(graph, STEP, architecture, recipe, Calibration(known, calibration.caches), ScaleCounts())
    return graph
