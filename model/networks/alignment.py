"""How a recurrent decoder's state scores the source's tokens: the three ways of the field, behind one interface.

Additive: vᵀ tanh(W q + U k) (Bahdanau et al., 2015). Dot: q · k (Luong et al., 2015). Scaled dot: q · k / √d (Vaswani et al.,
2017).
"""

import math
from typing import Protocol

from torch import Tensor, nn

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import AdditiveAttention


class Alignment(Protocol):
    """Scores of source tokens."""

    def keys(self, values: Tensor) -> Tensor:
        """What scores read of source tokens, worked out once a source: `[N, S, d_model]` → `[N, S, A]`."""
        ...

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Queries `[N, T, d_model]` and keys → scores `[N, T, S]`."""
        ...


class DotAlignment(nn.Module):
    """Scores are products of queries and values, times a factor; keys are the values themselves."""

    def __init__(self, scale: float) -> None:
        """Take the factor."""
        super().__init__()
        self.scale = scale

    def keys(self, values: Tensor) -> Tensor:
        """See `Alignment`."""
        return values

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """See `Alignment`."""
        return (query * self.scale) @ keys.transpose(1, 2)


def alignment(config: ModelConfig) -> AdditiveAttention | DotAlignment | None:
    """Return the configuration's, None where there is no attention."""
    width = config.d_model
    match config.attention:
        case "additive":
            return AdditiveAttention(width, width, config.attention_dim or width)
        case "dot":
            return DotAlignment(1.0)
        case "scaled_dot":
            return DotAlignment(width**-0.5)
        case "none":
            return None


def masked_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores `[..., S]` → weights that sum to 1 over the tokens that there are, at least one, and are 0 elsewhere."""
    return scores.masked_fill(~mask, -math.inf).softmax(-1)
