"""Position tables of other libraries: those that files leave out are formulas, made here."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

TableMaker = Callable[[int, int], Tensor]


def halves(num_positions: int, d_model: int) -> Tensor:
    """Marian's and Pegasus' table `[num_positions, d_model]`: sin(p / 10000^(2i/d)) in the first half of a row, then cos."""
    angles = np.arange(num_positions)[:, None] / np.power(10000, 2 * np.arange((d_model + 1) // 2) / d_model)
    table = np.concatenate([np.sin(angles), np.cos(angles[:, : d_model // 2])], axis=1)
    return torch.from_numpy(table).float()


def tensor2tensor(num_positions: int, d_model: int) -> Tensor:
    """M2M100's table `[num_positions, d_model]`: halves of sin and cos with frequencies 10000^(-i / (d/2 - 1)).

    It is worked out in single precision, as M2M100 does: of a frequency's rounding a late position sees many times as much.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], 1)
    return torch.cat([table, torch.zeros(num_positions, 1)], 1) if d_model % 2 else table
