"""The parity gate of half precision: close enough to the model in single precision, and the graphs run wherever that can be done.

fp16 graphs run on CUDA where there is a device, and on the CPU where there is none. bf16 graphs do not run on the CPU: there their
wiring and weights are proved on a copy that is widened to single precision, against the model with the same rounded weights, and
the report says so. What bfloat16 arithmetic then does to answers is found out in eager PyTorch.
"""

import copy
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir
import torch

from dragoman.export.arguments import QualityTexts
from dragoman.export.bundle import DECODER_FILE, ENCODER_FILE, SCORER_FILE
from dragoman.export.greedy_parity import MAX_NEW_TOKENS
from dragoman.export.half import DTYPES, halved
from dragoman.export.parity import ParityError, ParityReport
from dragoman.export.progress import Progress
from dragoman.export.quality import MAX_BLEU_LOSS, MAX_CHRF_LOSS
from dragoman.export.running import OnnxRunner
from dragoman.export.session import Session, has_cuda, open_on_cuda
from dragoman.export.verify import NUM_SLOTS, compare, greedy_sources
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import greedy_search
from dragoman.model.networks.transformer import Transformer, transformer_of

LIMITS = {"fp16": 0.1, "bf16": 0.8}
"""Largest difference of a log-probability from single precision, which is also the margin that a different token is excused by."""
WIDENED_TOLERANCE = 1e-3
"""The same between a widened graph and the model with the same weights, which differ by what is rounded between layers."""
MIN_AGREEMENT = {"fp16": 0.9, "bf16": 0.6}
"""Share of sources, most of them random tokens, whose greedy answer must be that of single precision to the last token."""
WIDENED = "cpu, widened to fp32; not run in bf16"


class HalfRunner(OnnxRunner):
    """fp16 graphs, on CUDA where there is a device and they may run there."""

    def __init__(self, directory: Path, config: ModelConfig, is_on_cpu: bool = False) -> None:
        self.device = "cuda" if torch.cuda.is_available() and has_cuda() and not is_on_cpu else "cpu"
        super().__init__(directory, config, is_packed=False)

    def _open(self, path: Path) -> Session:
        return open_on_cuda(path) if self.device == "cuda" else super()._open(path)


def verify_half(
    checkpoint: Checkpoint,
    directory: Path,
    precision: str,
    texts: QualityTexts | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare the graphs in a directory with the checkpoint in single precision; see the module for what runs where.

    Raises:
        BundleError: If the graphs cannot be loaded or have other inputs and outputs.
        ParityError: Naming the figure that is off.
    """
    half = halved(transformer_of(checkpoint.model), DTYPES[precision])
    if texts is not None:
        _check_scores(checkpoint, half, texts)
    if precision == "fp16":
        runner = HalfRunner(directory, checkpoint.model.config)
        report = compare(
            checkpoint, runner, checkpoint.model, LIMITS[precision], is_exact_alone=runner.device == "cpu", progress=progress
        )
        _check_agreement(report.num_token_mismatches, report.num_sentences, precision)
        return msgspec.structs.replace(report, device=runner.device)
    rounded = copy.deepcopy(half).float()
    with tempfile.TemporaryDirectory() as folder:
        for name in (ENCODER_FILE, DECODER_FILE, SCORER_FILE):
            widen(directory / name, Path(folder) / name)
        widened = OnnxRunner(Path(folder), checkpoint.model.config, is_packed=False)
        report = compare(checkpoint, widened, rounded, WIDENED_TOLERANCE, is_exact_alone=True, progress=progress)
    _check_answers(checkpoint, half)
    if progress is not None:
        progress.done("compare answers")
    return msgspec.structs.replace(report, device=WIDENED)


def _check_answers(checkpoint: Checkpoint, half: Transformer) -> None:
    """Decode with eager models in half and in single precision.

    Raises:
        ParityError: If too many answers differ, or a log-probability of equal tokens does by more than the limit.
    """
    sources, limit = greedy_sources(checkpoint), LIMITS["bf16"]
    num_tokens = min(half.config.max_target_positions, MAX_NEW_TOKENS)
    num_parted = 0
    for start in range(0, len(sources), 4 * NUM_SLOTS):
        chunk = sources[start : start + 4 * NUM_SLOTS]
        pairs = zip(greedy_search(half, chunk, num_tokens), greedy_search(checkpoint.model, chunk, num_tokens), strict=True)
        for found, expected in pairs:
            num_parted += found.ids != expected.ids
            same = [
                i
                for i, (a, b) in enumerate(zip(found.ids, expected.ids, strict=False))
                if found.ids[: i + 1] == expected.ids[: i + 1]
            ]
            difference = max((abs(found.log_probs[i] - expected.log_probs[i]) for i in same), default=0.0)
            if not difference <= limit:
                raise ParityError(f"bf16 changes a log-probability by {difference:.3g}; the limit is {limit:.3g}")
    _check_agreement(num_parted, len(sources), "bf16")


def _check_agreement(num_parted: int, num_sources: int, precision: str) -> None:
    """Refuse a model that half precision makes answer otherwise too often."""
    if num_parted > (1 - MIN_AGREEMENT[precision]) * num_sources:
        raise ParityError(
            f"{num_parted} of {num_sources} greedy answers differ from those of single precision; "
            f"at most {1 - MIN_AGREEMENT[precision]:.0%} may in {precision}"
        )


def _check_scores(checkpoint: Checkpoint, half: Transformer, texts: QualityTexts) -> None:
    """Translate texts in PyTorch, in half and in single precision.

    Raises:
        ParityError: If BLEU or chrF lose too much.
    """
    from dragoman.model.evaluate import translate
    from dragoman.model.quality import score

    before, after = (
        score(translate(model, checkpoint.tokenizers, texts.sources), texts.references) for model in (checkpoint.model, half)
    )
    for name, loss, allowed in (
        ("BLEU", before.bleu - after.bleu, MAX_BLEU_LOSS),
        ("chrF", before.chrf - after.chrf, MAX_CHRF_LOSS),
    ):
        if not loss <= allowed:
            raise ParityError(f"half precision costs {loss:.2f} {name}; {allowed:g} is the most that is accepted")


def widen(source: Path, target: Path) -> None:
    """Write a copy of a bfloat16 graph that computes in single precision with the same weights."""
    model = onnx_ir.load(source)
    graph = model.graph
    half, single = onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT
    for value in graph.initializers.values():
        assert value.const_value is not None
        if value.const_value.dtype == half:
            value.const_value = onnx_ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for value in values:
        if value.dtype == half:
            value.dtype = single
    for node in graph:
        for attribute in list(node.attributes.values()):
            if node.op_type == "Cast" and attribute.name == "to" and attribute.value == int(half):
                node.attributes["to"] = onnx_ir.AttrInt64("to", int(single))
            assert attribute.type != onnx_ir.AttributeType.TENSOR or attribute.value.dtype != half, f"{node.name} holds a constant"
    onnx_ir.save(model, target, external_data=target.with_suffix(".weights").name)
