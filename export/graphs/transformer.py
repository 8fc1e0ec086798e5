"""Graphs of the Transformer: encoder, decode step and scorer, with backends that write attention as ONNX operators.

In the encoder, everything that computes one token by itself (embeddings, norms, products, activations) takes rows `[P, …]`; only
attention depends on the source of a token, and the `Layout` converts between the two. On the CPU rows are packed: the sources'
tokens without padding. A device with memory of its own takes sources padded, `[B·S, …]`, so that whole rows of its caches are
copied. Both compute every token alike.

When a graph is traced (see `tracing`), a layer's attention becomes one node, a `com.microsoft.GroupQueryAttention` with as many
key/value heads as query heads: the one operator of ONNX Runtime with a length per row and a cache that is updated in place. The
scorer writes encoder–decoder attention out, to return its weights.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.export.graphs.attention import Biases, Heads, KeyValue, group_query_attention
from dragoman.export.graphs.kinds import PACKED_AXES, PAIR_AXES, Layout, Packed, Padded, Stepping
from dragoman.export.recording import Recorder, axis_size
from dragoman.export.shortlist import shortened
from dragoman.export.tensors import Tensors, cross_kv_names, self_kv_names
from dragoman.export.tracing import GraphModule
from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import merge_heads, padding_mask, split_heads
from dragoman.model.networks.layers import at_least_single
from dragoman.model.networks.positions import RelativeBias
from dragoman.model.networks.transformer import Decoder, DecoderLayer, Encoder, Transformer


class EncoderAttention:
    """Backend of the encoder, on rows `[P, …]`: a token attends to all of its own source, in both directions."""

    is_causal = False

    def __init__(self, config: ModelConfig, layout: Layout, source_lengths: Tensor) -> None:
        """Take how sources lie, and their lengths `[B]`."""
        self.heads = Heads.of(config)
        self.layout = layout
        self.last_positions = (source_lengths - 1).to(torch.int32)
        self.capacity = axis_size(layout.grid, 1)
        at = torch.arange(layout.grid.shape[1])
        self.biases = Biases(at[None], at)

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Attend within each source, or as far as the token itself: `[P, 3·H·Dh]` → `[P, H·Dh]`."""
        absent, added = (None, None), self.biases.of(bias, qkv.dtype)
        lengths, qkv = (self.last_positions, self.capacity), self.layout.apart(qkv)
        attended = group_query_attention(qkv, absent, absent, *lengths, self.heads, added, self.is_causal)[0]
        return self.layout.together(attended)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
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


class SourceGraph(GraphModule):
    """Common parts of the graphs that encode sources."""

    def __init__(self, model: Transformer, is_packed: bool = True) -> None:
        """Use a model's own layers.

        Args:
            model: In the precision of the graph.
            is_packed: Whether the encoder's graph takes sources packed, and gives them so; the scorer's has its weights.
        """
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.memory = MemoryProjection(model.decoder) if is_packed else None
        self.config: ModelConfig = model.config
        self.tensors = Tensors.of_layers(model.config.num_decoder_layers, is_packed)
        self.axes = PACKED_AXES if is_packed and self.part == "encoder" else PAIR_AXES


class EncoderGraph(SourceGraph):
    """Sources to the cross-attention keys and values of every decoder layer."""

    part = "encoder"

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


class CachedAttention:
    """Backend of the decode step, on rows without a time axis: `[N, H·Dh]` stands for one token of each."""

    def __init__(
        self,
        config: ModelConfig,
        positions: Tensor,
        source_lengths: Tensor,
        self_kv: Sequence[KeyValue],
        cross_kv: Sequence[KeyValue],
    ) -> None:
        """Take each row's position and source length, `[N]`, and per layer the caches `[N, H, T, Dh]` and `[N, H, S, Dh]`."""
        self.heads = Heads.of(config)
        self.self_kv = list(self_kv)
        self.cross_kv = cross_kv
        self.last_positions = positions.to(torch.int32)
        self.last_source_positions = (source_lengths - 1).to(torch.int32)
        self.capacity = axis_size(self_kv[0][0], 2)
        self.source_capacity = axis_size(cross_kv[0][0], 2)
        self.nothing: Tensor | None = None
        self.biases = Biases(positions[:, None], torch.arange(self_kv[0][0].shape[2]))

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Write the token's keys and values at its position and attend up to it: `[N, 3·H·Dh]` → `[N, H·Dh]`."""
        lengths, added = (self.last_positions, self.capacity), self.biases.of(bias, qkv.dtype)
        attended, key, value = group_query_attention(
            qkv.unsqueeze(1), (None, None), self.self_kv[layer], *lengths, self.heads, added
        )
        self.self_kv[layer] = key, value
        return attended.squeeze(1)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the source's keys and values, taken as a past to which nothing is added: `[N, H·Dh]` → `[N, H·Dh]`."""
        query = query.unsqueeze(1)
        if self.nothing is None:
            self.nothing = query[:, :0]
        added, past = (self.nothing, self.nothing), self.cross_kv[layer]
        attended = group_query_attention(query, added, past, self.last_source_positions, self.source_capacity, self.heads)[0]
        return attended.squeeze(1)


class StepGraph(Stepping):
    """One token for each of N rows, every row at its own position, to the likeliest next tokens."""

    def __init__(self, model: Transformer, shortlist: Sequence[int] | None = None) -> None:
        """Use a model's own layers; with a shortlist, rising, candidates are its ids alone, see `shortlist`."""
        super().__init__()
        self.decoder = model.decoder if shortlist is None else shortened(model.decoder, shortlist)
        self.shortlist = None if shortlist is None else torch.tensor(shortlist)
        self.config: ModelConfig = model.config
        self.tensors = Tensors.of_layers(model.config.num_decoder_layers)

    def forward(
        self,
        prev_ids: Tensor,
        positions: Tensor,
        src_lens: Tensor,
        num_candidates: Tensor,
        self_kv: list[KeyValue],
        cross_kv: list[KeyValue],
    ) -> tuple[Tensor, ...]:
        """Decode one step.

        Args:
            prev_ids: Each row's last token, `[N]`.
            positions: Where it stands, which is how many tokens the row's cache holds before this step, `[N]`.
            src_lens: Real tokens of each row's source, `[N]`.
            num_candidates: K, `[1]`.
            self_kv: Per layer the caches `[N, H, T, Dh]`.
            cross_kv: Per layer the source's keys and values `[N, H, S, Dh]`.

        Returns:
            The K likeliest ids `[N, K]`, likeliest first and of equals the lower id; their log-probabilities `[N, K]`; and the
            updated caches, keys then values, layer by layer.
        """
        backend = CachedAttention(self.config, positions, src_lens, self_kv, cross_kv)
        hidden = self.decoder(prev_ids, positions, backend)
        log_probs = self.decoder.log_probs(hidden)
        return *self.likeliest(log_probs, num_candidates), *(part for pair in backend.self_kv for part in pair)

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        config, dtype = self.config, self.decoder.output_weight.dtype

        def caches(names: Sequence[str], capacity: str) -> list[tuple[Any, ...]]:
            values = [recorder.input(name, ("N", config.num_heads, capacity, config.head_dim), dtype) for name in names]
            return list(zip(values[::2], values[1::2], strict=True))

        return {
            **self.rows(recorder),
            "self_kv": caches(self_kv_names(config.num_decoder_layers), "T"),
            "cross_kv": caches(cross_kv_names(config.num_decoder_layers), "S"),
        }


class ScoringAttention(EncoderAttention):
    """Backend of a decoder over whole targets, whose rows are `[B·T, …]`: it keeps the encoder–decoder attention it computes.

    Self-attention is the operator of the other graphs, without a past. Encoder–decoder attention is written out, for its weights
    are an answer; beyond a row's source they are exactly 0.

    Attributes:
        weights: Per layer so far, `[B, T, S]`, averaged over heads.
    """

    is_causal = True

    def __init__(
        self,
        config: ModelConfig,
        source_ids: Tensor,
        source_lengths: Tensor,
        target_ids: Tensor,
        target_lengths: Tensor,
        cross_kv: Sequence[KeyValue],
    ) -> None:
        """Take sources `[B, S]` and targets `[B, T]` with their lengths `[B]`, and per layer keys and values `[B, S, H·Dh]`."""
        self.is_source = padding_mask(source_lengths, source_ids.shape[1])[:, None, None, :]
        super().__init__(config, Padded(target_ids), target_lengths)
        self.cross_kv = cross_kv
        self.weights: list[Tensor] = []

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the source and keep the weights: `[B·T, H·Dh]` → `[B·T, H·Dh]`."""
        assert layer == len(self.weights), "layers run in order"
        query, dtype = self.layout.apart(query), query.dtype
        query, key, value = (at_least_single(split_heads(part, self.heads.num_heads)) for part in (query, *self.cross_kv[layer]))
        scale = query.shape[-1] ** -0.5 if self.heads.scale is None else self.heads.scale
        scores = (query * scale) @ key.transpose(-2, -1)
        weights = scores.masked_fill(~self.is_source, -math.inf).softmax(-1)
        self.weights.append(weights.mean(1))
        return self.layout.together(merge_heads(weights @ value)).to(dtype)


class ScorerGraph(SourceGraph):
    """Pairs of source and target to the log-probabilities of the targets' tokens and the attention between the two.

    The encoder runs on rows `[B·S, …]`, the decoder on rows `[B·T, …]`, as the other graphs do on theirs, so that all have the same
    weights in the same layout and the graph needs none of its own.
    """

    part = "scorer"

    def forward(
        self, src_ids: Tensor, src_lens: Tensor, tgt_ids: Tensor, tgt_lens: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score right-padded pairs.

        Args:
            src_ids: Sources `[B, S]`.
            src_lens: Their real tokens, `[B]`.
            tgt_ids: What the decoder reads, `[B, T]`: the start token, then the target without its last token.
            tgt_lens: Its real tokens, `[B]`.
            labels: The target, `[B, T]`.

        Returns:
            The labels' log-probabilities `[B, T]`, and the encoder–decoder attention `[B, L, T, S]`, averaged over heads, whose
            rows sum to 1 over the source. Both mean nothing beyond a row's target.
        """
        memory, layout = encode_padded(self.encoder, self.config, src_ids, src_lens)
        pairs = self.decoder.project_memory(memory) if self.memory is None else self.memory.by_layer(memory)
        cross_kv = [(layout.apart(key), layout.apart(value)) for key, value in pairs]
        backend = ScoringAttention(self.config, src_ids, src_lens, tgt_ids, tgt_lens, cross_kv)
        positions = torch.arange(tgt_ids.shape[1]).expand(tgt_ids.shape).flatten()
        hidden = self.decoder(tgt_ids.flatten(), positions, backend)
        log_probs = self.decoder.log_probs(hidden).gather(-1, labels.flatten()[:, None])
        return log_probs.view(labels.shape), torch.stack(backend.weights, 1)
