"""The Transformer, defined once for training, eager cached decoding and export.

A layer owns its weights and its place in the residual stream. How attention is computed between the projections — over a whole
sequence, with an eager cache, or as an ONNX operator — belongs to the `AttentionBackend` handed
to it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.config import ModelConfig
from dragoman.model.errors import InputError
from dragoman.model.networks.attention import MultiHeadAttention, padding_mask
from dragoman.model.networks.backend import AttentionBackend, EagerCache, FullAttention, ObservedAttention
from dragoman.model.networks.layers import Dropout, Predictor, at_least_single, embedding_scale, linear, norm, token_tables
from dragoman.model.networks.network import Network, Observation
from dragoman.model.networks.positions import RelativeBias, bias_of_layer, relative_bias, sinusoids

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Embedding(nn.Module):
    """Token plus position embeddings, as the paper's section 3.4 and 3.5 have them."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding, num_positions: int) -> None:
        """Wrap a token table (which may be shared) with a position table of `num_positions` usable rows."""
        super().__init__()
        self.tokens = tokens
        self.scale = embedding_scale(config)
        self.offset = config.position_offset
        self.norm = norm(config) if config.has_embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        # Between RMS norms nothing keeps the stream within a half's range; what they give to a layer, they do.
        self.is_stream_single = config.norm_kind == "rms" and config.norm == "pre"
        rows = num_positions + config.position_offset
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn(rows, config.d_model) * config.d_model**-0.5)
        else:
            table = sinusoids(rows, config.d_model) if config.positions == "sinusoidal" else None
            self.register_buffer("positions", table, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids `[B, T]` at positions `[T]` or `[B, T]` → `[B, T, d_model]`."""
        tokens: Tensor = self.tokens(ids)
        x: Tensor = at_least_single(tokens) * self.scale
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset, self.positions)
        x = self.dropout(self.norm(x))
        return x if self.is_stream_single else x.to(tokens.dtype)


class FeedForward(nn.Module):
    """Position-wise feed-forward network: W₂ · f(W₁ x) (the paper's section 3.3), or gated, W₂ · (f(W₀ x) ⊙ W₁ x)."""

    def __init__(self, config: ModelConfig, inner_dim: int) -> None:
        super().__init__()
        self.inner = linear(config.d_model, inner_dim, config.has_biases)
        self.gate = linear(config.d_model, inner_dim, config.has_biases) if config.is_ffn_gated else None
        self.outer = linear(inner_dim, config.d_model, config.has_biases)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, d_model]` → `[B, T, d_model]`."""
        inner: Tensor = self.inner(x)
        inner = self.activation(inner) if self.gate is None else self.activation(self.gate(x)) * inner
        inner = self.dropout(inner)
        if self.outer.weight.dtype is not self.inner.weight.dtype:  # halved, but for this: see `dragoman.export.half`
            inner = inner.to(self.outer.weight.dtype)
        x = self.outer(inner)
        return x


class Residual(nn.Module):
    """The frame around every sub-layer: dropout, residual sum and norm, in the order the configuration says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config)
        self.dropout = Dropout(config.dropout)
        self.is_pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Pre-norm gives x + f(norm(x)), post-norm norm(x + f(x))."""
        if self.is_pre_norm:
            return x + cast("Tensor", self.dropout(sublayer(self.norm(x)))).to(x.dtype)
        return cast("Tensor", self.norm(x + self.dropout(sublayer(x)).to(x.dtype)))


class SelfAttentionLayer(nn.Module):
    """Self-attention and feed-forward, each in its residual frame: a layer of an encoder, or of a decoder without a source."""

    def __init__(self, config: ModelConfig, index: int, ffn_dim: int) -> None:
        super().__init__()
        self.index = index
        self.self_attention = attention(config)
        self.feed_forward = FeedForward(config, ffn_dim)
        self.self_residual = Residual(config)
        self.feed_residual = Residual(config)

    def forward(self, x: Tensor, backend: AttentionBackend, bias: RelativeBias | None = None) -> Tensor:
        """`[B, S, d_model]` → `[B, S, d_model]`."""
        own = self.self_attention
        x = self.self_residual(x, lambda h: own.output(backend.self_attention(self.index, own.input(h), bias)))
        x = self.feed_residual(x, self.feed_forward)
        return x


class EncoderLayer(SelfAttentionLayer):
    """A layer of the encoder."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__(config, index, config.encoder_ffn_dim)


class DecoderLayer(nn.Module):
    """Self-attention, encoder–decoder attention and feed-forward, each in its residual frame."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attention = attention(config)
        self.cross_attention = attention(config)
        self.feed_forward = FeedForward(config, config.decoder_ffn_dim)
        self.self_residual = Residual(config)
        self.cross_residual = Residual(config)
        self.feed_residual = Residual(config)

    def forward(self, x: Tensor, backend: AttentionBackend, bias: RelativeBias | None = None) -> Tensor:
        """`[B, T, d_model]` → `[B, T, d_model]`."""
        own, cross = self.self_attention, self.cross_attention
        x = self.self_residual(x, lambda h: own.output(backend.self_attention(self.index, own.input(h), bias)))
        x = self.cross_residual(x, lambda h: cross.output(backend.cross_attention(self.index, cross.project_query(h))))
        x = self.feed_residual(x, self.feed_forward)
        return x


class Encoder(nn.Module):
    """The source side."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.embedding = Embedding(config, tokens, config.max_source_positions)
        self.layers = nn.ModuleList(EncoderLayer(config, i) for i in range(config.num_encoder_layers))
        self.relative_bias = relative_bias(config, config.num_encoder_layers, is_causal=False)
        self.norm = norm(config) if config.norm == "pre" else nn.Identity()

    def forward(self, ids: Tensor, backend: AttentionBackend, positions: Tensor | None = None) -> Tensor:
        """Source ids `[B, S]` → memory `[B, S, d_model]`; or several sources' tokens at their positions `[P]` → `[P, d_model]`."""
        x: Tensor = self.embedding(ids, torch.arange(ids.shape[1], device=ids.device) if positions is None else positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, backend, bias_of_layer(self.relative_bias, i))
        x = self.norm(x)
        return x


class AttentionDecoder(Predictor):
    """Layers of attention behind an embedding, up to the logits; whether they look at a source is theirs."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding, layer: Callable[[int], nn.Module]) -> None:
        """Build on a token table; `layer` makes each of the layers, which are counted from 0."""
        super().__init__(config)
        self.embedding = Embedding(config, tokens, config.max_target_positions)
        self.layers = nn.ModuleList(layer(i) for i in range(config.num_decoder_layers))
        self.relative_bias = relative_bias(config, config.num_decoder_layers, is_causal=True)
        self.norm = norm(config) if config.norm == "pre" else nn.Identity()
        self.output_scale = config.d_model**-0.5 if config.is_output_scaled else None

    @property
    def tokens(self) -> nn.Embedding:
        return self.embedding.tokens

    def forward(self, ids: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """Target ids `[B, T]` at positions `[T]` or `[B, T]` → hidden states, as the output projection takes them."""
        x: Tensor = self.embedding(ids, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, backend, bias_of_layer(self.relative_bias, i))
        x = self.norm(x)
        return x if self.output_scale is None else x * self.output_scale


class Decoder(AttentionDecoder):
    """The target side, up to the logits."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding) -> None:
        super().__init__(config, tokens, lambda i: DecoderLayer(config, i))

    def project_memory(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Project memory `[B, S, d_model]` to each layer's cross-attention keys and values, `[B, S, H·Dh]` each."""
        layers = cast("Iterable[DecoderLayer]", self.layers)
        return [layer.cross_attention.project_key_value(memory) for layer in layers]


class Transformer(Network):
    """Encoder and decoder."""

    decoder: Decoder

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        source, target = token_tables(config)
        self.encoder = Encoder(config, source)
        self.decoder = Decoder(config, target)

    def encode(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """See `Network` → memory `[B, S, d_model]` and its mask `[B, S]`, True at real tokens."""
        mask = padding_mask(source_lengths, source_ids.shape[1])
        return self.encoder(source_ids, FullAttention(self.config, mask, dropout=self._attention_dropout)), mask

    def decode(self, target_ids: Tensor, *encoded: Tensor) -> Tensor:
        memory, source_mask = encoded
        cross_kv = self.decoder.project_memory(memory)
        backend = FullAttention(self.config, source_mask, cross_kv, self._attention_dropout)
        hidden: Tensor = self.decoder(target_ids, torch.arange(target_ids.shape[1], device=target_ids.device), backend)
        return hidden

    def stepper(self, source_ids: Tensor, source_lengths: Tensor) -> "CachedSteps":
        memory, mask = self.encode(source_ids, source_lengths)
        return CachedSteps(self.decoder, EagerCache(self.config, self.decoder.project_memory(memory), mask))

    def observe(self, source: Sequence[int], inputs: Sequence[int], has_maps: bool = False) -> Observation:
        source_ids, lengths = torch.tensor([source]), torch.tensor([len(source)])
        mask = padding_mask(lengths, len(source))
        reading = ObservedAttention(self.config, mask, has_maps=has_maps)
        memory = self.encoder(source_ids, reading)
        writing = ObservedAttention(self.config, mask, self.decoder.project_memory(memory), has_maps=has_maps)
        hidden = self.decoder(torch.tensor([inputs]), torch.arange(len(inputs)), writing)[0]
        maps = {"encoder": reading.self_maps, "decoder": writing.self_maps, "cross": writing.cross_maps}
        stacked = {name: torch.stack(of_layers) for name, of_layers in maps.items() if of_layers}
        return Observation(hidden, torch.stack(writing.cross_means), writing.caches, stacked)

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0


class CachedSteps:
    """Decodes token by token, with an eager cache; see `Stepper`."""

    def __init__(self, decoder: Decoder, cache: EagerCache) -> None:
        self.decoder, self.cache = decoder, cache
        self.position = 0

    def step(self, previous: Tensor) -> Tensor:
        position = torch.tensor([self.position], device=previous.device)
        log_probs = self.decoder.log_probs(self.decoder(previous[:, None], position, self.cache)[:, 0])
        self.position += 1
        return log_probs

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)


def transformer_of(model: Network) -> Transformer:
    """Return a network that is a Transformer, for what can do with nothing else.

    Raises:
        InputError: If it is another one.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"this is for the architecture transformer, not for {model.config.architecture}")
    return model


def attention(config: ModelConfig) -> MultiHeadAttention:
    """Attention of the configuration's width."""
    return MultiHeadAttention(config.d_model, config.num_heads, config.attention_dim, config.has_biases)
