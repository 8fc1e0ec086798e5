"""Attention backends: attention between the projections of a layer, over whole sequences, with an eager cache, or observed.

Backends that write ONNX operators are in `dragoman.export.graphs`.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import causal_mask, merge_heads, scaled_dot_product_attention, split_heads
from dragoman.model.networks.positions import RelativeBias, angles, turned


class AttentionBackend(Protocol):
    """Attention between the input and output projections of a layer."""

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
    """Return the factor of scores; None for the usual 1/√Dh."""
    return None if config.is_attention_scaled else 1.0


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


class ObservedAttention(FullAttention):
    """See the module; for one sequence.

    Attributes:
        cross_means: From the target to the source, the heads' mean, `[T, S]` a layer.
        cross_maps: Each head's, `[H, T, S]` a layer, if maps are asked for.
        self_maps: Within the sequence, `[H, T, T]` a layer, if maps are asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        source_mask: Tensor | None,
        cross_kv: list[tuple[Tensor, Tensor]] | None = None,
        *,
        is_causal: bool | None = None,
        has_maps: bool = False,
    ) -> None:
        super().__init__(config, source_mask, cross_kv, is_causal=is_causal)
        self.has_maps = has_maps
        self.cross_means: list[Tensor] = []
        self.cross_maps: list[Tensor] = []
        self.self_maps: list[Tensor] = []
        self._self_kv: list[Tensor] = []

    def caches(self, stop: int) -> list[Tensor]:
        """Return keys and values of the positions before `stop`, `[H, stop, Dh]`, layer by layer."""
        return [part[:, :stop] for part in self._self_kv]

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        query, key, value = self.heads(qkv)
        self._self_kv += [key[0], value[0]]
        if self.has_maps:
            length = query.shape[2]
            at = torch.arange(length)
            added = torch.zeros(1, 1, length, length) if bias is None else bias(at[None], at)
            if self.is_causal:
                added = added.masked_fill(~causal_mask(length), -math.inf)
            self.self_maps.append(self._weights(query, key, added))
        return super().self_attention(layer, qkv, bias)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        assert self.cross_kv is not None, "there is a source"
        weights = self._weights(split_heads(query, self.num_heads), split_heads(self.cross_kv[layer][0], self.num_heads), None)
        self.cross_means.append(weights.mean(0))
        if self.has_maps:
            self.cross_maps.append(weights)
        return super().cross_attention(layer, query)

    def _weights(self, query: Tensor, key: Tensor, added: Tensor | None) -> Tensor:
        """Return the weights of one sequence's queries, `[1, H, T, Dh]`, on its keys, `[1, H, S, Dh]` → `[H, T, S]`."""
        scores = torch.einsum("bhtd,bhsd->bhts", query, key)
        scores = scores / query.shape[-1] ** 0.5 if self.scale is None else scores * self.scale
        return (scores if added is None else scores + added).softmax(-1)[0]
