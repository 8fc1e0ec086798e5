"""Heads of encoder-decoder attention that align target and source, chosen by their alignment error, and their output in a graph.

Nobody has to align texts for that: the reference is the model itself. A token of its answer comes from the source token whose
removal lowers the answer token's log-probability most (prediction difference, Li et al. 2019, "On the Word Alignment from Neural
Machine Translation"). Some heads agree with it in the step that generates a token, some in the step that reads it (Chen et al.
2020, "Accurate Word Alignment Induction from Neural Machine Translation").
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray

from dragoman.export.cuda_contract import OPERATOR
from dragoman.export.manifest import AlignmentHead
from dragoman.export.quantize import Ranges, scales_of
from dragoman.export.rewriting import Writer
from dragoman.export.tensors import ALIGNMENT_FLOOR, QUERIES_OUTPUT, cross_key_name
from dragoman.export.tracing import PAST_KEY
from dragoman.model.decode import greedy_search
from dragoman.model.networks.network import Network

MAX_SOURCES, MAX_SOURCE_TOKENS, MAX_NEW_TOKENS = 16, 48, 64
# Sources decoded at once: logits of a large vocabulary take half a gigabyte.
BATCH_SOURCES = 8
# A token counts where removing a source token lowers its log-probability by this: others have no certain source.
MIN_DIFFERENCE = 1.0
# Heads are added, at most so many, as long as agreement rises by this.
MAX_HEADS, MIN_GAIN = 4, 0.005

Floats = NDArray[np.float32]


@torch.inference_mode()
def choose_heads(model: Network, sources: Sequence[list[int]]) -> list[AlignmentHead]:
    """Return the heads that together agree best with the model's own alignment; none if it has no answers to learn from.

    Args:
        model: In evaluation mode.
        sources: Ids without end-of-sequence.
    """
    usable = [ids for ids in sources if 1 < len(ids) <= MAX_SOURCE_TOKENS][-MAX_SOURCES:]
    room = model.config.max_target_positions - 1  # all tokens are read, too
    if not usable or room < 1:
        return []
    answers = [answer.ids for answer in greedy_search(model, usable, min(MAX_NEW_TOKENS, room))]
    pairs = zip(usable, answers, strict=True)
    samples = [found for ids, answer in pairs if answer and (found := _observed(model, ids, answer)) is not None]
    if not samples:
        return []
    weights = {head: [own[head] for own, _, _ in samples] for head in samples[0][0]}

    def agreement(heads: Sequence[AlignmentHead]) -> float:
        agrees = [
            sum(weights[head][i] for head in heads).argmax(1)[is_certain] == wanted[is_certain]  # type: ignore[union-attr]
            for i, (_, wanted, is_certain) in enumerate(samples)
        ]
        return float(np.concatenate(agrees).mean())

    chosen, best = list[AlignmentHead](), 0.0
    while len(chosen) < MAX_HEADS:
        rises = {head: agreement([*chosen, head]) for head in weights if head not in chosen}
        head = max(rises, key=rises.__getitem__)
        if rises[head] < best + MIN_GAIN:
            break
        chosen.append(head)
        best = rises[head]
    return chosen


def _observed(
    model: Network, ids: list[int], answer: list[int]
) -> tuple[dict[AlignmentHead, Floats], NDArray[np.int64], NDArray[np.bool_]] | None:
    """Return the log-weights `[T, S]` of each head for a source's answer, and the model's own alignment `[T]`.

    S are the tokens of the text alone. The last array says which of the T tokens have a certain source; None if none has.
    """
    source, first = model.prompt(ids)
    fed, length = [first, *answer], len(answer)

    def answered(sources: list[list[int]]) -> torch.Tensor:
        lengths = torch.tensor([len(each) for each in sources])
        logits = model(torch.tensor(sources), lengths, torch.tensor([fed[:-1]] * len(sources)))
        log_probs: torch.Tensor = logits.float().log_softmax(-1)
        return log_probs[:, torch.arange(length), torch.tensor(answer)]

    shorter = [source[:i] + source[i + 1 :] for i in range(len(ids))]
    parts = [answered(shorter[start : start + BATCH_SOURCES]) for start in range(0, len(shorter), BATCH_SOURCES)]
    differences = (answered([source]) - torch.cat(parts)).numpy().T
    is_certain = differences.max(1) >= MIN_DIFFERENCE
    if not is_certain.any():
        return None
    maps = model.observe(source, fed, has_maps=True).maps["cross"][..., : len(ids)].float().numpy()
    logs = np.log(maps / np.maximum(maps.sum(-1, keepdims=True), ALIGNMENT_FLOOR) + ALIGNMENT_FLOOR)
    num_layers, num_heads = logs.shape[:2]
    weights = {
        AlignmentHead(layer, head, is_next): logs[layer, head, is_next : length + is_next]
        for layer in range(num_layers)
        for head in range(num_heads)
        for is_next in (False, True)
    }
    return weights, differences.argmax(1), is_certain


def output_queries(model: onnx_ir.Model, heads: Sequence[AlignmentHead], scale: float | None, ranges: Ranges | None = None) -> None:
    """Let a decode step output the queries of heads, scaled so that their products with cached keys are attention's scores.

    Args:
        model: The decode step; rewritten in place.
        heads: From `choose_heads`; without any, nothing is changed.
        scale: Factor of scores; None for 1/√Dh.
        ranges: Of caches in 8 bits, whose scales are a factor, too.
    """
    if not heads:
        return
    graph = model.graph
    nodes = {str(past.name): node for node in graph if node.op_type == OPERATOR and (past := node.inputs[PAST_KEY]) is not None}
    end = onnx_ir.node("Identity", [graph.inputs[0]])  # a place to write at
    graph.append(end)
    writer = Writer(graph, end)
    axis = writer.constant("query_axis", np.array([2], np.int64))
    parts, factors = [], []
    for head in heads:
        name = cross_key_name(head.layer)
        keys = nodes[name].inputs[PAST_KEY]
        assert keys is not None and keys.shape is not None
        width = keys.shape[3]
        assert isinstance(width, int)
        ends = head.head * width, (head.head + 1) * width
        start, stop = (writer.constant(f"query_{place}", np.array([place], np.int64)) for place in ends)
        parts.append(writer.node("Slice", nodes[name].inputs[0], start, stop, axis))
        levels = np.ones(width, np.float32) if ranges is None else scales_of(ranges, name)[0, head.head, 0]
        factors.append(levels * (width**-0.5 if scale is None else scale))
    joined = writer.node("Concat", *parts, axis=2)
    queries = writer.node("Mul", joined, writer.constant("query_factors", np.concatenate(factors).astype(np.float32)))
    graph.remove(end, safe=True)
    queries.name = QUERIES_OUTPUT
    queries.shape, queries.dtype = onnx_ir.Shape(["N", 1, sum(map(len, factors))]), onnx_ir.DataType.FLOAT
    graph.outputs.append(queries)
