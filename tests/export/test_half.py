"""Half precision: tensors that are halved, how they are stored, and the gate of fp16 and bf16 bundles."""

from pathlib import Path

import onnx
import onnx_ir
import pytest
import torch

from dragoman.export.arguments import QualityTexts
from dragoman.export.bundle import Bundle
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.half import DTYPES, HalfError, halved, store_halved
from dragoman.export.proof import quality as gate
from dragoman.export.proof.report import ParityError, ParityReport
from dragoman.export.proof.sessions import WIDENED
from dragoman.export.proof.verify import verify
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import Start, StepDecoder
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.tokenizers import Tokenizers
from tests.export.conftest import Export, MakeCheckpoint
from tests.model.families import random_pair

HALF_TYPES = {"fp16": onnx_ir.DataType.FLOAT16, "bf16": onnx_ir.DataType.BFLOAT16}
SOURCES = [[5, 9, 200, 31], [77], [14, 14, 14, 250, 3, 8, 100]]


@pytest.fixture(params=["fp16", "bf16"])
def half_bundle(request: pytest.FixtureRequest, export: Export) -> Bundle:
    return export("tiny", request.param)


def test_weights_and_caches_are_halves_and_logits_are_not(half_bundle: Bundle, exported: Path) -> None:
    half, parity = HALF_TYPES[half_bundle.manifest.precision], half_bundle.manifest.parity
    assert parity.device == ("cpu" if half_bundle.manifest.precision == "fp16" else WIDENED)
    assert (parity.num_rows, parity.num_sentences, parity.num_pairs) == (24, 64, 24)
    assert 0 < parity.max_log_prob_difference < parity.tolerance
    decoder = onnx_ir.load(half_bundle.decoder_path)
    types = {str(value.name): value.dtype for value in (*decoder.graph.inputs, *decoder.graph.outputs)}
    assert {types[name] for name in types if name.startswith(("self_", "cross_"))} == {half}
    assert types["candidate_log_probs"] == onnx_ir.DataType.FLOAT and types["candidate_ids"] == onnx_ir.DataType.INT64
    single = [node for node in decoder.graph if node.op_type in ("LogSoftmax", "TopK")]
    assert single and all(value.dtype == onnx_ir.DataType.FLOAT for node in single for value in node.inputs[:1] if value)
    tables = [value for value in decoder.graph.initializers.values() if value.shape is not None and list(value.shape) == [300, 32]]
    assert len(tables) == 1, "the token table is the output projection"
    for name in ("encoder.weights", "decoder.weights"):
        assert (half_bundle.directory / name).stat().st_size < 0.75 * (exported / name).stat().st_size


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 0.02), ("bf16", 0.3)])
def test_halved_model_is_close_and_computes_embeddings_and_logits_in_single_precision(
    checkpoint: Checkpoint, precision: str, limit: float
) -> None:
    dtype = DTYPES[precision]
    half = halved(checkpoint.model, dtype)  # type: ignore[arg-type]
    assert half.decoder.embedding.positions.dtype == torch.float32
    assert half.decoder.layers[0].self_residual.norm.weight.dtype == dtype
    hidden = torch.randn(3, 32, dtype=dtype)
    torch.testing.assert_close(half.decoder.logits(hidden), hidden.float() @ half.decoder.output_weight.float().T)
    assert checkpoint.model.decoder.output_weight.dtype == torch.float32, "the original is left as it is"
    with torch.inference_mode():
        found, expected = (StepDecoder(model, SOURCES, Start()).step(torch.tensor([2, 2, 2])) for model in (half, checkpoint.model))
    assert 0 < (found - expected)[:, 1:].abs().max() < limit


def test_weight_beyond_the_range_is_named(make_checkpoint: MakeCheckpoint) -> None:
    model = make_checkpoint(3).model
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.encoder.layers[0].feed_forward.inner.weight[0, 0] = 7e4
    with pytest.raises(HalfError, match=r"encoder\.layers\.0\.feed_forward\.inner\.weight has values beyond 65504.*try bf16"):
        halved(model, torch.float16)
    halved(model, torch.bfloat16)


def test_other_graphs_other_answers_and_a_loss_of_quality_do_not_pass(
    half_bundle: Bundle, checkpoint: Checkpoint, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, precision = half_bundle.directory, half_bundle.manifest.precision
    with pytest.raises(ParityError, match="log-probabilities are off"):
        verify(make_checkpoint(4), directory, precision)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "MIN_HALF_AGREEMENT", {"fp16": 1.01, "bf16": 1.01})
        with pytest.raises(ParityError, match=r"of 64 greedy answers differ from those of single precision"):
            verify(checkpoint, directory, precision)
    pytest.importorskip("sacrebleu")
    texts = QualityTexts(["a dog runs", "two cats"], ["ein Hund läuft", "zwei Katzen"])
    monkeypatch.setattr(gate, "MAX_BLEU_LOSS", -1.0)
    with pytest.raises(ParityError, match=r"half precision costs -?0.00 BLEU; -1 is the most that is accepted"):
        verify(checkpoint, directory, precision, texts)


def verified(checkpoint: Checkpoint, half: Transformer, precision: str, directory: Path) -> ParityReport:
    """Write the graphs of a halved model and pass them through the gate."""
    graphs: list[onnx.ModelProto] = [trace(x) for x in (EncoderGraph(half, False), StepGraph(half), ScorerGraph(half, False))]
    for graph in graphs:
        store_halved(graph, DTYPES[precision])
    write_graphs(graphs, directory)
    return verify(checkpoint, directory, precision)


@pytest.mark.parametrize(
    ("family", "precision"), [("marian", "fp16"), ("bart-gelu-new", "bf16"), ("t5-gated-silu", "bf16"), ("umt5", "fp16")]
)
def test_families_pass_the_gate(family: str, precision: str, tokenizers: Tokenizers, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, model := random_pair(family, scale=0.08)[1], tokenizers)
    report = verified(checkpoint, halved(model, DTYPES[precision]), precision, tmp_path)
    assert report.max_log_prob_difference < 0.05


def test_products_that_would_overflow_a_half_stay_single(tokenizers: Tokenizers, tmp_path: Path) -> None:
    """The residual stream of large T5s, and what feed-forward layers add to it, are beyond the largest half."""
    model = random_pair("t5-v1.1", scale=0.08)[1]
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.feed_forward.outer.weight.data *= 1e6
    half = halved(model, torch.float16)
    assert half.encoder.layers[0].feed_forward.outer.weight.dtype == torch.float32
    assert half.encoder.layers[0].feed_forward.inner.weight.dtype == torch.float16
    seen: list[torch.Tensor] = []
    handle = half.decoder.layers[-1].register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        source, lengths, target = torch.tensor([[7, 8, 1]]), torch.tensor([3]), torch.tensor([[0, 9, 4]])
        found, expected = (x(source, lengths, target).log_softmax(-1) for x in (half, model))
    handle.remove()
    assert float(seen[0].abs().max()) > torch.finfo(torch.float16).max, "the model is one that overflows"
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    verified(Checkpoint("t5-v1.1", model, tokenizers), half, "fp16", tmp_path)
