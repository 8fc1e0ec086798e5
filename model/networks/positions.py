"""Positions: the sinusoidal table, relative biases (Raffel et al., 2020, section 2.1) and rotary angles (Su et al., 2021).

Relative distances go into buckets: near ones have one each, farther ones share, in steps that grow with the logarithm of the
distance. Rotary positions turn queries and keys, pair by pair of numbers; number i of a head's first half and number i of its
second half make a pair, as in Llama and its descendants.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.model.config import ModelConfig


class RelativeBias(nn.Module):
    """A table of buckets and heads, whose rows are added to the scores of self-attention."""

    buckets: Tensor

    def __init__(self, config: ModelConfig, is_causal: bool) -> None:
        """Create the table `[relative_buckets, H]`; a causal one has all its buckets for what came before."""
        super().__init__()
        self.is_causal = is_causal
        self.max_distance = config.relative_max_distance
        self.weight = nn.Parameter(torch.randn(config.relative_buckets, config.num_heads) * config.d_model**-0.5)
        first = 0 if is_causal else -self.max_distance
        distances = torch.arange(first, self.max_distance + 1)
        self.register_buffer("buckets", bucket_of(distances, config, is_causal), persistent=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Look up what is added to scores: positions of queries `[N, T]` and of keys `[S]` → `[N, H, T, S]`.

        Beyond the farthest distance all have one bucket, so the table has a row a distance and ends there, whatever the lengths.
        """
        of_distance = F.embedding(self.buckets, self.weight)
        if self.is_causal:
            rows = (queries[:, :, None] - keys).clamp(0, self.max_distance)
        else:
            rows = (keys - queries[:, :, None]).clamp(-self.max_distance, self.max_distance) + self.max_distance
        bias: Tensor = F.embedding(rows, of_distance).permute(0, 3, 1, 2)
        return bias


def bucket_of(distances: Tensor, config: ModelConfig, is_causal: bool) -> Tensor:
    """Return the bucket of each distance.

    Args:
        distances: Query minus key in a causal decoder, at least 0; key minus query in the encoder.
        config: Of the model.
        is_causal: Which of the two it is. The encoder's keys after the query have the second half of the buckets.
    """
    num_buckets = config.relative_buckets if is_causal else config.relative_buckets // 2
    num_exact = num_buckets // 2
    far = distances.abs()
    # In single precision, as the models were trained: where a step falls depends on the last bit.
    steps = torch.log(far.clamp(min=1).float() / num_exact) / math.log(config.relative_max_distance / num_exact)
    shared = (num_exact + (steps * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    buckets = torch.where(far < num_exact, far, shared)
    return buckets if is_causal else buckets + (distances > 0) * num_buckets


def relative_bias(config: ModelConfig, num_layers: int, is_causal: bool) -> nn.Module | None:
    """Return one side's table, or its layers' tables, or nothing where positions are of another kind."""
    if config.positions != "relative":
        return None
    if not config.has_relative_bias_per_layer:
        return RelativeBias(config, is_causal)
    return nn.ModuleList(RelativeBias(config, is_causal) for _ in range(num_layers))


def bias_of_layer(tables: nn.Module | None, layer: int) -> RelativeBias | None:
    """Return the table that a layer reads."""
    table = tables[layer] if isinstance(tables, nn.ModuleList) else tables
    assert table is None or isinstance(table, RelativeBias)
    return table


def angles(num_positions: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position's angles, `[num_positions, Dh / 2]`: position / base^(2i / Dh)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    table = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return table.cos().float(), table.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys `[B, H, T, Dh]` by angles of which these are the cosines and sines, `[T, Dh / 2]` each."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def sinusoids(num_positions: int, d_model: int) -> Tensor:
    """Position table `[num_positions, d_model]`: sin(p / 10000^(2i/d)) in even columns, cos in odd (section 3.5)."""
    position = torch.arange(num_positions, dtype=torch.float64)[:, None]
    angle = position * torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()
