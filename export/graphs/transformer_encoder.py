"""The graph that encodes: a Transformer's encoder on the tokens of all sources at once, attention apart for each source.

Whatever looks at one token by itself (embeddings, norms, products, activations) takes rows `[P, …]`. Only attention knows which
token belongs to which source; what lies on either side of it is the `Layout`'s. On the CPU rows are packed: they are the sources'
tokens and nothing else, and padding exists within attention alone. A device with memory of its own takes sources padded, so that
whole rows of its caches are copied: there rows are `[B·S, …]`, padding included. Both compute every token alike.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.export.graphs.attention import Biases, Heads, KeyValue, group_query_attention
from dragoman.export.graphs.kinds import Encoding
from dragoman.export.graphs.layout import Layout, Packed, Padded
from dragoman.export.recording import Recorder, axis_size
from dragoman.export.tensor_names import TensorNames
from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import split_heads
from dragoman.model.networks.positions import RelativeBias
from dragoman.model.networks.transformer import Decoder, DecoderLayer, Encoder, Transformer


class EncoderAttention:
    """Backend of the encoder, on rows `[P, …]`: a token attends to all of its own source, in both directions."""

    def __init__(self, config: ModelConfig, layout: Layout, source_lengths: Tensor) -> None:
        """Take how sources lie, and their lengths `[B]`."""
        self.heads = Heads.of(config)
        self.layout = layout
        self.last_positions = (source_lengths - 1).to(torch.int32)
        self.capacity = axis_size(layout.grid, 1)
        at = torch.arange(layout.grid.shape[1])
        self.biases = Biases(at[None], at)

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Attend within each source: `[P, 3·H·Dh]` → `[P, H·Dh]`."""
        absent, added = (None, None), self.biases.of(bias, qkv.dtype)
        lengths, qkv = (self.last_positions, self.capacity), self.layout.apart(qkv)
        attended = group_query_attention(qkv, absent, absent, *lengths, self.heads, added, is_causal=False)[0]
        return self.layout.together(attended)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Never called: the encoder has no cross-attention."""
        raise AssertionError("the encoder has no cross-attention")


class MemoryProjection(nn.Module):
    """The cross-attention projections of all decoder layers as one product: all of them read the same memory."""

    weight: Tensor  # `[n·H·Dh, d_model]`, n tensors: keys, then values, layer by layer
    bias: Tensor | None  # `[n·H·Dh]`, where the model has biases

    def __init__(self, decoder: Decoder) -> None:
        """Put a decoder's weights one below the other."""
        super().__init__()
        attentions = [layer.cross_attention for layer in cast("Iterable[DecoderLayer]", decoder.layers)]
        parts = [attention.input.weight[attention.width :] for attention in attentions]
        biases = [attention.input.bias[attention.width :] for attention in attentions if attention.input.bias is not None]
        self.register_buffer("weight", torch.cat(parts).detach(), persistent=False)
        self.register_buffer("bias", torch.cat(biases).detach() if biases else None, persistent=False)
        self.num_tensors = 2 * len(parts)

    def forward(self, memory: Tensor) -> Tensor:
        """Memory `[P, d_model]` → keys and values of all layers side by side, `[P, n·H·Dh]`."""
        return F.linear(memory, self.weight, self.bias)

    def by_layer(self, memory: Tensor) -> list[KeyValue]:
        """Memory `[P, d_model]` → each layer's keys and values, `[P, H·Dh]` each."""
        parts = self(memory).chunk(self.num_tensors, -1)
        return list(zip(parts[::2], parts[1::2], strict=True))


def encode_padded(encoder: Encoder, config: ModelConfig, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, Padded]:
    """Write the encoder over right-padded sources `[B, S]` of lengths `[B]` → memory `[B·S, d_model]`, and how it lies."""
    layout = Padded(source_ids)
    positions = torch.arange(source_ids.shape[1]).expand(source_ids.shape).flatten()
    memory: Tensor = encoder(source_ids.flatten(), EncoderAttention(config, layout, source_lengths), positions)
    return memory, layout


class EncoderGraph(Encoding, nn.Module):
    """Sources to the cross-attention keys and values of every decoder layer."""

    def __init__(self, model: Transformer, is_packed: bool = True) -> None:
        """Use a model's own layers.

        Args:
            model: In the precision of the graph.
            is_packed: Whether sources come packed, and go as they came.
        """
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.memory = MemoryProjection(model.decoder) if is_packed else None
        self.config: ModelConfig = model.config
        self.tensors = TensorNames.of_layers(model.config.num_decoder_layers, is_packed)

    def forward(
        self,
        src_ids: Tensor,
        src_lens: Tensor,
        positions: Tensor | None = None,
        grid: Tensor | None = None,
        cells: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """Encode.

        Args:
            src_ids: Tokens of all sources `[P]`, one source after the other; or `[B, S]`, right-padded.
            src_lens: Tokens of each source, `[B]`.
            positions: Of each token in its source, `[P]`; this and what follows where sources are packed.
            grid: Which of the tokens stands where, `[B, S]`; any beyond the end of a source.
            cells: Where each token stands, as an index into `[B·S]`, `[P]`.

        Returns:
            Keys, then values, layer by layer: side by side, `[P, n·H·Dh]`; or apart, `[B, H, S, Dh]` each.
        """
        if self.memory is None:
            memory, layout = encode_padded(self.encoder, self.config, src_ids, src_lens)
            pairs = self.decoder.project_memory(memory)
            return [split_heads(layout.apart(part), self.config.num_heads) for pair in pairs for part in pair]
        assert positions is not None and grid is not None and cells is not None
        backend = EncoderAttention(self.config, Packed(grid, cells), src_lens)
        return [self.memory(self.encoder(src_ids, backend, positions))]

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        """Add the graph's inputs; return them as `forward` takes them."""
        axes = {"src_ids": ("B", "S"), "src_lens": ("B",)}
        if self.memory is not None:
            axes |= {"src_ids": ("P",), "positions": ("P",), "grid": ("B", "S"), "cells": ("P",)}
        return {name: recorder.input(name, axes[name]) for name in self.input_names}
