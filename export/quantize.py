"""Batch-invariant int8: passes over traced graphs for integer products and for caches in 8 bits.

Weights get a scale per output channel. Activations get a scale that does not depend on other rows: a constant one, from the ranges
that `calibration` has measured, or where rows differ too much, one per row. Sums of integers are exact, so a row's bits are
the same in every batch. Token embeddings are stored in 8 bits, too, with a scale per token. Everything between products stays fp32.

Weights are pair-safe. x86 without VNNI multiplies unsigned inputs by signed weights and adds the products of two neighbours
(rows 2i and 2i + 1 of a weight `[K, M]`) in 16 bits (`vpmaddubsw`), which saturate at 255 · 127 · 2. So two neighbouring weights of
the same sign add up to at most `MAX_PAIR`, for which a column may get fewer levels: the fast kernels of every processor are exact.

Caches in 8 bits take a quarter of the memory. A channel of a head has one constant scale, so that a row does not depend on others;
values beyond the calibrated range, with headroom, are clipped. Attention reads the integers itself
(`com.microsoft.GroupQueryAttention`). On the CPU it outputs an integer cache even where it adds nothing to it, so the decode step
has the encoder's keys and values as outputs, too, bound to the same buffers.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir
from numpy.typing import NDArray
from onnx_ir import Graph, Model, Node, Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from dragoman.export.rewriting import Writer, constant_of, only_user
from dragoman.export.tensors import cross_kv_names, output_name

CONTRIB = "com.microsoft"
WEIGHT_LEVELS = 127
ROW_LEVELS = 127
ACTIVATION_LEVELS = 255
# Largest sum of neighbouring weights of one sign whose products with the largest inputs fit into 16 bits.
MAX_PAIR = (2**15 - 1) // ACTIVATION_LEVELS
BLOCK_COLUMNS = 4096  # quantised at once, which bounds memory
# A constant scale leaves room above the calibrated range, of products and of caches: values beyond are clipped.
HEADROOM = 1.1
# Where the range is this many times a usual row's, a constant scale would leave that row too few levels.
MAX_SPREAD = 8.0
SMALLEST_SCALE = 1e-12
TOKEN_TABLES = ("embedding.tokens.weight", "encoder.tokens.weight", "decoder.embedding.weight")

Floats = NDArray[np.float32]
Integers = NDArray[np.int8]
CACHE_LEVELS = 127
# Inputs of MatMulIntegerToFloat, and of GroupQueryAttention.
COLUMN_SCALES, BIAS = 3, 6
NUM_INPUTS = 14
PAST_INPUTS = (3, 4)
Ranges = Mapping[str, NDArray[np.float32]]
"""The largest magnitude that a cache was seen to hold in each channel, `[H, Dh]`, by the cache's name."""


@dataclass(frozen=True, slots=True)
class ActivationRange:
    """Observed range of a product's input."""

    low: float  # smallest value
    high: float  # largest value
    usual: float  # median over rows of a row's largest magnitude

    @property
    def is_even(self) -> bool:
        """Whether rows are alike enough for one constant scale."""
        return max(-self.low, self.high) <= MAX_SPREAD * self.usual

    @property
    def scale_and_zero_point(self) -> tuple[float, int]:
        """Return the constant scale and the level of zero that cover the range with headroom."""
        low, high = HEADROOM * min(self.low, 0.0), HEADROOM * max(self.high, 0.0)
        scale = max((high - low) / ACTIVATION_LEVELS, SMALLEST_SCALE)
        return scale, round(-low / scale)


@dataclass(slots=True)
class ScaleCounts:
    """Number of products by kind of input scale."""

    num_constant: int = 0
    num_row: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """A product with constant weights, and the bias that is added to it."""

    source: Value  # input, `[..., K]`
    weight: Floats  # `[K, M]`
    name: str  # of the weights
    bias: Value | None  # `[M]`, if there is one
    output: Value  # the result, `[..., M]`, bias added

    @property
    def key(self) -> str:
        """A digest of the weights, the same in every graph that has this product."""
        return weight_key(self.weight)


def weight_key(weight: Floats) -> str:
    """Return a digest of weights `[K, M]` and their shape."""
    return hashlib.sha256(repr(weight.shape).encode() + np.ascontiguousarray(weight).tobytes()).hexdigest()


def find_products(graph: Graph) -> list[Product]:
    """Return every product with constant float weights, in the graph's order."""
    return [product for node in graph if (product := _as_product(node)) is not None]


def quantize(model: Model, ranges: Mapping[str, ActivationRange]) -> ScaleCounts:
    """Rewrite a traced graph in place, and count.

    Args:
        model: The encoder, the decode step or the scorer.
        ranges: By `Product.key`; a product without one gets a scale for every row.
    """
    graph = model.graph
    products = find_products(graph)
    graph.opset_imports.setdefault(CONTRIB, 1)
    quantizer = _Quantizer(graph, ranges)
    for product in products:
        quantizer.replace(product)
    for node in list(graph):
        if node.op_type == "Gather":
            _quantize_table(graph, node)
    RemoveUnusedNodesPass()(model)
    _drop_redundant_relus(graph)
    return quantizer.counts


def quantize_columns(weight: Floats) -> tuple[Integers, Floats]:
    """Return weights `[K, M]` as pair-safe integers, and the scale of each column, `[M]`.

    A column has the most levels each way, at most `WEIGHT_LEVELS`, with which no pair of its weights is over `MAX_PAIR`.
    """
    starts = range(0, weight.shape[1], BLOCK_COLUMNS)
    blocks = [_quantize_block(weight[:, start : start + BLOCK_COLUMNS]) for start in starts]
    return np.concatenate([integers for integers, _ in blocks], 1), np.concatenate([scales for _, scales in blocks])


def _quantize_block(weight: Floats) -> tuple[Integers, Floats]:
    peaks = _peaks(weight, 0)
    levels = np.full(weight.shape[1], WEIGHT_LEVELS, np.float32)
    integers = np.empty(weight.shape, np.int8)
    columns = np.arange(weight.shape[1])
    while columns.size:
        integers[:, columns] = _rounded(weight[:, columns], peaks[columns] / levels[columns])
        pairs = _largest_pairs(integers[:, columns])
        columns, pairs = columns[pairs > MAX_PAIR], pairs[pairs > MAX_PAIR]
        # Rounding changes a sum by 1 at most, so that no more levels than the second term can do for this pair.
        levels[columns] = np.minimum(levels[columns] - 1, np.floor(levels[columns] * (MAX_PAIR + 1) / (pairs - 1)))
    return integers, peaks / levels


def _largest_pairs(integers: Integers) -> NDArray[np.int16]:
    """Return the largest magnitude of a sum of neighbouring weights of one sign, `[K, M]` → `[M]`."""
    pairs = np.pad(integers, ((0, len(integers) % 2), (0, 0))).astype(np.int16).reshape(-1, 2, integers.shape[1])
    sums: NDArray[np.int16] = np.stack([pairs.clip(min=0), -pairs.clip(max=0)]).sum(2, dtype=np.int16).max((0, 1))
    return sums


def _peaks(weight: Floats, axis: int) -> Floats:
    peaks: Floats = np.maximum(np.abs(weight).max(axis), SMALLEST_SCALE).astype(np.float32)
    return peaks


def _rounded(weight: Floats, scales: Floats) -> Integers:
    integers: Integers = np.clip(np.rint(weight / scales), -WEIGHT_LEVELS, WEIGHT_LEVELS).astype(np.int8)
    return integers


class _Quantizer:
    """Replaces one product after the other; products of the same input share its quantisation."""

    def __init__(self, graph: Graph, ranges: Mapping[str, ActivationRange]) -> None:
        self.graph = graph
        self.ranges = ranges
        self.counts = ScaleCounts()
        self.constant_inputs: dict[tuple[Value, float, int], Value] = {}
        self.row_inputs: dict[Value, tuple[Value, Value]] = {}

    def replace(self, product: Product) -> None:
        """Write a product's integer form before it, and let it take its place."""
        first = product.output.producer()
        assert first is not None
        writer = Writer(self.graph, first)
        found = self.ranges.get(product.key)
        if found is not None and found.is_even:
            self.counts.num_constant += 1
            result = self._with_constant_scale(writer, product, *found.scale_and_zero_point)
        else:
            self.counts.num_row += 1
            result = self._with_row_scales(writer, product)
        _take_place(product.output, result)

    def _with_constant_scale(self, writer: Writer, product: Product, scale: float, zero_point: int) -> Value:
        """Quantise the input with one scale, saturating, and let the product add the bias."""
        scale_value, zero_value = writer.scalar(scale), writer.scalar(zero_point, np.uint8)
        key = product.source, scale, zero_point
        if key not in self.constant_inputs:
            self.constant_inputs[key] = writer.node("QuantizeLinear", product.source, scale_value, zero_value)
        weight, scales = self._weight(writer, product)
        inputs = self.constant_inputs[key], weight, scale_value, scales, zero_value
        bias = () if product.bias is None else (None, product.bias)
        return writer.node("MatMulIntegerToFloat", *inputs, *bias, domain=CONTRIB)

    def _with_row_scales(self, writer: Writer, product: Product) -> Value:
        """Divide every row by its largest magnitude, quantise that with one scale, and multiply the result by it again."""
        unit, zero = writer.scalar(1 / ROW_LEVELS), writer.scalar(ACTIVATION_LEVELS // 2 + 1, np.uint8)
        if product.source not in self.row_inputs:
            axis = writer.constant("last_axis", np.array([-1], np.int64))
            magnitude = writer.node("ReduceMax", writer.node("Abs", product.source), axis)
            magnitude = writer.node("Max", magnitude, writer.scalar(SMALLEST_SCALE))
            row = writer.node("Div", product.source, magnitude)
            self.row_inputs[product.source] = writer.node("QuantizeLinear", row, unit, zero), magnitude
        row, magnitude = self.row_inputs[product.source]
        weight, scales = self._weight(writer, product)
        result = writer.node("MatMulIntegerToFloat", row, weight, unit, scales, zero, domain=CONTRIB)
        result = writer.node("Mul", result, magnitude)
        return result if product.bias is None else writer.node("Add", result, product.bias)

    def _weight(self, writer: Writer, product: Product) -> tuple[Value, Value]:
        integers, scales = quantize_columns(product.weight)
        return writer.constant(f"{product.name}.int8", integers), writer.constant(f"{product.name}.scale", scales)


def _take_place(old: Value, new: Value) -> None:
    """Let everything read another value, which takes over name and shape where the graph gives it out."""
    is_output, name = old.is_graph_output(), old.name
    onnx_ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if is_output:
        old.name, new.name, new.shape, new.type = None, name, old.shape, old.type


def _as_product(node: Node) -> Product | None:
    """Read a Gemm, or a MatMul and the bias added to it."""
    if node.op_type not in ("Gemm", "MatMul") or node.domain:
        return None
    source, weight = node.inputs[:2]
    assert source is not None and weight is not None
    array = constant_of(weight)
    if array is None or array.ndim != 2:
        return None
    name, output = str(weight.name), node.outputs[0]
    if node.op_type == "Gemm":
        assert node.attributes.get_int("transB", 0) == 1 and node.attributes.get_int("transA", 0) == 0
        return Product(source, array.T, name, node.inputs[2] if len(node.inputs) > 2 else None, output)
    add = only_user(output)
    if add is not None and add.op_type == "Add":
        bias = next((value for value in add.inputs if value is not None and value is not output), None)
        addend = None if bias is None else constant_of(bias)
        if addend is not None and addend.shape == array.shape[1:]:
            return Product(source, array, name, bias, add.outputs[0])
    return Product(source, array, name, None, output)


def _quantize_table(graph: Graph, gather: Node) -> None:
    """Store a table of token embeddings in 8 bits, with a scale per token into which a scalar that follows is folded."""
    table, ids = gather.inputs
    assert table is not None
    if not str(table.name).endswith(TOKEN_TABLES):
        return
    array = constant_of(table)
    assert array is not None
    scales = _peaks(array, 1) / np.float32(WEIGHT_LEVELS)
    integers = _rounded(array, scales[:, None])
    output = gather.outputs[0]
    name = str(table.name)
    multiply = only_user(output)
    if multiply is not None and multiply.op_type == "Mul":
        factor = next(value for value in multiply.inputs if value is not None and value is not output)
        scalar = constant_of(factor)
        if scalar is not None and scalar.size == 1:
            scales, output = scales * scalar.reshape(()), multiply.outputs[0]
            name = f"{name}.times"
    writer = Writer(graph, gather)
    rows = writer.node("Gather", writer.constant(f"{table.name}.int8_rows", integers), ids)
    scale = writer.node("Gather", writer.constant(f"{name}.row_scale", scales[:, None]), ids)
    result = writer.node("Mul", writer.node("Cast", rows, to=int(onnx_ir.DataType.FLOAT)), scale)
    onnx_ir.convenience.replace_all_uses_with(output, result)


def _drop_redundant_relus(graph: Graph) -> None:
    """Take out every ReLU before a quantisation whose lowest level is zero: saturation does the same."""
    for node in list(graph):
        if node.op_type != "Relu":
            continue
        users = [use.node for use in node.outputs[0].uses()]
        zeros = [constant_of(value) for user in users if user.op_type == "QuantizeLinear" and (value := user.inputs[2])]
        if len(zeros) == len(users) and all(zero is not None and zero == 0 for zero in zeros):
            source = node.inputs[0]
            assert source is not None
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], source)
            graph.remove(node, safe=True)


def scales_of(ranges: Ranges, cache: str) -> NDArray[np.float32]:
    """Return what a level of a cache stands for, `[1, H, 1, Dh]`."""
    scales = np.maximum(ranges[cache] * (HEADROOM / CACHE_LEVELS), SMALLEST_SCALE).astype(np.float32)
    return np.ascontiguousarray(scales[None, :, None, :])


def quantize_given_caches(model: Model, ranges: Ranges) -> None:
    """Let an encoder give the keys and values of all layers, `[P, n·H·Dh]`, in 8 bits; rewrites it in place.

    They are multiplied first, by the product's own scales where it has them, and rounded then: ONNX Runtime takes 45 times as long
    to quantise columns that have a scale each (1.31, 256 rows of 6,144, one thread: 29.5 ms instead of 0.65 ms).
    """
    graph = model.graph
    (output,) = graph.outputs
    name = str(output.name)
    writer = Writer(graph, graph[-1])
    names = cross_kv_names(sum(name.startswith("cross_k_") for name in ranges))
    factors = (1 / np.concatenate([scales_of(ranges, name).ravel() for name in names])).astype(np.float32)
    product = output.producer()
    if product is not None and product.op_type == "MatMulIntegerToFloat":
        levels = output
        for place in (COLUMN_SCALES, BIAS):
            _multiply_constant(graph, product, place, factors)
    else:
        levels = _after(graph, "Mul", output, writer.constant(f"{name}.levels", factors))
    result = _after(graph, "QuantizeLinear", levels, writer.scalar(1.0), writer.scalar(0, np.int8))
    result.shape, result.dtype = output.shape, onnx_ir.DataType.INT8
    output.name, result.name = f"{name}.float", name
    graph.outputs[0] = result


def _multiply_constant(graph: Graph, node: Node, place: int, factors: Floats) -> None:
    """Multiply a constant input of a node, if it has this one."""
    old = node.inputs[place] if place < len(node.inputs) else None
    if old is None:
        return
    array = constant_of(old)
    assert array is not None
    node.replace_input_with(place, Writer(graph, node).constant(f"{old.name}.levels", array * factors))
    if not old.uses():
        del graph.initializers[str(old.name)]


def quantize_step_caches(model: Model, ranges: Ranges) -> None:
    """Let a decode step keep its caches in 8 bits; rewrites it in place."""
    graph = model.graph
    given: list[Value] = []
    for node in list(graph):
        if node.op_type != "GroupQueryAttention":
            continue
        past = [node.inputs[place] for place in PAST_INPUTS]
        writer = Writer(graph, node)
        node.resize_inputs(NUM_INPUTS)
        node.resize_outputs(3)
        for i, cache in enumerate(past):
            assert cache is not None and cache.is_graph_input()
            name, present = str(cache.name), node.outputs[1 + i]
            node.replace_input_with(NUM_INPUTS - 2 + i, writer.constant(f"{name}.scale", scales_of(ranges, name)))
            if not present.is_graph_output():
                present.name = output_name(name)
                given.append(present)
            for value in (cache, present):
                value.shape, value.dtype = cache.shape, onnx_ir.DataType.INT8
        for part in "kv":
            node.attributes.add(onnx_ir.AttrString(f"{part}_quant_type", "PER_CHANNEL"))
        node.attributes.add(onnx_ir.AttrInt64("kv_cache_bit_width", 8))
    graph.outputs.extend(given)


def _after(graph: Graph, op_type: str, *inputs: Value) -> Value:
    """Write a node at the end of a graph and return what it gives."""
    node = onnx_ir.node(op_type, inputs)
    first = inputs[0]
    node.name = f"{op_type}_{first.name}"
    node.outputs[0].name = f"{node.name}.out"
    graph.append(node)
    return node.outputs[0]
