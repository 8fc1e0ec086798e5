"""Attention in a graph: one node, and what relative positions add to its scores.

A `com.microsoft.GroupQueryAttention` with as many key/value heads as query heads is the one operator of ONNX Runtime with a length
per row and a cache that is updated in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.export.recording import write_node
from dragoman.model.config import ModelConfig
from dragoman.model.networks.backend import attention_scale
from dragoman.model.networks.positions import RelativeBias

KeyValue = tuple[Tensor, Tensor]


class Heads(NamedTuple):
    """Attention heads."""

    num_heads: int  # H
    scale: float | None  # factor of scores; None for the operator's own 1/√Dh

    @classmethod
    def of(cls, config: ModelConfig) -> "Heads":
        """Return a model's."""
        return cls(config.num_heads, attention_scale(config))


class Biases:
    """Biases of scores by relative position, computed once for all layers that share a table."""

    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        """Take the positions of queries `[N, T]` and of keys `[S]`."""
        self.queries, self.keys = queries, keys
        self._known: dict[RelativeBias, Tensor] = {}

    def of(self, bias: RelativeBias | None, dtype: torch.dtype) -> Tensor | None:
        """Return `[N, H, T, S]`, or nothing where positions are of another kind."""
        if bias is None:
            return None
        if bias not in self._known:
            self._known[bias] = bias(self.queries, self.keys).to(dtype)
        return self._known[bias]


def group_query_attention(
    query: Tensor,
    key_value: tuple[Tensor | None, Tensor | None],
    past: tuple[Tensor | None, Tensor | None],
    last_positions: Tensor,
    capacity: Tensor,
    heads: Heads,
    bias: Tensor | None = None,
    is_causal: bool = True,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit one attention node.

    Args:
        query: `[N, T, H·Dh]`, or packed projections `[N, T, 3·H·Dh]` when `key_value` is absent.
        key_value: New keys and values `[N, T, H·Dh]`; T is 0 when there is nothing to add to the past.
        past: The caches `[N, H, S, Dh]`, or absent.
        last_positions: Per row, index of the last key that is attended to, `[N]` int32.
        capacity: Keys there is room for, `[1]` int32.
        heads: How many there are and how their scores are scaled.
        bias: What is added to the scores, `[N, H, T, capacity]`, or with 1 for N.
        is_causal: Whether a query sees only keys up to its own position.
        rotation: Cosines and sines of every position's angles, `[capacity or more, Dh / 2]`: new queries and keys are turned.

    Returns:
        The attended values `[N, T, H·Dh]` and the caches after the step.
    """
    num_rows, length, packed = query.shape
    width = packed if key_value[0] is not None else packed // 3
    cache = past[0].shape if past[0] is not None else (num_rows, heads.num_heads, length, width // heads.num_heads)
    inputs = query, *key_value, *past, last_positions, capacity
    # After the lengths the operator takes rotations, positions, of which it knows better, and what is added to scores.
    rest = [*(rotation or (None, None)), None, bias]
    while rest and rest[-1] is None:
        rest.pop()
    attended, key, value = write_node(
        "GroupQueryAttention",
        (*inputs, *rest),
        ((num_rows, length, width), cache, cache),
        (query.dtype,) * 3,
        domain="com.microsoft",
        num_heads=heads.num_heads,
        kv_num_heads=heads.num_heads,
        causal=int(is_causal),
        **({} if heads.scale is None else {"scale": heads.scale}),
        **({} if rotation is None else {"do_rotary": 1}),
    )
    return attended, key, value
