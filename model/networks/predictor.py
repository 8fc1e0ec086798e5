"""What is made of hidden states: the next token's logits and log-probabilities; and the layers that all networks are made of."""

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
        """Create the projection, where it has weights of its own, and what padding is given."""
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
    """What embeddings are multiplied by."""
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
