"""Layers common to all networks, and a decoder's output: logits and log-probabilities of the next token."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.config import ModelConfig


class Predictor(nn.Module, ABC):
    """A decoder's last part. The decoder itself is what inherits from it, and has the target's token table.

    Attributes:
        projection: The output projection; None where it is the token table.
        output_bias: `[V]`, where there is one.
    """

    padding_logits: Tensor
    pad_ids: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.projection = None if config.is_projection_tied else linear(config.d_model, config.target_vocab_size, False)
        self.output_bias = nn.Parameter(torch.zeros(config.target_vocab_size)) if config.has_output_bias else None
        padding_logits = torch.zeros(config.target_vocab_size)
        padding_logits[config.pad_id] = -math.inf
        self.register_buffer("padding_logits", padding_logits, persistent=False)
        self.register_buffer("pad_ids", torch.tensor([config.pad_id]), persistent=False)
        self.padding = config.padding

    @property
    @abstractmethod
    def tokens(self) -> nn.Embedding:
        """The target's token table."""

    @property
    def output_weight(self) -> Tensor:
        """The output projection `[V, d_model]`: the target embedding where the configuration ties them."""
        return self.tokens.weight if self.projection is None else self.projection.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., d_model]` → logits `[..., V]`."""
        return F.linear(at_least_single(hidden), at_least_single(self.output_weight), self.output_bias)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., d_model]` → the next token's log-probabilities `[..., V]`, as `ModelConfig.padding` has them."""
        logits = self.logits(hidden)
        if self.padding == "excluded":
            logits = logits + self.padding_logits
        log_probs = logits.log_softmax(-1)
        return log_probs.index_fill(-1, self.pad_ids, -math.inf) if self.padding == "masked" else log_probs


def at_least_single(x: Tensor) -> Tensor:
    """Return `x` in single precision if it has less; a model in half precision computes embeddings and logits so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(input_dim: int, output_dim: int, has_bias: bool = True) -> nn.Linear:
    """Linear map with Xavier-uniform weights and zero bias."""
    layer = nn.Linear(input_dim, output_dim, has_bias)
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def embedding_scale(config: ModelConfig) -> float:
    """Return the factor of embeddings."""
    return math.sqrt(config.d_model) if config.is_embedding_scaled else 1.0


def token_tables(config: ModelConfig) -> tuple[nn.Embedding, nn.Embedding]:
    """Return the source's table and the target's, which are one where the configuration shares it."""
    source = token_table(config.source_vocab_size, config)
    return source, source if config.is_embedding_shared else token_table(config.target_vocab_size, config)


def token_table(vocab_size: int, config: ModelConfig) -> nn.Embedding:
    """Token embedding with standard deviation 1/√d_model, so that scaled embeddings start at unit variance."""
    table = nn.Embedding(vocab_size, config.d_model)
    nn.init.normal_(table.weight, std=config.d_model**-0.5)
    return table


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w (Zhang and Sennrich, 2019): no mean is taken off, and there is no bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.epsilon = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """`[..., d_model]` → `[..., d_model]`, computed as precisely as the input is, and given as precisely as the weight is."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon).to(self.weight.dtype)


def norm(config: ModelConfig) -> nn.Module:
    """Return a fresh norm of the configuration's kind."""
    return RMSNorm(config) if config.norm_kind == "rms" else nn.LayerNorm(config.d_model, config.norm_epsilon)


LEVELS = 2**16


class Dropout(nn.Module):
    """Zero elements with probability `p` and scale the others by 1 / (1 - p) (Srivastava et al., 2014).

    PyTorch draws a number of its own for every element, one after the other on CPUs that are not Intel's, which is a good
    part of a training step. This draws 64 bits at a time from the same generator and decides four elements with them; `p` is
    rounded to a multiple of 1 / 65,536. Other devices keep PyTorch's kernel.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def extra_repr(self) -> str:
        """Name the probability where the module is printed."""
        return f"p={self.p}"

    def forward(self, x: Tensor) -> Tensor:
        """`[...]` → `[...]`."""
        if not self.training or not self.p:
            return x
        if not x.is_cpu:
            return F.dropout(x, self.p)
        dropped = min(round(self.p * LEVELS), LEVELS - 1)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        draws = words.view(torch.int16)[: x.numel()].view(x.shape)
        return x * ((draws >= dropped - LEVELS // 2).to(x.dtype) * (LEVELS / (LEVELS - dropped)))
