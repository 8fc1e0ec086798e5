"""Requirements of CUDA's kernel of GroupQueryAttention beyond the operator's schema and the CPU's kernel.

A node that breaks one of these rules loads without a word, and then fails when it is run, or goes to the CPU, with copies to and
fro. So export and loading ask here, for every such node of a bundle that is made for CUDA. The rules are those of ONNX Runtime 1.31
(`contrib_ops/cuda/bert/group_query_attention.cc` and the checks of inputs that it shares with the CPU); docs/deploy.md says more.

The server imports this file, so it imports neither torch nor ONNX.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dragoman.export.fields import BundleError
from dragoman.export.graph_file import BFLOAT16, FLOAT16, INT32, GraphFile, NodeInfo, TensorInfo

OPERATOR, DOMAIN = "GroupQueryAttention", "com.microsoft"
MAX_HEADS = 1024
"""Threads of a block, on every device there is; a head has one in some kernels."""

INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"),
    *("position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight"),
)
"""The operator's names of a node's inputs, in their order."""
_OUTPUTS = ("output", "present_key", "present_value", "output_qk")
_NOTHING = TensorInfo()


class Attention:
    """One node; its inputs and outputs by the operator's names for them.

    Attributes:
        name: Of the node.
    """

    def __init__(self, node: NodeInfo, tensors: Mapping[str, TensorInfo]) -> None:
        """Take a node and what is known of its graph's tensors."""
        names = [*zip(INPUTS, node.inputs, strict=False), *zip(_OUTPUTS, node.outputs, strict=False)]
        self._names = {place: name for place, name in names if name}
        self.name = node.name
        self._node, self._tensors = node, tensors

    def has(self, *places: str) -> bool:
        """Tell whether the node has all of these."""
        return all(place in self._names for place in places)

    def has_any(self, *places: str) -> bool:
        """Tell whether it has one of these."""
        return any(place in self._names for place in places)

    def info(self, place: str) -> TensorInfo:
        """Return what is known of one of them."""
        return self._tensors.get(self._names.get(place, ""), _NOTHING)

    def size(self, place: str, axis: int) -> int | None:
        """Return a size that the file says as a number."""
        shape = self.info(place).shape
        size = shape[axis] if shape is not None and axis < len(shape) else None
        return size if isinstance(size, int) else None

    def number(self, name: str, usual: int = 0) -> float:
        """Return an attribute."""
        value = self._node.attributes.get(name, usual)
        return value if isinstance(value, int | float) else usual

    def whole_number(self, name: str) -> int:
        """Return an attribute that must be a whole number; 0 where it is none."""
        value = self._node.attributes.get(name)
        return value if isinstance(value, int) else 0

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return self.whole_number("num_heads")

    @property
    def num_kv_heads(self) -> int:
        """Of keys and values."""
        return self.whole_number("kv_num_heads")

    @property
    def head_size(self) -> int | None:
        """Width of a head, as the kernel works it out; None where the query's width is not said, or cannot be divided."""
        width = self.size("query", 2)
        parts = self.num_heads if self.has("key") else self.num_heads + 2 * self.num_kv_heads
        return None if width is None or parts < 1 else width // parts

    @property
    def is_borrowing(self) -> bool:
        """Whether nothing is added to a cache, which is another's: so cross-attention reads what the encoder gave."""
        return self.has("key", "value", "past_key", "past_value") and self.size("key", 1) == self.size("value", 1) == 0


Rule = Callable[[Attention], str]
"""Returns what is wrong with a node, or nothing."""


def _halves(node: Attention) -> str:
    """Say no to single precision, which has no kernel there: the node would go to the CPU, without an error."""
    return "" if node.info("query").dtype in (FLOAT16, BFLOAT16) else "its query is neither float16 nor bfloat16"


def _heads(node: Attention) -> str:
    if not (0 < node.num_kv_heads <= node.num_heads <= MAX_HEADS) or node.num_heads % node.num_kv_heads:
        return f"{node.num_heads} heads of queries do not go with {node.num_kv_heads} of keys"
    return ""


def _head_size(node: Attention) -> str:
    size = node.head_size
    return f"heads of {size} numbers, which is no multiple of 8" if size is not None and (size < 8 or size % 8) else ""


def _lengths(node: Attention) -> str:
    for place in ("seqlens_k", "total_sequence_length"):
        if not node.has(place) or node.info(place).dtype != INT32:
            return f"its {place} is not of 32-bit integers"
    return ""


def _pairs(node: Attention) -> str:
    for pair in (("key", "value"), ("past_key", "past_value"), ("cos_cache", "sin_cache"), ("q_norm_weight", "k_norm_weight")):
        if node.has_any(*pair) and not node.has(*pair):
            return f"it has only one of {' and '.join(pair)}"
    return ""


def _presents(node: Attention) -> str:
    """Ask for both caches as outputs, which the CPU's kernel does without."""
    if node.has("present_key", "present_value"):
        return ""
    if node.is_borrowing and not node.has_any("present_key", "present_value"):
        return ""
    return "it lacks present_key and present_value, which are needed unless a cache is read that gets nothing new"


def _one_query(node: Attention) -> str:
    if node.has("past_key") and node.size("query", 1) != 1:
        return "it has a past and more than one query a row, which works for one row only"
    return ""


def _caches(node: Attention) -> str:
    for place in ("past_key", "past_value"):
        if not node.has(place):
            continue
        num_heads, size = node.size(place, 1), node.size(place, 3)
        if num_heads not in (None, node.num_kv_heads) or not (size is None or node.head_size in (None, size)):
            return f"its {place} is not made of {node.num_kv_heads} heads of {node.head_size} numbers"
        if node.info(place).dtype != node.info("query").dtype:
            return f"its {place} has another type than its query, and what quantised caches need is not checked here"
    return ""


def _bias(node: Attention) -> str:
    """Ask what the kernel of last resort asks, which alone adds something to scores: it knows no sinks and no quantised caches."""
    if not node.has("attention_bias"):
        return ""
    if node.info("attention_bias").dtype != node.info("query").dtype:
        return "its attention_bias has another type than its query"
    if node.has_any("head_sink", "k_scale", "v_scale") or node.number("smooth_softmax") > 0:
        return "its attention_bias goes with neither sinks nor quantised caches"
    if node.size("attention_bias", 1) not in (None, 1, node.num_heads):
        return f"its attention_bias is for neither 1 nor {node.num_heads} heads"
    return ""


def _masks(node: Attention) -> str:
    if node.number("causal", 1) not in (0, 1):
        return "its attribute causal is neither 0 nor 1"
    if node.number("causal", 1) == 0 and node.number("local_window_size", -1) != -1:
        return "it has a window and looks in both directions"
    return ""


def _rotations(node: Attention) -> str:
    if node.number("do_rotary") and not node.has("cos_cache", "sin_cache"):
        return "it rotates without cos_cache and sin_cache"
    return ""


def _scores(node: Attention) -> str:
    return "it gives its scores, which no kernel there does" if node.has("output_qk") or node.number("qk_output") else ""


RULES: tuple[Rule, ...] = (
    *(_halves, _heads, _head_size, _lengths, _pairs, _presents, _one_query, _caches, _bias, _masks, _rotations, _scores),
)


def fault_of(attention: Attention) -> str:
    """Return the first rule that a node breaks, in words; nothing if there is none."""
    return next((fault for rule in RULES if (fault := rule(attention))), "")


def attentions(graph: GraphFile) -> Iterator[Attention]:
    """Yield the attention nodes of a graph."""
    for node in graph.nodes:
        if node.op_type == OPERATOR and node.domain == DOMAIN:
            yield Attention(node, graph.tensors)


def check_for_cuda(path: Path) -> None:
    """Refuse a graph with attention that CUDA's kernel would not compute.

    Raises:
        BundleError: Naming the node, what is wrong with it, and what to do.
    """
    for attention in attentions(GraphFile.read(path)):
        if fault := fault_of(attention):
            raise BundleError(f"{path}: {attention.name} cannot be computed on CUDA: {fault}; export the checkpoint again")
