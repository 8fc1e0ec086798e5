"""Every family's network in 8 and in 16 bits, through the gates of these."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from dragoman.export.cache_quantize import quantize_given_caches, quantize_step_caches
from dragoman.export.calibration import calibrate
from dragoman.export.cpu import keep_sums_apart, keep_time_axis
from dragoman.export.graphs.transformer_encoder import EncoderGraph
from dragoman.export.graphs.transformer_scorer import ScorerGraph
from dragoman.export.graphs.transformer_step import StepGraph
from dragoman.export.half import DTYPES, halved, store_halved
from dragoman.export.quality import verify_quantized
from dragoman.export.quantize import ScaleCounts, quantize
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import trace
from dragoman.export.verify_half import verify_half
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.families import FAMILIES, random_pair

KINDS = ["marian", "bart-gelu-new", "mbart", "t5", "t5-v1.1", "t5-gated-silu", "umt5"]


def traced(model: Transformer, is_packed: bool = True) -> list[onnx.ModelProto]:
    return [trace(module) for module in (EncoderGraph(model, is_packed), StepGraph(model), ScorerGraph(model, is_packed))]


def written(graphs: list[onnx.ModelProto], directory: Path) -> Path:
    write_graphs(graphs, directory)
    return directory


def checkpoint_of(family: str, tokenizers: Tokenizers) -> Checkpoint:
    assert family in FAMILIES
    return Checkpoint(family, random_pair(family, scale=0.08)[1], tokenizers)


@pytest.mark.parametrize("has_caches", [False, True], ids=["", "and caches"])
@pytest.mark.parametrize("is_calibrated", [False, True], ids=["a scale a row", "calibrated"])
@pytest.mark.parametrize("family", KINDS)
def test_8_bits_pass_their_gate(family: str, is_calibrated: bool, has_caches: bool, tokenizers: Tokenizers, tmp_path: Path) -> None:
    """Rows keep their bits in every batch, and answers stay close: with constant scales, one for every row, and 8-bit caches."""
    checkpoint = checkpoint_of(family, tokenizers)
    sources = [[5, 6, 7], [9] * 12, [20, 21], *np.random.default_rng(0).integers(3, 250, (12, 9)).tolist()]
    calibration = calibrate(checkpoint.model, sources, 8)
    ranges = calibration.inputs if is_calibrated else {}
    graphs = traced(checkpoint.model)
    for graph in graphs:
        keep_sums_apart(graph)
    encoder, decoder, _ = [quantize(graph, ranges) for graph in graphs]
    keep_time_axis(graphs[1])
    if has_caches:
        quantize_given_caches(graphs[0], calibration.caches)
        quantize_step_caches(graphs[1], calibration.caches)
    counts = ScaleCounts(encoder.num_constant + decoder.num_constant, encoder.num_row + decoder.num_row)
    assert (counts.num_constant > 0) == is_calibrated
    num_products = 1 + 3 * (4 + checkpoint.model.config.is_ffn_gated) + 2 * (6 + checkpoint.model.config.is_ffn_gated)
    assert counts.num_constant + counts.num_row >= num_products, "every product with weights, gates included"
    assert not [node for node in graphs[1].graph if node.op_type in ("MatMul", "Gemm")]
    quality = verify_quantized(checkpoint, written(graphs, tmp_path), counts)
    assert 0 < quality.mean_divergence < 0.05 and quality.agreement > 0.8


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", KINDS)
def test_16_bits_pass_their_gate(family: str, precision: str, tokenizers: Tokenizers, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tokenizers)
    graphs = traced(halved(checkpoint.model, DTYPES[precision]), is_packed=False)
    for graph in graphs:
        store_halved(graph, DTYPES[precision])
    report = verify_half(checkpoint, written(graphs, tmp_path), precision)
    assert report.max_log_prob_difference < 0.05


def test_what_would_overflow_a_half_stays_single(tokenizers: Tokenizers, tmp_path: Path) -> None:
    """The residual stream of large T5s, and what feed-forward layers add to it, are beyond the largest half."""
    checkpoint = checkpoint_of("t5-v1.1", tokenizers)
    model = checkpoint.model
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
    graphs = traced(half, is_packed=False)
    for graph in graphs:
        store_halved(graph, torch.float16)
    verify_half(checkpoint, written(graphs, tmp_path), "fp16")
