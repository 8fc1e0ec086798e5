"""The gate of quantised bundles lets sound ones through, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dragoman.export import quantize as quantization
from dragoman.export.arguments import QualityTexts
from dragoman.export.bundle import Bundle
from dragoman.export.calibration import calibrate
from dragoman.export.exporter import export_checkpoint
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.proof import quality as gate
from dragoman.export.proof.batching import check_rows_apart, drive
from dragoman.export.proof.cases import forced_rows
from dragoman.export.proof.eager import Floats, Ints
from dragoman.export.proof.quality import Divergence, answer_rows, verify_quantized
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.sessions import OnnxRunner, OnnxSlots
from dragoman.export.quantize import ScaleCounts, quantize, quantize_given_caches, quantize_step_caches
from dragoman.export.rewriting import keep_sums_apart, keep_time_axis
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.errors import InputError
from dragoman.model.text.tokenizers import Tokenizers
from tests.export.conftest import CALIBRATION, Export, MakeCheckpoint
from tests.model.families import random_pair

ROOT = Path(__file__).parents[2]
COUNTS = ScaleCounts(1, 0)


@pytest.fixture(scope="module")
def int8(export: Export) -> Path:
    """Return a bundle that no test may change."""
    return export("tiny", "int8").directory


@pytest.mark.parametrize("is_precise", [True, False], ids=["precise", "fast"])
def test_graphs_agree_with_single_precision_in_both_ways_to_multiply(int8: Path, checkpoint: Checkpoint, is_precise: bool) -> None:
    config, rows, divergence = checkpoint.model.config, answer_rows(checkpoint), Divergence(checkpoint)
    runner = OnnxRunner(int8, config, 1, is_precise=is_precise)
    drive(runner, rows, 8, config.target_vocab_size, False, divergence.observe)
    assert np.mean(divergence.divergences) < 0.05
    assert divergence.num_agreed > 0.8 * len(divergence.divergences)
    assert check_rows_apart([runner], forced_rows(config)[:8]) == 8


def test_manifest_has_the_figures_and_graphs_are_small(int8: Path, exported: Path) -> None:
    manifest, large = (Bundle.open(path).manifest for path in (int8, exported))
    assert manifest.precision == "int8"
    assert manifest.parity.max_log_prob_difference <= manifest.parity.tolerance == 1e-4, "before quantisation"
    quality = manifest.parity.quality
    assert quality is not None and quality.num_tokens > 64 and quality.num_rows == 24
    assert 0 < quality.mean_log_prob_difference < 0.2 and 0 < quality.mean_divergence < 0.05 and quality.agreement > 0.8
    assert quality.num_constant_scales + quality.num_row_scales == 2 * 4 + 1 + 2 * 6 + 1, "all products of both graphs"
    assert quality.bleu_change is None
    for name in ("encoder.weights", "decoder.weights"):
        assert manifest.files[name].size < 0.5 * large.files[name].size, "biases, norms and positions weigh much in a small model"
    assert manifest.files["scorer.onnx"].size < 100_000
    for name in ("encoder", "decoder", "scorer"):
        operators = [node.op_type for node in onnx.load(int8 / f"{name}.onnx", load_external_data=False).graph.node]
        assert "MatMulIntegerToFloat" in operators and "Gemm" not in operators


def test_same_checkpoint_gives_the_same_bytes(int8: Path, checkpoint_dir: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint_dir, tmp_path / "again", "int8", calibration=CALIBRATION)
    assert Bundle.open(tmp_path / "again").manifest == Bundle.open(int8).manifest


FAULTS: dict[str, tuple[Callable[[Ints, Floats], tuple[Ints, Floats]], str]] = {
    "a row that depends on others": (lambda ids, probs: (ids, probs + np.float32(1e-6) * len(ids)), "same bits in every batch"),
    "order": (lambda ids, probs: (ids[:, ::-1].copy(), probs[:, ::-1].copy()), "not in order"),
    "mass": (lambda ids, probs: (ids, probs + np.float32(0.01)), "sum to 1"),
    "padding": (lambda ids, probs: (ids, np.where(np.isneginf(probs), np.float32(-50), probs)), "padding"),
    "NaN": (lambda ids, probs: (ids, np.where(np.arange(probs.shape[1]) == 0, np.nan, probs)), "in order|sum to 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_candidates_are_refused(int8: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    step, (change, message) = OnnxSlots.step, FAULTS[fault]
    monkeypatch.setattr(OnnxSlots, "step", lambda self, *inputs: change(*step(self, *inputs)))
    with pytest.raises(ParityError, match=message):
        if fault.startswith("a row"):
            check_rows_apart([OnnxRunner(int8, checkpoint.model.config, 1)], forced_rows(checkpoint.model.config)[:8])
        else:
            divergence = Divergence(checkpoint)
            drive(OnnxRunner(int8, checkpoint.model.config, 1), answer_rows(checkpoint)[:9], 8, 300, False, divergence.observe)


def test_quantisation_that_ruins_the_model_leaves_nothing(checkpoint_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quantization, "WEIGHT_LEVELS", 1)
    with pytest.raises(ParityError, match=r"too much harm: .* export it in fp32"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", "int8", calibration=["a dog"])
    assert list(tmp_path.iterdir()) == []


def test_graphs_of_another_model_and_texts_that_lose_too_much_are_refused(
    int8: Path, checkpoint: Checkpoint, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParityError, match="too much harm"):
        verify_quantized(make_checkpoint(seed=1), int8, COUNTS)
    pytest.importorskip("sacrebleu", reason="BLEU and chrF are sacreBLEU's")
    texts = QualityTexts(["two dogs run", "a cat sat on the grass"], ["zwei Hunde laufen", "eine Katze sitzt im Gras"])
    found = verify_quantized(checkpoint, int8, COUNTS, texts)
    assert found.bleu_change is not None and found.chrf_change is not None
    monkeypatch.setattr(gate, "MAX_CHRF_LOSS", -found.chrf_change - 0.01)
    with pytest.raises(ParityError, match=r"costs .* chrF of .* is the most that is accepted"):
        verify_quantized(checkpoint, int8, COUNTS, texts)
    with pytest.raises(InputError, match=r"line 2: .* where the model takes 24"):
        verify_quantized(checkpoint, int8, COUNTS, QualityTexts(["a", "dog " * 40], ["a", "b"]))


def test_shipped_model_keeps_its_translations(shipped_bundle: Callable[..., Path]) -> None:
    manifest = Bundle.open(shipped_bundle("en-de", "int8")).manifest
    quality = manifest.parity.quality
    assert quality is not None
    assert quality.num_row_scales == 0, "every input of this model is tame"
    assert quality.agreement > 0.93 and quality.mean_divergence < 0.01 and quality.mean_scorer_difference < 0.1
    parameters = Checkpoint.load(ROOT / "model/pretrained/en-de").model.parameters()
    size = sum(manifest.files[name].size for name in ("encoder.weights", "decoder.weights"))
    assert size < 2.2 * sum(parameter.numel() for parameter in parameters), "embeddings thrice, and position tables"


@pytest.mark.parametrize(
    ("family", "is_calibrated", "has_caches"),
    [*(("marian", True, True), ("bart-gelu-new", False, False), ("t5-gated-silu", False, True), ("umt5", True, False))],
)
def test_families_pass_the_gate(family: str, is_calibrated: bool, has_caches: bool, tokenizers: Tokenizers, tmp_path: Path) -> None:
    """Rows keep their bits in every batch, and answers stay close: with constant scales, one for every row, and 8-bit caches."""
    model = random_pair(family, scale=0.08)[1]
    sources = [[5, 6, 7], [9] * 12, [20, 21], *np.random.default_rng(0).integers(3, 250, (12, 9)).tolist()]
    calibration = calibrate(model, sources, 8)
    graphs: list[Any] = [trace(graph(model)) for graph in (EncoderGraph, StepGraph, ScorerGraph)]
    for graph in graphs:
        keep_sums_apart(graph)
    encoder, decoder, _ = [quantize(graph, calibration.inputs if is_calibrated else {}) for graph in graphs]
    keep_time_axis(graphs[1])
    if has_caches:
        quantize_given_caches(graphs[0], calibration.caches)
        quantize_step_caches(graphs[1], calibration.caches)
    counts = ScaleCounts(encoder.num_constant + decoder.num_constant, encoder.num_row + decoder.num_row)
    assert (counts.num_constant > 0) == is_calibrated
    num_products = 1 + 3 * (4 + model.config.is_ffn_gated) + 2 * (6 + model.config.is_ffn_gated)
    assert counts.num_constant + counts.num_row >= num_products, "every product with weights, gates included"
    assert not [node for node in graphs[1].graph if node.op_type in ("MatMul", "Gemm")]
    write_graphs(graphs, tmp_path)
    quality = verify_quantized(Checkpoint(family, model, tokenizers), tmp_path, counts)
    assert 0 < quality.mean_divergence < 0.05 and quality.agreement > 0.8
