"""The Transformer, defined once for training, eager cached decoding and export.

A layer owns its weights and its place in the residual stream. How attention is computed between the projections — over a whole
sequence, with an eager cache, or as an ONNX operator — belongs to the `AttentionBackend` handed to it.
"""

import math
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.attention import MultiHeadAttention, merge_heads, padding_mask, scaled_dot_product_attention, split_heads
from dragoman.model.config import ModelConfig
from dragoman.model.dropout import Dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class AttentionBackend(Protocol):
    """What a layer asks for between its input and output projections."""

    def self_attention(self, layer: int, qkv: Tensor) -> Tensor:
        """Attend within the sequence: packed projections `[B, T, 3·H·Dh]` → `[B, T, H·Dh]`."""
        ...

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the encoded source: `[B, T, H·Dh]` → `[B, T, H·Dh]`."""
        ...


class FullAttention:
    """Backend over whole sequences: training, scoring and the encoder."""

    def __init__(
        self,
        num_heads: int,
        source_mask: Tensor,
        cross_kv: list[tuple[Tensor, Tensor]] | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Attend over the encoder's own positions, or, given `cross_kv`, as a causal decoder over them.

        Args:
            num_heads: H.
            source_mask: `[B, S]`, True at real source tokens.
            cross_kv: Per decoder layer, keys and values `[B, S, H·Dh]` of the encoded source; None in the encoder.
            dropout: Probability on attention weights.
        """
        self.num_heads = num_heads
        self.source_mask = source_mask[:, None, None, :]
        self.cross_kv = cross_kv
        self.dropout = dropout

    def self_attention(self, layer: int, qkv: Tensor) -> Tensor:
        """See `AttentionBackend`; causal in the decoder, where right padding is out of every real token's sight."""
        is_causal = self.cross_kv is not None
        query, key, value = (split_heads(part, self.num_heads) for part in qkv.chunk(3, -1))
        mask = None if is_causal else self.source_mask
        return merge_heads(scaled_dot_product_attention(query, key, value, mask, self.dropout, is_causal))

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert self.cross_kv is not None, "the encoder has no cross-attention"
        query, key, value = (split_heads(part, self.num_heads) for part in (query, *self.cross_kv[layer]))
        return merge_heads(scaled_dot_product_attention(query, key, value, self.source_mask, self.dropout))


class Embedding(nn.Module):
    """Token plus position embeddings, as the paper's section 3.4 and 3.5 have them."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding, num_positions: int) -> None:
        """Wrap a token table (which may be shared) with a position table of `num_positions` usable rows."""
        super().__init__()
        self.tokens = tokens
        self.scale = math.sqrt(config.d_model) if config.is_embedding_scaled else 1.0
        self.offset = config.position_offset
        self.norm = layer_norm(config) if config.has_embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        rows = num_positions + config.position_offset
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn(rows, config.d_model) * config.d_model**-0.5)
        else:
            self.register_buffer("positions", sinusoids(rows, config.d_model), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids `[B, T]` at positions `[T]` or `[B, T]` → `[B, T, d_model]`."""
        tokens: Tensor = self.tokens(ids)
        x: Tensor = at_least_single(tokens) * self.scale + F.embedding(positions + self.offset, self.positions)
        x = self.dropout(self.norm(x))
        return x.to(tokens.dtype)


class FeedForward(nn.Module):
    """Position-wise feed-forward network, W₂ · f(W₁ x) (the paper's section 3.3)."""

    def __init__(self, config: ModelConfig, inner_dim: int) -> None:
        """Create both projections."""
        super().__init__()
        self.inner = linear(config.d_model, inner_dim)
        self.outer = linear(inner_dim, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, d_model]` → `[B, T, d_model]`."""
        x = self.outer(self.dropout(self.activation(self.inner(x))))
        return x


class Residual(nn.Module):
    """The frame around every sub-layer: dropout, residual sum and layer norm, in the order the configuration says."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the layer norm."""
        super().__init__()
        self.norm = layer_norm(config)
        self.dropout = Dropout(config.dropout)
        self.is_pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Pre-norm gives x + f(norm(x)), post-norm norm(x + f(x))."""
        if self.is_pre_norm:
            return x + cast("Tensor", self.dropout(sublayer(self.norm(x))))
        return cast("Tensor", self.norm(x + self.dropout(sublayer(x))))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each in its residual frame."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        """Create layer `index` of the encoder."""
        super().__init__()
        self.index = index
        self.self_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.feed_forward = FeedForward(config, config.encoder_ffn_dim)
        self.self_residual = Residual(config)
        self.feed_residual = Residual(config)

    def forward(self, x: Tensor, backend: AttentionBackend) -> Tensor:
        """`[B, S, d_model]` → `[B, S, d_model]`."""
        attention = self.self_attention
        x = self.self_residual(x, lambda h: attention.output(backend.self_attention(self.index, attention.input(h))))
        x = self.feed_residual(x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Self-attention, encoder–decoder attention and feed-forward, each in its residual frame."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        """Create layer `index` of the decoder."""
        super().__init__()
        self.index = index
        self.self_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.cross_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.feed_forward = FeedForward(config, config.decoder_ffn_dim)
        self.self_residual = Residual(config)
        self.cross_residual = Residual(config)
        self.feed_residual = Residual(config)

    def forward(self, x: Tensor, backend: AttentionBackend) -> Tensor:
        """`[B, T, d_model]` → `[B, T, d_model]`."""
        own, cross = self.self_attention, self.cross_attention
        x = self.self_residual(x, lambda h: own.output(backend.self_attention(self.index, own.input(h))))
        x = self.cross_residual(x, lambda h: cross.output(backend.cross_attention(self.index, cross.project_query(h))))
        x = self.feed_residual(x, self.feed_forward)
        return x


class Encoder(nn.Module):
    """The source side."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        """Build on a token table that the decoder may share."""
        super().__init__()
        self.embedding = Embedding(config, tokens, config.max_source_positions)
        self.layers = nn.ModuleList(EncoderLayer(config, i) for i in range(config.num_encoder_layers))
        self.norm = layer_norm(config) if config.norm == "pre" else nn.Identity()

    def forward(self, ids: Tensor, backend: AttentionBackend) -> Tensor:
        """Source ids `[B, S]` → memory `[B, S, d_model]`."""
        x: Tensor = self.embedding(ids, torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, backend)
        x = self.norm(x)
        return x


class Decoder(nn.Module):
    """The target side, up to the logits."""

    padding_logits: Tensor

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        """Build on a token table that the encoder may share."""
        super().__init__()
        self.embedding = Embedding(config, tokens, config.max_target_positions)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_decoder_layers))
        self.norm = layer_norm(config) if config.norm == "pre" else nn.Identity()
        self.projection = None if config.is_projection_tied else linear(config.d_model, config.target_vocab_size, False)
        self.output_bias = nn.Parameter(torch.zeros(config.target_vocab_size)) if config.has_output_bias else None
        padding_logits = torch.zeros(config.target_vocab_size)
        padding_logits[config.pad_id] = -math.inf
        self.register_buffer("padding_logits", padding_logits, persistent=False)

    @property
    def output_weight(self) -> Tensor:
        """The output projection `[V, d_model]`: the target embedding where the configuration ties them."""
        return self.embedding.tokens.weight if self.projection is None else self.projection.weight

    def project_memory(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Project memory `[B, S, d_model]` to each layer's cross-attention keys and values, `[B, S, H·Dh]` each."""
        layers = cast("Iterable[DecoderLayer]", self.layers)
        return [layer.cross_attention.project_key_value(memory) for layer in layers]

    def forward(self, ids: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """Target ids `[B, T]` at positions `[T]` or `[B, T]` → hidden states `[B, T, d_model]`."""
        x: Tensor = self.embedding(ids, positions)
        for layer in self.layers:
            x = layer(x, backend)
        x = self.norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., d_model]` → logits `[..., V]`."""
        return F.linear(at_least_single(hidden), at_least_single(self.output_weight), self.output_bias)

    def next_token_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., d_model]` → logits `[..., V]` to pick a token by: padding is at -inf."""
        return self.logits(hidden) + self.padding_logits


class Transformer(nn.Module):
    """Encoder and decoder."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the model with freshly initialised weights (from PyTorch's global generator)."""
        super().__init__()
        self.config = config
        source = token_table(config.source_vocab_size, config)
        target = source if config.is_embedding_shared else token_table(config.target_vocab_size, config)
        self.encoder = Encoder(config, source)
        self.decoder = Decoder(config, target)

    def encode(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode right-padded sources.

        Args:
            source_ids: `[B, S]`.
            source_lengths: `[B]`, real tokens in each row, at least 1.

        Returns:
            Memory `[B, S, d_model]` and its mask `[B, S]`, True at real tokens.
        """
        mask = padding_mask(source_lengths, source_ids.shape[1])
        return self.encoder(source_ids, FullAttention(self.config.num_heads, mask, dropout=self._attention_dropout)), mask

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """Run the decoder over whole targets `[B, T]`, start token first → hidden states `[B, T, d_model]`."""
        cross_kv = self.decoder.project_memory(memory)
        backend = FullAttention(self.config.num_heads, source_mask, cross_kv, self._attention_dropout)
        hidden: Tensor = self.decoder(target_ids, torch.arange(target_ids.shape[1], device=target_ids.device), backend)
        return hidden

    def forward(self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher-forced logits `[B, T, V]`: row t predicts the token after `target_ids[:, t]`."""
        return self.decoder.logits(self.decode(target_ids, *self.encode(source_ids, source_lengths)))

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0


def at_least_single(x: Tensor) -> Tensor:
    """Return `x` in single precision if it has less; a model in half precision computes embeddings and logits so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sinusoids(num_positions: int, d_model: int) -> Tensor:
    """Position table `[num_positions, d_model]`: sin(p / 10000^(2i/d)) in even columns, cos in odd (section 3.5)."""
    position = torch.arange(num_positions, dtype=torch.float64)[:, None]
    angle = position * torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Layer norm over the residual stream."""
    return nn.LayerNorm(config.d_model, config.norm_epsilon)


def linear(input_dim: int, output_dim: int, has_bias: bool = True) -> nn.Linear:
    """Linear map with Xavier-uniform weights and zero bias."""
    layer = nn.Linear(input_dim, output_dim, has_bias)
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def token_table(vocab_size: int, config: ModelConfig) -> nn.Embedding:
    """Token embedding with standard deviation 1/√d_model, so that scaled embeddings start at unit variance."""
    table = nn.Embedding(vocab_size, config.d_model)
    nn.init.normal_(table.weight, std=config.d_model**-0.5)
    return table
