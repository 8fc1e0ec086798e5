"""The graph that scores: the same encoder and decoder over whole pairs, with an attention backend that keeps its weights."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dragoman.export.graphs.attention import Biases, Heads, KeyValue, group_query_attention
from dragoman.export.graphs.kinds import Scoring
from dragoman.export.graphs.transformer_encoder import MemoryProjection, encode_padded
from dragoman.export.recording import axis_size
from dragoman.export.tensor_names import TensorNames
from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import merge_heads, padding_mask, split_heads
from dragoman.model.networks.layers import at_least_single
from dragoman.model.networks.positions import RelativeBias
from dragoman.model.networks.transformer import Transformer


class ScoringAttention:
    """Backend of a decoder over whole targets, whose rows are `[B·T, …]`: it keeps the encoder–decoder attention it computes.

    Self-attention is the operator of the other graphs, without a past. Encoder–decoder attention is written out, for its weights
    are an answer; beyond a row's source they are exactly 0.

    Attributes:
        weights: Per layer so far, `[B, T, S]`, averaged over heads.
    """

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
        self.heads = Heads.of(config)
        self.shape = target_ids.shape
        self.is_source = padding_mask(source_lengths, source_ids.shape[1])[:, None, None, :]
        self.last_positions = (target_lengths - 1).to(torch.int32)
        self.capacity = axis_size(target_ids, 1)
        self.cross_kv = cross_kv
        self.weights: list[Tensor] = []
        at = torch.arange(target_ids.shape[1])
        self.biases = Biases(at[None], at)

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Attend to what came before and to the token itself: `[B·T, 3·H·Dh]` → `[B·T, H·Dh]`."""
        absent, added = (None, None), self.biases.of(bias, qkv.dtype)
        qkv = qkv.unflatten(0, self.shape)  # type: ignore[no-untyped-call]
        attended = group_query_attention(qkv, absent, absent, self.last_positions, self.capacity, self.heads, added)[0]
        return attended.flatten(0, 1)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the source and keep the weights: `[B·T, H·Dh]` → `[B·T, H·Dh]`."""
        assert layer == len(self.weights), "layers run in order"
        query = query.unflatten(0, self.shape)  # type: ignore[no-untyped-call]
        dtype = query.dtype
        query, key, value = (at_least_single(split_heads(part, self.heads.num_heads)) for part in (query, *self.cross_kv[layer]))
        scale = query.shape[-1] ** -0.5 if self.heads.scale is None else self.heads.scale
        scores = (query * scale) @ key.transpose(-2, -1)
        weights = scores.masked_fill(~self.is_source, -math.inf).softmax(-1)
        self.weights.append(weights.mean(1))
        return merge_heads(weights @ value).flatten(0, 1).to(dtype)


class ScorerGraph(Scoring, nn.Module):
    """Pairs of source and target to the log-probabilities of the targets' tokens and the attention between the two.

    The encoder runs on rows `[B·S, …]`, the decoder on rows `[B·T, …]`, as the other graphs do on theirs, so that all have the same
    weights in the same layout and the graph needs none of its own.
    """

    def __init__(self, model: Transformer, is_packed: bool = True) -> None:
        """Use a model's own layers.

        Args:
            model: In the precision of the graph.
            is_packed: Whether the encoder's graph takes sources packed; this one has its weights.
        """
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.memory = MemoryProjection(model.decoder) if is_packed else None
        self.config = model.config
        self.tensors = TensorNames.of_layers(model.config.num_decoder_layers)

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
