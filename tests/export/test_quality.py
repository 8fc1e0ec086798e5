"""The gate of quantised bundles lets sound ones through, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dragoman.export import quantize
from dragoman.export.arguments import ExportError, QualityTexts
from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.parity import Floats, Ints, ParityError, drive
from dragoman.export.processor import overflows_in_8_bits
from dragoman.export.quality import Divergence, answer_rows, check_rows_apart, verify_quantized
from dragoman.export.quantize import ScaleCounts
from dragoman.export.running import OnnxRunner, OnnxSlots
from dragoman.export.verify import forced_rows
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.errors import InputError

SHIPPED = Path(__file__).parents[2] / "model" / "pretrained" / "en-de"
COUNTS = ScaleCounts(1, 0)


@pytest.fixture(scope="module")
def int8(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that no test may change."""
    output = tmp_path_factory.mktemp("int8") / "tiny"
    export_checkpoint(checkpoint_dir, output, "int8", calibration=["a dog and a cat run", "the cat sat"])
    return output


@pytest.mark.parametrize("is_precise", [True, False], ids=["precise", "fast"])
def test_graphs_agree_with_single_precision_in_both_ways_to_multiply(int8: Path, checkpoint: Checkpoint, is_precise: bool) -> None:
    """The shipped way is one of the two; the other one is right as well, unless it overflows."""
    if not is_precise and overflows_in_8_bits():
        pytest.skip("the fast products of this processor may overflow, so that it is never served with them")
    config, rows, divergence = checkpoint.model.config, answer_rows(checkpoint), Divergence(checkpoint)
    runner = OnnxRunner(int8, config, 1, is_precise=is_precise)
    drive(runner, rows, 8, config.target_vocab_size, False, divergence.observe)
    assert np.mean(divergence.divergences) < 0.05
    assert divergence.num_agreed > 0.8 * len(divergence.divergences)
    assert check_rows_apart([runner], forced_rows(config)[:8]) == 8


def patch_step(monkeypatch: pytest.MonkeyPatch, change: Callable[[Ints, Floats], tuple[Ints, Floats]]) -> None:
    """Put a fault between the graphs and the gate."""
    step = OnnxSlots.step
    monkeypatch.setattr(OnnxSlots, "step", lambda self, *inputs: change(*step(self, *inputs)))


def test_bundle_says_what_it_is_and_what_was_found(int8: Path, checkpoint: Checkpoint) -> None:
    manifest = Bundle.open(int8).manifest
    assert manifest.precision == "int8"
    assert manifest.parity.max_log_prob_difference <= manifest.parity.tolerance == 1e-4, "before quantisation"
    quality = manifest.parity.quality
    assert quality is not None and quality.num_tokens > 64 and quality.num_rows == 24
    assert 0 < quality.mean_log_prob_difference < 0.2 and 0 < quality.mean_divergence < 0.05 and quality.agreement > 0.8
    assert quality.num_constant_scales + quality.num_row_scales == 2 * 4 + 1 + 2 * 6 + 1, "all products of both graphs"
    assert quality.bleu_change is None


def test_bundle_is_much_smaller_and_scores_with_the_same_weights(int8: Path, exported: Path) -> None:
    small, large = (Bundle.open(path).manifest.files for path in (int8, exported))
    for name in ("encoder.weights", "decoder.weights"):
        assert small[name].size < 0.5 * large[name].size, "biases, norms and positions weigh much in so small a model"
    assert small["scorer.onnx"].size < 100_000
    for name in ("encoder", "decoder", "scorer"):
        operators = [node.op_type for node in onnx.load(int8 / f"{name}.onnx", load_external_data=False).graph.node]
        assert "MatMulIntegerToFloat" in operators and "Gemm" not in operators


def test_same_checkpoint_gives_the_same_bytes(int8: Path, checkpoint_dir: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint_dir, tmp_path / "again", "int8", calibration=["a dog and a cat run", "the cat sat"])
    assert Bundle.open(tmp_path / "again").manifest == Bundle.open(int8).manifest


def test_row_that_depends_on_its_company_is_found_out(int8: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(ids: Ints, log_probs: Floats) -> tuple[Ints, Floats]:
        return ids, log_probs + np.float32(1e-6) * len(ids)

    config = checkpoint.model.config
    rows = forced_rows(config)[:8]
    assert check_rows_apart([OnnxRunner(int8, config, 1)], rows) == 8
    patch_step(monkeypatch, leak)
    with pytest.raises(ParityError, match="does not give the same bits in every batch"):
        check_rows_apart([OnnxRunner(int8, config, 1)], rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, log_probs: (ids[:, ::-1].copy(), log_probs[:, ::-1].copy()), "not in order"),
        (lambda ids, log_probs: (ids, log_probs + np.float32(0.01)), "sum to 1"),
        (lambda ids, log_probs: (ids, np.where(np.isneginf(log_probs), np.float32(-50), log_probs)), "padding"),
        (lambda ids, log_probs: (ids, np.where(np.arange(log_probs.shape[1]) == 0, np.nan, log_probs)), "in order|sum to 1"),
    ],
    ids=["order", "mass", "padding", "NaN"],
)
def test_wrong_candidates_are_refused(
    int8: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    monkeypatch.setattr("dragoman.export.quality.check_rows_apart", lambda runners, rows: len(rows))
    patch_step(monkeypatch, change)
    with pytest.raises(ParityError, match=message):
        verify_quantized(checkpoint, int8, COUNTS)


def test_quantisation_that_ruins_the_model_leaves_nothing(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quantize.WEIGHT_LEVELS, 8, 1)
    monkeypatch.setattr("dragoman.export.quality.check_rows_apart", lambda runners, rows: len(rows))
    with pytest.raises(ParityError, match=r"too much harm: .* export it in fp32"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", "int8", calibration=["a dog"])
    assert list(tmp_path.iterdir()) == []


def test_other_models_graphs_are_refused(int8: Path, make_checkpoint: Callable[..., Checkpoint]) -> None:
    with pytest.raises(ParityError, match="too much harm"):
        verify_quantized(make_checkpoint(seed=1), int8, COUNTS)


def test_texts_that_lose_too_much_are_refused(int8: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu", reason="BLEU and chrF are sacreBLEU's")
    texts = QualityTexts(["two dogs run", "a cat sat on the grass"], ["zwei Hunde laufen", "eine Katze sitzt im Gras"])
    found = verify_quantized(checkpoint, int8, COUNTS, texts)
    assert found.bleu_change is not None and found.chrf_change is not None
    monkeypatch.setattr("dragoman.export.quality.MAX_CHRF_LOSS", -1000.0)
    with pytest.raises(ParityError, match=r"8-bit arithmetic costs .* chrF"):
        verify_quantized(checkpoint, int8, COUNTS, texts)


def test_texts_go_with_a_precision_that_uses_them(checkpoint_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"calibration .* int8"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", calibration=["a dog"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("texts", "message"), [(["a dog", "a dog and " * 20], r"line 2: .* the model takes 24"), ([], "nothing")])
def test_calibration_text_that_cannot_be_used_is_refused_at_once(
    checkpoint_dir: Path, tmp_path: Path, texts: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", "int8", calibration=texts)
    assert list(tmp_path.iterdir()) == []


def test_shipped_model_keeps_its_translations(tmp_path: Path) -> None:
    manifest = export_checkpoint(SHIPPED, tmp_path / "bundle", "int8").manifest
    quality = manifest.parity.quality
    assert quality is not None
    assert quality.num_row_scales == 0, "every input of this model is tame"
    assert quality.agreement > 0.93 and quality.mean_divergence < 0.01 and quality.mean_scorer_difference < 0.01
    parameters = Checkpoint.load(SHIPPED).model.parameters()
    size = sum(manifest.files[name].size for name in ("encoder.weights", "decoder.weights"))
    assert size < 2.2 * sum(parameter.numel() for parameter in parameters), "embeddings thrice, and position tables"
