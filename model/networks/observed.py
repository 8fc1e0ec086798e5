"""Attention that is looked at: the backend over whole sequences, which keeps its weights, and the keys and values that steps keep.

PyTorch's fused attention keeps its weights to itself, so they are worked out here a second time.
"""

import math

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import causal_mask, split_heads
from dragoman.model.networks.backend import FullAttention
from dragoman.model.networks.relative import RelativeBias


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
        """Attend as `FullAttention` does."""
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
        """See `AttentionBackend`."""
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
        """See `AttentionBackend`."""
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
