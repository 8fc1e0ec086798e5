"""Quantised products are close to single precision, saturate, and keep rows apart; calibration; caches in 8 bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from onnx_ir import Graph, Model, Value

from dragoman.export.calibration import calibrate, calibration_sources
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.quantize import (
    ACTIVATION_LEVELS,
    CACHE_LEVELS,
    HEADROOM,
    MAX_SPREAD,
    SMALLEST_SCALE,
    ActivationRange,
    Floats,
    find_products,
    quantize,
    quantize_columns,
    quantize_given_caches,
    scales_of,
)
from dragoman.export.session import PRECISION_OPTION, open_session
from dragoman.export.tensors import cross_kv_names, pack
from dragoman.export.tracing import trace, write
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.errors import InputError
from tests.export.conftest import Export, MakeCheckpoint

WIDTH, HIDDEN = 24, 40
FIRST, SECOND = (
    np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed, shape in ((1, (40, 24)), (2, (24, 40)))
)
BIAS = np.linspace(-3, 3, HIDDEN, dtype=np.float32)
EVEN = ActivationRange(-5.0, 5.0, 3.0)
POSITIVE = ActivationRange(0.0, 40.0, 20.0)
WILD = ActivationRange(-5.0, MAX_SPREAD * 3.0 + 1, 3.0)


def constant(name: str, array: Floats) -> Value:
    tensor = onnx_ir.tensor(array, name=name)
    return Value(name=name, const_value=tensor, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype))


def network() -> Model:
    """Make relu(x·A + b)·B, the first product as Gemm has it and the second as MatMul."""
    x = Value(name="x", shape=onnx_ir.Shape(["N", WIDTH]), type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))
    weights = [constant("a", FIRST), constant("b", BIAS), constant("c", np.ascontiguousarray(SECOND.T))]
    gemm = onnx_ir.node("Gemm", [x, weights[0], weights[1]], {"transB": 1})
    relu = onnx_ir.node("Relu", [gemm.outputs[0]])
    matmul = onnx_ir.node("MatMul", [relu.outputs[0], weights[2]])
    y = matmul.outputs[0]
    y.name, y.shape, y.type = "y", onnx_ir.Shape(["N", WIDTH]), onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    graph = Graph([x], [y], nodes=[gemm, relu, matmul], initializers=weights, opset_imports={"": 20}, name="main")
    return Model(graph, ir_version=10)


Run = Callable[..., NDArray[np.float32]]


@pytest.fixture(params=["precise", "fast"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a graph in both ways to multiply 8-bit numbers."""
    is_precise = request.param == "precise"

    def run_graph(model: Model, rows: Floats, num_threads: int = 1) -> NDArray[np.float32]:
        write(model, tmp_path / "graph.onnx", "graph.weights")
        session = open_session(tmp_path / "graph.onnx", num_threads, is_precise=is_precise)
        result: NDArray[np.float32] = session.run(None, {"x": rows})[0]
        return result

    return run_graph


def quantized(first: ActivationRange | None, second: ActivationRange | None) -> Model:
    model = network()
    ranges = zip(find_products(model.graph), (first, second), strict=True)
    quantize(model, {product.key: found for product, found in ranges if found is not None})
    return model


def operators(model: Model) -> list[str]:
    return [node.op_type for node in model.graph]


COLUMNS = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-20, 1e20])),
)


@given(COLUMNS)
def test_weights_are_rounded_to_the_most_levels_whose_pairs_fit_into_16_bits(weight: Floats) -> None:
    integers, scales = quantize_columns(weight)
    assert integers.dtype == np.int8 and np.isfinite(scales).all() and (scales > 0).all()
    assert (np.abs(integers * scales - weight) <= 0.5001 * scales).all()
    for column, scale in zip(weight.T, scales, strict=True):
        peak = np.abs(column).max()
        if peak >= SMALLEST_SCALE:
            most = next(levels for levels in range(127, 0, -1) if fits(np.rint(column / (peak / np.float32(levels)))))
            assert round(peak / scale) == most >= 64


def fits(integers: Floats) -> bool:
    """Tell whether no sum of neighbouring products with any inputs from 0 to 255 is beyond 16 bits."""
    pairs = [integers[place : place + 2] for place in range(0, len(integers), 2)]
    return all(255 * pair[pair > 0].sum() < 2**15 and 255 * pair[pair < 0].sum() >= -(2**15) for pair in pairs)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_fast_products_are_exact_on_every_processor(num_threads: int, tmp_path: Path) -> None:
    """Also where all inputs are as large as they can be, and pairs are summed in 16 bits."""
    model = network()
    quantize(model, {product.key: ActivationRange(0.0, 1.0, 1.0) for product in find_products(model.graph)})
    write(model, tmp_path / "graph.onnx", "graph.weights")
    rows = np.full((5, WIDTH), 1e3, np.float32)
    fast, precise = (
        open_session(tmp_path / "graph.onnx", num_threads, is_precise=is_precise).run(None, {"x": rows})[0]
        for is_precise in (False, True)
    )
    scale, expected = np.float32(HEADROOM / ACTIVATION_LEVELS), np.full(WIDTH, ACTIVATION_LEVELS, np.int64)
    for weight, bias in ((FIRST, BIAS), (SECOND, None)):
        integers, scales = quantize_columns(weight.T)
        product = (expected @ integers.astype(np.int64)) * (scale * scales)
        expected = product if bias is None else np.clip(np.rint((product + bias) / scale), 0, ACTIVATION_LEVELS).astype(np.int64)
    assert np.array_equal(fast, precise)
    assert np.abs(fast - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("found", [EVEN, POSITIVE, ActivationRange(-0.2, 9.0, 3.0), ActivationRange(0.0, 0.0, 0.0)])
def test_levels_cover_the_range_with_headroom_and_have_an_exact_zero(found: ActivationRange) -> None:
    scale, zero_point = found.scale_and_zero_point
    assert 0 <= zero_point <= 255
    half = 0.5001 * scale
    assert -zero_point * scale <= HEADROOM * found.low + half and (255 - zero_point) * scale >= HEADROOM * found.high - half


@pytest.mark.parametrize("first", [EVEN, WILD, None], ids=["constant", "wild", "none"])
@pytest.mark.parametrize("second", [POSITIVE, None], ids=["constant", "none"])
def test_result_is_close_to_single_precision(run: Run, first: ActivationRange | None, second: ActivationRange | None) -> None:
    rows = np.random.default_rng(3).standard_normal((50, WIDTH)).astype(np.float32)
    expected = np.maximum(rows @ FIRST.T + BIAS, 0) @ SECOND.T
    found = run(quantized(first, second), rows)
    assert np.abs(found - expected).max() < 0.04 * np.abs(expected).max()
    assert np.abs(found - expected).max() > 0, "something was quantised"


def test_constant_scales_need_two_nodes_a_product_and_uneven_input_gets_a_scale_for_every_row() -> None:
    assert operators(quantized(EVEN, POSITIVE)) == ["QuantizeLinear", "MatMulIntegerToFloat"] * 2
    assert "Relu" in operators(quantized(EVEN, None))
    model = network()
    counts = quantize(model, {product.key: one for product, one in zip(find_products(model.graph), (WILD, POSITIVE), strict=True)})
    assert (counts.num_constant, counts.num_row) == (1, 1)
    assert operators(model).count("ReduceMax") == 1 and operators(model).count("MatMulIntegerToFloat") == 2


@pytest.mark.parametrize("first", [EVEN, None], ids=["constant", "row"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_row_has_the_same_bits_in_every_company(run: Run, first: ActivationRange | None, num_threads: int) -> None:
    random = np.random.default_rng(4)
    model = quantized(first, POSITIVE if first else None)
    rows = random.standard_normal((70, WIDTH)).astype(np.float32)
    together = run(model, rows)
    for _ in range(12):
        chosen = random.permutation(70)[: random.integers(1, 70)]
        company = rows * 1000.0
        company[chosen] = rows[chosen]
        order = random.permutation(70)
        assert np.array_equal(
            run(model, company[order], num_threads)[np.isin(order, chosen)], together[order[np.isin(order, chosen)]]
        )
        assert np.array_equal(run(model, rows[chosen], num_threads), together[chosen])


def test_values_beyond_the_range_saturate_and_results_are_finite(run: Run) -> None:
    model = quantized(EVEN, POSITIVE)
    rows = np.array([[sign * np.float32(10 * EVEN.high)] * WIDTH for sign in (-1, 1)], np.float32)
    for factor in (1000, 1 / 8):
        assert np.array_equal(run(model, rows), run(model, np.float32(factor) * rows))
    for value in (0.0, 1e-30, 1e30):
        assert np.isfinite(run(quantized(None, None), np.array([[value], [1.0]], np.float32).repeat(WIDTH, 1))).all()


def test_extreme_levels_do_not_overflow_between_two_products(run: Run) -> None:
    """Processors without VNNI add two 8-bit products in 16 bits, which the largest levels overflow unless told otherwise."""
    model = network()
    weights = {"a": np.ones_like(FIRST), "c": np.ones_like(SECOND.T)}
    for name, array in weights.items():
        model.graph.initializers[name].const_value = onnx_ir.tensor(np.ascontiguousarray(array), name=name)
    keys = [product.key for product in find_products(model.graph)]
    quantize(model, dict(zip(keys, (EVEN, ActivationRange(0.0, 200.0, 100.0)), strict=True)))
    found = run(model, np.full((3, WIDTH), 5.0, np.float32))
    expected = np.maximum(5.0 * WIDTH + BIAS, 0).sum()
    assert np.abs(found / expected - 1).max() < 0.01


def test_precise_products_are_an_option_of_the_session(tmp_path: Path) -> None:
    write(network(), tmp_path / "graph.onnx", "graph.weights")
    fast, precise = (open_session(tmp_path / "graph.onnx", 1, is_precise=is_precise) for is_precise in (False, True))
    assert precise.get_session_options().get_session_config_entry(PRECISION_OPTION) == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        fast.get_session_options().get_session_config_entry(PRECISION_OPTION)


@pytest.mark.parametrize(
    "switches",
    [{}, {"norm": "pre", "activation": "gelu", "is_embedding_shared": False, "is_projection_tied": False, "has_output_bias": True}],
    ids=["paper", "pre-norm, nothing shared"],
)
def test_every_product_of_every_graph_has_a_range(make_checkpoint: MakeCheckpoint, switches: dict[str, object]) -> None:
    model = make_checkpoint(**switches).model
    ranges = calibrate(model, [[5, 6, 7], [8]], 6).inputs
    for graph in (EncoderGraph, StepGraph, ScorerGraph):
        products = find_products(trace(graph(model)).graph)
        assert len(products) > 8
        assert {product.key for product in products} <= ranges.keys()


def test_ranges_hold_what_was_seen(checkpoint: Checkpoint) -> None:
    narrow = calibrate(checkpoint.model, [[5, 6, 7]], 6).inputs
    wide = calibrate(checkpoint.model, [[5, 6, 7], list(range(20, 40)), [9]], 6).inputs
    assert narrow.keys() == wide.keys()
    for key, found in narrow.items():
        assert wide[key].low <= found.low <= 0 <= found.high <= wide[key].high
        assert 0 < found.usual <= max(-found.low, found.high)
    assert any(found.low == 0 for found in narrow.values()), "what a ReLU gives is not negative"
    assert any(found.low < 0 for found in narrow.values())


def test_sources_may_be_as_long_as_the_model_takes_and_not_longer(checkpoint: Checkpoint) -> None:
    assert calibrate(checkpoint.model, [[5] * (checkpoint.model.config.max_source_positions - 1)], 1000).inputs
    for texts, reason in ((["a dog", "a dog " * 30], r"line 2: .* the model takes 24"), ([], "nothing to calibrate with")):
        with pytest.raises(InputError, match=reason):
            calibration_sources(checkpoint.tokenizers.source, texts, 24)


SOURCES = [[5, 6, 7], [9] * 12, [20, 21, 80, 4]]


def encoded(encoder: Path) -> NDArray[np.number[Any]]:
    """Return what an encoder gives of the sources' tokens, `[P, n·H·Dh]`."""
    (tokens,) = open_session(encoder, 1).run(None, pack([[*ids, 1] for ids in SOURCES]))
    return tokens


def test_encoder_gives_the_nearest_level_of_the_calibrated_range_and_clips(checkpoint, exported: Path, tmp_path: Path) -> None:
    seen, names, expected = calibrate(checkpoint.model, SOURCES, 6).caches, cross_kv_names(2), encoded(exported / "encoder.onnx")
    for name, columns in zip(names, np.split(np.abs(expected), len(names), axis=1), strict=True):
        np.testing.assert_allclose(seen[name].ravel(), columns.max(0), rtol=1e-4, atol=1e-5)
    assert {f"self_{part}_{layer}" for part in "kv" for layer in range(2)} == seen.keys() - set(names)
    ranges = {name: found / 2 for name, found in seen.items()}
    graph = trace(EncoderGraph(checkpoint.model))
    quantize_given_caches(graph, ranges)
    write(graph, tmp_path / "encoder.onnx", "encoder.weights")
    found = encoded(tmp_path / "encoder.onnx")
    assert found.dtype == np.int8 and found.shape == expected.shape
    levels = expected / np.concatenate([scales_of(ranges, name).ravel() for name in names])
    is_inside = np.abs(levels) <= CACHE_LEVELS
    assert np.abs(found - levels)[is_inside].max() <= 0.501
    assert (np.abs(found.astype(int))[~is_inside] >= CACHE_LEVELS).all() and (np.sign(found) == np.sign(levels))[~is_inside].all()
    assert not is_inside.all(), "half of the range is not enough for everything"


def test_scales_leave_headroom_and_are_never_zero() -> None:
    scales = scales_of({"x": np.array([[1.0, 0.0], [2.0, 4.0]], np.float32)}, "x")
    assert scales.shape == (1, 2, 1, 2) and (scales > 0).all()
    assert scales[0, 1, 0, 1] == pytest.approx(HEADROOM * 4 / CACHE_LEVELS)


def test_manifest_has_the_bits_of_caches_and_weights(export: Export, exported: Path) -> None:
    manifest = export("tiny", "int8").manifest
    assert {cache.precision for cache in manifest.caches} == {"int8"}
    assert [cache.role for cache in manifest.caches] == ["self"] * 4 + ["cross"] * 4
    assert manifest.tensors.encoder_outputs == ["cross_kv"]
    assert manifest.tensors.decoder_outputs[-5:-1] == ["cross_k_0_out", "cross_v_0_out", "cross_k_1_out", "cross_v_1_out"]
    assert (manifest.weight_bits, manifest.cache_precision, manifest.can_overflow) == (8, "int8", False)
    assert manifest.parity.quality is not None and manifest.parity.quality.agreement > 0.8
    manifest = export("tiny", "int8", cache_precision="fp32").manifest
    assert manifest.cache_precision == "fp32", "the number format of what lies between products"
    assert manifest.parity.quality is not None and manifest.parity.quality.mean_scorer_difference < 0.01, "no cache is rounded"
    assert manifest.is_pair_safe and {cache.precision for cache in manifest.caches} == {None}
    older = msgspec.structs.replace(manifest, is_pair_safe=False)
    assert older.can_overflow and not msgspec.structs.replace(older, weight_bits=7).can_overflow
    assert not export().manifest.can_overflow and not export().manifest.is_pair_safe
