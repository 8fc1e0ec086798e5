"""Common parts of graphs of one kind for all architectures: inputs, candidates of a step, and layouts of sources."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.export.recording import Recorder, write_node
from dragoman.export.tracing import GraphModule

PACKED_AXES = {"src_ids": ("P",), "positions": ("P",), "cells": ("P",), "grid": ("B", "S"), "src_lens": ("B",)}
PAIR_AXES = {"src_ids": ("B", "S"), "src_lens": ("B",), "tgt_ids": ("B", "T"), "tgt_lens": ("B",), "labels": ("B", "T")}


class Stepping(GraphModule):
    """A graph that decodes one token for each of N rows."""

    part = "decoder"
    shortlist: Tensor | None  # ids that candidates are of, rising; None for all

    def rows(self, recorder: Recorder) -> dict[str, Any]:
        """Add the inputs that come before the caches."""
        vectors = {name: recorder.input(name, ("N",)) for name in ("prev_ids", "positions", "src_lens")}
        return {**vectors, "num_candidates": recorder.input("num_candidates", (1,))}

    def likeliest(self, log_probs: Tensor, num_candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Choose from `[N, V]` the K likeliest ids, of equals the lower one first, and their log-probabilities, `[N, K]` each."""
        shape = log_probs.shape[0], "K"
        values, ids = write_node("TopK", (log_probs, num_candidates), (shape, shape), (torch.float32, torch.int64), axis=-1)
        if self.shortlist is not None:
            (ids,) = write_node("Gather", (self.shortlist, ids), (shape,), (torch.int64,))
        return ids, values


class Layout(Protocol):
    """Layout of tokens: packed as rows, and padded for attention."""

    grid: Tensor
    """Any tensor `[B, S]`."""

    def apart(self, rows: Tensor) -> Tensor:
        """Give every source a row of its own: `[P, …]` → `[B, S, …]`, in which what is beyond a source's length is any number."""
        ...

    def together(self, sources: Tensor) -> Tensor:
        """Undo it: `[B, S, …]` → `[P, …]`."""
        ...


class Packed:
    """Rows are the tokens of all sources, one source after the other."""

    def __init__(self, grid: Tensor, cells: Tensor) -> None:
        """Take which token stands where, `[B, S]`, anyone where none does, and where each token stands, `[P]` in `[B·S]`."""
        self.grid, self.cells = grid, cells

    def apart(self, rows: Tensor) -> Tensor:
        return F.embedding(self.grid, rows)

    def together(self, sources: Tensor) -> Tensor:
        return F.embedding(self.cells, sources.flatten(0, 1))


class Padded:
    """Rows are the sources' tokens and their padding, `[B·S, …]`."""

    def __init__(self, ids: Tensor) -> None:
        """Take ids `[B, S]`."""
        self.grid = ids

    def apart(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, self.grid.shape)  # type: ignore[no-untyped-call, no-any-return]

    def together(self, sources: Tensor) -> Tensor:
        return sources.flatten(0, 1)
