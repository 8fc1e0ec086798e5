"""Norms over the residual stream."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w (Zhang and Sennrich, 2019): no mean is taken off, and there is no bias."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the weight, all ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.epsilon = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """`[..., d_model]` → `[..., d_model]`, computed as precisely as the input is, and given as precisely as the weight is."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon).to(self.weight.dtype)


def norm(config: ModelConfig) -> nn.Module:
    """Return a fresh norm of the configuration's kind."""
    return RMSNorm(config) if config.norm_kind == "rms" else nn.LayerNorm(config.d_model, config.norm_epsilon)
