"""What computes attention between a layer's projections, and the one that does it over whole sequences.

Others have an eager cache (`eager_cache`), or write ONNX operators (`dragoman.export.graphs`).
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from dragoman.model.networks.relative import RelativeBias
from dragoman.model.networks.rotary import angles, turned


class AttentionBackend(Protocol):
    """What a layer asks for between its input and output projections."""

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Attend within the sequence, with relative positions where there are some: packed `[B, T, 3·H·Dh]` → `[B, T, H·Dh]`."""
        ...

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the encoded source: `[B, T, H·Dh]` → `[B, T, H·Dh]`."""
        ...


class FullAttention:
    """Backend over whole sequences: training, scoring and the encoder."""

    def __init__(
        self,
        config: ModelConfig,
        source_mask: Tensor | None,
        cross_kv: list[tuple[Tensor, Tensor]] | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
    ) -> None:
        """Attend over the encoder's own positions, or, given `cross_kv`, as a causal decoder over them.

        Args:
            config: Of the model.
            source_mask: `[B, S]`, True at real source tokens; None where there is no source.
            cross_kv: Per decoder layer, keys and values `[B, S, H·Dh]` of the encoded source; None in the encoder.
            dropout: Probability on attention weights.
            is_causal: Whether a position sees itself and what came before it alone; None for a decoder with a source.
        """
        self.config = config
        self.num_heads = config.num_heads
        self.scale = attention_scale(config)
        self.source_mask = None if source_mask is None else source_mask[:, None, None, :]
        self.cross_kv = cross_kv
        self.dropout = dropout
        self.is_causal = cross_kv is not None if is_causal is None else is_causal
        self._masks: dict[RelativeBias, Tensor] = {}
        self._angles: tuple[Tensor, Tensor] | None = None

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split packed `[B, T, 3·H·Dh]` into queries, keys and values `[B, H, T, Dh]`; rotary positions turn the first two."""
        query, key, value = (split_heads(part, self.num_heads) for part in qkv.chunk(3, -1))
        if self.config.positions == "rotary":
            if self._angles is None:  # of all layers
                cos, sin = angles(query.shape[2], query.shape[3], self.config.rotary_base)
                self._angles = cos.to(query), sin.to(query)
            query, key = turned(query, *self._angles), turned(key, *self._angles)
        return query, key, value

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """See `AttentionBackend`; causal in the decoder, where right padding is out of every real token's sight."""
        query, key, value = self.heads(qkv)
        is_causal = self.is_causal
        mask = None if is_causal else self.source_mask
        if bias is not None:
            if bias not in self._masks:
                self._masks[bias] = self._biased_mask(bias, query.shape[2])
            is_causal, mask = False, self._masks[bias]
        return merge_heads(scaled_dot_product_attention(query, key, value, mask, self.dropout, is_causal, self.scale))

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert self.cross_kv is not None, "the encoder has no cross-attention"
        query, key, value = (split_heads(part, self.num_heads) for part in (query, *self.cross_kv[layer]))
        mixed = scaled_dot_product_attention(query, key, value, self.source_mask, self.dropout, scale=self.scale)
        return merge_heads(mixed)

    def _biased_mask(self, bias: RelativeBias, length: int) -> Tensor:
        """Return what is added to the scores of `length` positions, `[1, H, T, T]` or `[B, H, S, S]`: -inf where none may look."""
        at = torch.arange(length, device=bias.weight.device)
        allowed = causal_mask(length, at.device) if self.is_causal else self.source_mask
        assert allowed is not None, "an encoder has a source"
        return bias(at[None], at).masked_fill(~allowed, -math.inf)  # type: ignore[no-any-return]


def attention_scale(config: ModelConfig) -> float | None:
    """What scores are multiplied by; None for the usual 1/√Dh."""
    return None if config.is_attention_scaled else 1.0
