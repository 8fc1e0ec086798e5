"""Attention backend of token-by-token decoding in eager PyTorch: what earlier steps computed is kept and concatenated."""

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import merge_heads, scaled_dot_product_attention, split_heads
from dragoman.model.networks.backend import attention_scale
from dragoman.model.networks.relative import RelativeBias


class EagerCache:
    """Attention backend for one token a step: keys and values of earlier steps are kept and concatenated."""

    def __init__(self, config: ModelConfig, cross_kv: list[tuple[Tensor, Tensor]], source_mask: Tensor) -> None:
        """Start with an empty self-attention cache.

        Args:
            config: Of the model.
            cross_kv: Per layer, keys and values `[N, S, H·Dh]` of the encoded sources.
            source_mask: `[N, S]`, True at real tokens.
        """
        self.num_heads = config.num_heads
        self.scale = attention_scale(config)
        self.cross_kv = [(split_heads(key, self.num_heads), split_heads(value, self.num_heads)) for key, value in cross_kv]
        self.source_mask = source_mask[:, None, None, :]
        self.self_kv: list[tuple[Tensor, Tensor] | None] = [None] * len(cross_kv)

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Append this step's keys and values, attend to all so far: `[N, 1, 3·H·Dh]` → `[N, 1, H·Dh]`."""
        query, key, value = (split_heads(part, self.num_heads) for part in qkv.chunk(3, -1))
        if (past := self.self_kv[layer]) is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        self.self_kv[layer] = key, value
        mask = None
        if bias is not None:
            keys = torch.arange(key.shape[2], device=key.device)
            mask = bias(keys[None, -1:], keys)
        return merge_heads(scaled_dot_product_attention(query, key, value, mask, scale=self.scale))

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the encoded source: `[N, 1, H·Dh]` → `[N, 1, H·Dh]`."""
        query = split_heads(query, self.num_heads)
        attended = scaled_dot_product_attention(query, *self.cross_kv[layer], self.source_mask, scale=self.scale)
        return merge_heads(attended)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order; a row may be taken more than once."""
        self.source_mask = self.source_mask[rows]
        self.cross_kv = [(key[rows], value[rows]) for key, value in self.cross_kv]
        self.self_kv = [None if past is None else (past[0][rows], past[1][rows]) for past in self.self_kv]
