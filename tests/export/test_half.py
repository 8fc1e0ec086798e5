"""Half precision: what is halved, how it is stored, and what the gate lets through."""

from pathlib import Path
from typing import Any

import onnx_ir
import onnxruntime
import pytest
import torch

from dragoman.export import verify_half as gate
from dragoman.export.arguments import ExportError, QualityTexts
from dragoman.export.bundle import ENCODER_FILE, Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.half import DTYPES, HalfError, halved
from dragoman.export.parity import ParityError
from dragoman.export.verify_half import WIDENED, verify_half
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import Start, StepDecoder

HALF_TYPES = {"fp16": onnx_ir.DataType.FLOAT16, "bf16": onnx_ir.DataType.BFLOAT16}
SOURCES = [[5, 9, 200, 31], [77], [14, 14, 14, 250, 3, 8, 100]]


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def half_bundle(request: pytest.FixtureRequest, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory = tmp_path_factory.mktemp(request.param) / "bundle"
    return export_checkpoint(checkpoint_dir, directory, request.param)


def test_caches_are_halves_and_logits_are_not(half_bundle: Bundle) -> None:
    half = HALF_TYPES[half_bundle.manifest.precision]
    decoder = onnx_ir.load(half_bundle.decoder_path)
    types = {str(value.name): value.dtype for value in (*decoder.graph.inputs, *decoder.graph.outputs)}
    assert {types[name] for name in types if name.startswith(("self_", "cross_"))} == {half}
    assert types["candidate_log_probs"] == onnx_ir.DataType.FLOAT and types["candidate_ids"] == onnx_ir.DataType.INT64
    single = [node for node in decoder.graph if node.op_type in ("LogSoftmax", "TopK")]
    assert single and all(value.dtype == onnx_ir.DataType.FLOAT for node in single for value in node.inputs[:1] if value)


def test_no_weight_is_stored_in_single_precision_or_twice(half_bundle: Bundle, exported: Path) -> None:
    decoder = onnx_ir.load(half_bundle.decoder_path)
    tables = [value for value in decoder.graph.initializers.values() if value.shape is not None and list(value.shape) == [300, 32]]
    assert len(tables) == 1, "the token table is the output projection"
    for name in ("encoder.weights", "decoder.weights"):
        assert (half_bundle.directory / name).stat().st_size < 0.75 * (exported / name).stat().st_size


def test_the_report_says_what_the_graphs_ran_on(half_bundle: Bundle) -> None:
    parity = half_bundle.manifest.parity
    assert parity.device == ("cpu" if half_bundle.manifest.precision == "fp16" else WIDENED)
    assert parity.num_rows == 24 and parity.num_sentences == 64 and parity.num_pairs == 24
    assert 0 < parity.max_log_prob_difference < parity.tolerance


def test_a_halved_model_computes_embeddings_and_logits_in_single_precision(checkpoint: Checkpoint) -> None:
    for dtype in DTYPES.values():
        half = halved(checkpoint.model, dtype)
        assert half.decoder.embedding.positions.dtype == torch.float32
        assert half.decoder.layers[0].self_residual.norm.weight.dtype == dtype
        hidden = torch.randn(3, 32, dtype=dtype)
        expected = hidden.float() @ half.decoder.output_weight.float().T
        if half.decoder.output_bias is not None:
            expected += half.decoder.output_bias
        torch.testing.assert_close(half.decoder.logits(hidden), expected)
    assert checkpoint.model.decoder.output_weight.dtype == torch.float32, "the original is left as it is"


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 0.02), ("bf16", 0.3)])
def test_a_halved_model_is_close_to_the_original(checkpoint: Checkpoint, precision: str, limit: float) -> None:
    half = halved(checkpoint.model, DTYPES[precision])
    with torch.inference_mode():
        found, expected = (StepDecoder(model, SOURCES, Start()).step(torch.tensor([2, 2, 2])) for model in (half, checkpoint.model))
    difference = (found - expected)[:, 1:].abs().max()
    assert 0 < difference < limit


def test_a_weight_beyond_the_range_is_named(make_checkpoint: Any) -> None:
    model = make_checkpoint(3).model
    with torch.no_grad():
        model.encoder.layers[0].feed_forward.inner.weight[0, 0] = 7e4
    with pytest.raises(HalfError, match=r"encoder\.layers\.0\.feed_forward\.inner\.weight has values beyond 65504.*try bf16"):
        halved(model, torch.float16)
    halved(model, torch.bfloat16)


def test_graphs_of_another_model_do_not_pass(half_bundle: Bundle, make_checkpoint: Any) -> None:
    with pytest.raises(ParityError):
        verify_half(make_checkpoint(4), half_bundle.directory, half_bundle.manifest.precision)


def test_too_many_different_answers_do_not_pass(
    half_bundle: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MIN_AGREEMENT", {"fp16": 1.01, "bf16": 1.01})
    with pytest.raises(ParityError, match=r"of 64 greedy answers differ from those of single precision"):
        verify_half(checkpoint, half_bundle.directory, half_bundle.manifest.precision)


def test_a_loss_of_quality_does_not_pass(half_bundle: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu")
    texts = QualityTexts(["a dog runs", "two cats"], ["ein Hund läuft", "zwei Katzen"])
    monkeypatch.setattr(gate, "MAX_BLEU_LOSS", -1.0)
    with pytest.raises(ParityError, match=r"half precision costs -?0.00 BLEU; -1 is the most that is accepted"):
        verify_half(checkpoint, half_bundle.directory, half_bundle.manifest.precision, texts)


def test_calibration_goes_with_int8_only(checkpoint_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="calibration go with int8, not fp16"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", "fp16", calibration=["a"])


def test_bf16_does_not_load_on_the_cpu_which_is_why_it_is_widened(half_bundle: Bundle) -> None:
    """When this fails, the gate can run bf16 graphs as they are."""
    if half_bundle.manifest.precision != "bf16":
        pytest.skip("only of bf16")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED|implementation|Type"):
        onnxruntime.InferenceSession(half_bundle.directory / ENCODER_FILE, options, providers=["CPUExecutionProvider"])
