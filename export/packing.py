"""Sources without padding, as an encoder on the CPU takes them: made here for the server and for the gate that proves a bundle.

The server imports this file, so it imports neither torch nor ONNX.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.export.fields import Precision

Ints = NDArray[np.int64]
HALVES: tuple[Precision, ...] = ("fp16", "bf16")


def is_packed(precision: Precision) -> bool:
    """Tell whether an encoder of a precision takes sources packed; those of halves are for devices, and take them padded."""
    return precision not in HALVES


def pack(sources: Sequence[Sequence[int]]) -> dict[str, Ints]:
    """Return an encoder's inputs: the tokens of all sources, one source after the other, and where they belong.

    Returns:
        `src_ids`, `positions` and `cells` `[P]`, `grid` `[B, S]` and `src_lens` `[B]`, see `transformer_encoder.EncoderGraph`.
    """
    lengths = np.array([len(source) for source in sources], np.int64)
    longest, ends = int(lengths.max()), lengths.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    cells = positions + np.repeat(np.arange(len(sources)) * longest, lengths)
    grid = np.zeros(len(sources) * longest, np.int64)
    grid[cells] = np.arange(ends[-1])
    ids = np.fromiter((token for source in sources for token in source), np.int64, int(ends[-1]))
    return {"src_ids": ids, "positions": positions, "cells": cells, "grid": grid.reshape(-1, longest), "src_lens": lengths}
