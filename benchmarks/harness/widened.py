"""A translation model of Transformer-base's size: a smaller trained one, widened without a change of its answers.

Every feature of the narrow model is there several times, and weights that read features are divided by that number: sums, means and
variances are the same, so layer norm sees the same statistics. Heads are copied whole as well as in their features; attention
scores then sum over more of them, which query projections make up for. Layers are added whose output projections are zero, which in
a pre-norm model leaves the residual stream as it is, and tokens that an output bias keeps from ever being chosen. An engine has the
arithmetic of the wide model to do; its answers are those of the narrow one.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness.models import NEVER, SEED, SHIPPED, VOCAB_SIZE
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.growth import silence
from dragoman.model.networks.attention import MultiHeadAttention
from dragoman.model.networks.transformer import DecoderLayer, EncoderLayer, FeedForward, Transformer, transformer_of

NAME_SUFFIX = "base"


def base_shape(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the model widened to Transformer-base's dimensions (Vaswani et al., 2017), 32,000 tokens."""
    return replace(
        config,
        source_vocab_size=VOCAB_SIZE,
        target_vocab_size=VOCAB_SIZE,
        d_model=512,
        num_heads=8,
        num_encoder_layers=6,
        num_decoder_layers=6,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        positions="learned",  # sinusoids of another width are other numbers
        has_output_bias=True,
    )


@torch.no_grad()
def widen(narrow: Transformer, wide_config: ModelConfig) -> Transformer:
    """Build a wider model that computes the same.

    Args:
        narrow: Pre-norm, without embedding norm, and with one table for both embeddings and the projection.
        wide_config: That of `narrow` with larger dimensions, learned positions and an output bias, see `base_shape`.

    Returns:
        A model in evaluation mode whose logits of the narrow model's tokens are the narrow model's, to rounding.

    Raises:
        ValueError: If it cannot be widened; the message has the reason.
    """
    _check(narrow.config, wide_config)
    wide = Transformer(wide_config).eval()
    widener = _Widener(narrow.config, wide_config)
    widener.embed(narrow, wide)
    for narrow_side, wide_side in ((narrow.encoder, wide.encoder), (narrow.decoder, wide.decoder)):
        depth = len(narrow_side.layers)
        for i, layer in enumerate(wide_side.layers):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            widener.layer(narrow_side.layers[min(i, depth - 1)], layer)
            if i >= depth:
                silence(layer)
    widener.norm(narrow.encoder.norm, wide.encoder.norm)
    widener.norm(narrow.decoder.norm, wide.decoder.norm, widener.logit_gain)
    return wide


class _Widener:
    """Copies the parts of one model into the parts of another."""

    def __init__(self, narrow: ModelConfig, wide: ModelConfig) -> None:
        self._narrow, self._wide = narrow, wide
        # Of each feature of the wide model: which one of the narrow model it repeats.
        self._residual = torch.arange(wide.d_model) % narrow.d_model
        head = torch.arange(wide.num_heads) % narrow.num_heads
        inside = torch.arange(wide.head_dim) % narrow.head_dim
        self._heads = (head[:, None] * narrow.head_dim + inside).flatten()
        ratio = wide.d_model / narrow.d_model
        self._embedding_gain = 1.0 / math.sqrt(ratio) if narrow.is_embedding_scaled else 1.0
        # The tied projection sums over `ratio` times as many features, each the embedding's: what it reads is made smaller.
        self.logit_gain = 1.0 / (ratio * self._embedding_gain)

    def embed(self, narrow: Transformer, wide: Transformer) -> None:
        """Fill the token table, both position tables and the output side."""
        num_tokens = self._narrow.target_vocab_size
        table, old = wide.decoder.embedding.tokens.weight, narrow.decoder.embedding.tokens.weight
        table[:num_tokens] = old[:, self._residual] * self._embedding_gain
        generator = torch.Generator().manual_seed(SEED)
        table[num_tokens:] = torch.randn(table[num_tokens:].shape, generator=generator) * table[:num_tokens].std()
        for narrow_side, wide_side in ((narrow.encoder, wide.encoder), (narrow.decoder, wide.decoder)):
            wide_side.embedding.positions.copy_(narrow_side.embedding.positions[:, self._residual])
        bias = wide.decoder.output_bias
        assert bias is not None
        bias.fill_(NEVER)
        bias[:num_tokens] = 0.0 if narrow.decoder.output_bias is None else narrow.decoder.output_bias

    def norm(self, narrow: nn.Module, wide: nn.Module, gain: float = 1.0) -> None:
        """Repeat a layer norm, its output multiplied by a gain."""
        assert isinstance(narrow, nn.LayerNorm) and isinstance(wide, nn.LayerNorm)
        wide.weight.copy_(narrow.weight[self._residual] * gain)
        wide.bias.copy_(narrow.bias[self._residual] * gain)

    def layer(self, narrow: nn.Module, wide: EncoderLayer | DecoderLayer) -> None:
        """Widen all parts of a layer."""
        assert isinstance(narrow, type(wide))
        self.attention(narrow.self_attention, wide.self_attention)
        self.feed_forward(narrow.feed_forward, wide.feed_forward)
        self.norm(narrow.self_residual.norm, wide.self_residual.norm)
        self.norm(narrow.feed_residual.norm, wide.feed_residual.norm)
        if isinstance(wide, DecoderLayer):
            assert isinstance(narrow, DecoderLayer)
            self.attention(narrow.cross_attention, wide.cross_attention)
            self.norm(narrow.cross_residual.norm, wide.cross_residual.norm)

    def attention(self, narrow: MultiHeadAttention, wide: MultiHeadAttention) -> None:
        """Widen the projections; scores, which sum over more features and are divided by a larger √Dh, come out the same."""
        widths = self._wide.head_dim / self._narrow.head_dim
        gains = 1.0 / math.sqrt(widths), 1.0, 1.0
        for i, gain in enumerate(gains):
            start = i * self._narrow.d_model
            into, of = self._heads + start, slice(i * self._wide.d_model, (i + 1) * self._wide.d_model)
            wide.input.weight[of] = _spread(narrow.input.weight[into], self._residual) * gain
            wide.input.bias[of] = narrow.input.bias[into] * gain
        wide.output.weight.copy_(_spread(narrow.output.weight[self._residual], self._heads))
        wide.output.bias.copy_(narrow.output.bias[self._residual])

    def feed_forward(self, narrow: FeedForward, wide: FeedForward) -> None:
        """Widen both projections."""
        inner = torch.arange(wide.inner.weight.shape[0]) % narrow.inner.weight.shape[0]
        wide.inner.weight.copy_(_spread(narrow.inner.weight[inner], self._residual))
        wide.inner.bias.copy_(narrow.inner.bias[inner])
        wide.outer.weight.copy_(_spread(narrow.outer.weight[self._residual], inner))
        wide.outer.bias.copy_(narrow.outer.bias[self._residual])


def _spread(weight: Tensor, columns: Tensor) -> Tensor:
    """Let a weight `[out, narrow]` read repeated features: column j of `[out, wide]` reads a copy of feature `columns[j]`."""
    return weight[:, columns] * (weight.shape[1] / len(columns))


def _check(narrow: ModelConfig, wide: ModelConfig) -> None:
    """Raise an error for a model that cannot be widened exactly."""
    if narrow.norm != "pre" or narrow.has_embedding_norm or not (narrow.is_embedding_shared and narrow.is_projection_tied):
        raise ValueError(
            "only a pre-norm model without embedding norm, with one table for embeddings and projection, can be widened"
        )
    if wide.positions != "learned" or not wide.has_output_bias:
        raise ValueError("the wide model needs learned positions and an output bias")
    for name in ("d_model", "num_heads", "head_dim", "encoder_ffn_dim", "decoder_ffn_dim"):
        if getattr(wide, name) % getattr(narrow, name):
            raise ValueError(f"{name}: {getattr(wide, name)} is not a multiple of {getattr(narrow, name)}")
    for name in ("source_vocab_size", "num_encoder_layers", "num_decoder_layers"):
        if getattr(wide, name) < getattr(narrow, name):
            raise ValueError(f"{name}: {getattr(wide, name)} is less than {getattr(narrow, name)}")
    same = replace(wide, **{name: getattr(narrow, name) for name in _WIDENED})
    if same != narrow:
        raise ValueError(f"both models must be the same but for {', '.join(_WIDENED)}")


_WIDENED = (
    "source_vocab_size",
    "target_vocab_size",
    "d_model",
    "num_heads",
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "positions",
    "has_output_bias",
)


def widened_checkpoint(folder: Path = SHIPPED) -> Checkpoint:
    """Load a checkpoint and widen it to Transformer-base's dimensions; it has the same tokeniser.

    Raises:
        CheckpointError: If it cannot be read.
        ValueError: If it cannot be widened.
    """
    narrow = Checkpoint.load(folder)
    wide = widen(transformer_of(narrow.model), base_shape(narrow.model.config))
    return Checkpoint(f"{narrow.name}-{NAME_SUFFIX}", wide, narrow.tokenizers)
