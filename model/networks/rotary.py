"""Rotary positions: queries and keys are turned, pair by pair of numbers, by angles that grow with the position (Su et al., 2021).

A score then depends on the distance of the two positions alone. Number i of a head's first half and number i of its second half
make a pair, as in Llama and its descendants.
"""

import torch
from torch import Tensor


def angles(num_positions: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position's angles, `[num_positions, Dh / 2]`: position / base^(2i / Dh)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    table = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return table.cos().float(), table.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys `[B, H, T, Dh]` by angles of which these are the cosines and sines, `[T, Dh / 2]` each."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
