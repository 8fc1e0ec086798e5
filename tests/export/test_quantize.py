"""Quantised products are close to what they stand for, saturate, and keep rows apart."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from numpy.typing import NDArray
from onnx_ir import Graph, Model, Value

from dragoman.export.processor import overflows_in_8_bits
from dragoman.export.quantize import (
    ACTIVATION_LEVELS,
    HEADROOM,
    MAX_SPREAD,
    WEIGHT_LEVELS,
    ActivationRange,
    Floats,
    find_products,
    quantize,
    quantize_columns,
)
from dragoman.export.rewriting import constant_of
from dragoman.export.session import PRECISION_OPTION, Session, open_session
from dragoman.export.tracing import write

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
    """Run a graph as the server would, in both ways to multiply 8-bit numbers where both are right."""
    is_precise = request.param == "precise"
    if not is_precise and overflows_in_8_bits():
        pytest.skip("the fast products of this processor may overflow, so that it is never served with them")

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


def test_weights_are_rounded_to_the_nearest_level_of_their_column() -> None:
    weight = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32) * np.logspace(-6, 3, 8, dtype=np.float32)
    integers, scales = quantize_columns(weight)
    assert integers.dtype == np.int8 and np.abs(integers.astype(int)).max(0).tolist() == [127] * 8
    assert (np.abs(integers * scales - weight) <= 0.5001 * scales).all()
    integers, scales = quantize_columns(np.zeros((4, 3), np.float32))
    assert not integers.any() and np.isfinite(scales).all() and (scales > 0).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_weights_of_7_bits_do_not_overflow_where_pairs_are_summed_in_16_bits(num_threads: int, tmp_path: Path) -> None:
    """On every processor the fast products are exact, also where all inputs are as large as they can be."""
    levels = WEIGHT_LEVELS[7]
    assert 2 * ACTIVATION_LEVELS * levels < 2**15 <= 2 * ACTIVATION_LEVELS * WEIGHT_LEVELS[8]
    model = network()
    quantize(model, {product.key: ActivationRange(0.0, 1.0, 1.0) for product in find_products(model.graph)}, 7)
    weights = [node.inputs[1] for node in model.graph if node.op_type == "MatMulIntegerToFloat"]
    assert [np.abs(constant_of(weight).astype(int)).max(0).tolist() for weight in weights if weight is not None] == [
        [levels] * HIDDEN,
        [levels] * WIDTH,
    ]
    write(model, tmp_path / "graph.onnx", "graph.weights")
    rows = np.full((5, WIDTH), 1e3, np.float32)
    fast, precise = (
        open_session(tmp_path / "graph.onnx", num_threads, is_precise=is_precise).run(None, {"x": rows})[0]
        for is_precise in (False, True)
    )
    scale, expected = np.float32(HEADROOM / ACTIVATION_LEVELS), np.full(WIDTH, ACTIVATION_LEVELS, np.int64)
    for weight, bias in ((FIRST, BIAS), (SECOND, None)):
        integers, scales = quantize_columns(weight.T, levels)
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


def is_precise_session(session: Session) -> bool:
    """Tell whether a session was opened with the option; ONNX Runtime raises where it was not given."""
    try:
        return str(session.get_session_options().get_session_config_entry(PRECISION_OPTION)) == "1"
    except RuntimeError:
        return False


@pytest.mark.parametrize("may_overflow", [False, True])
def test_products_are_computed_the_way_that_is_right_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_overflow: bool
) -> None:
    write(network(), tmp_path / "graph.onnx", "graph.weights")
    monkeypatch.setattr("dragoman.export.session.overflows_in_8_bits", lambda: may_overflow)
    assert is_precise_session(open_session(tmp_path / "graph.onnx", 1)) is may_overflow
    for is_precise in (False, True):
        session = open_session(tmp_path / "graph.onnx", 1, is_precise=is_precise)
        assert is_precise_session(session) is is_precise, "who asks for one way gets it"
