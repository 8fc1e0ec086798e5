"""Rows of token ids of different lengths, as one tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dragoman.model.ids import Ids


def pad(rows: Sequence[Ids], pad_id: int) -> Tensor:
    """Stack rows of different lengths into `[B, longest]`, filled up on the right."""
    table = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table)
