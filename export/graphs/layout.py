"""How sources lie in a graph that encodes: their tokens as rows, or each source by itself."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Layout(Protocol):
    """How tokens lie as rows, and how they are put side by side for attention."""

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
        """See `Layout`."""
        return F.embedding(self.grid, rows)

    def together(self, sources: Tensor) -> Tensor:
        """See `Layout`."""
        return F.embedding(self.cells, sources.flatten(0, 1))


class Padded:
    """Rows are the sources' tokens and their padding, `[B·S, …]`."""

    def __init__(self, ids: Tensor) -> None:
        """Take ids `[B, S]`."""
        self.grid = ids

    def apart(self, rows: Tensor) -> Tensor:
        """See `Layout`."""
        return rows.unflatten(0, self.grid.shape)  # type: ignore[no-untyped-call, no-any-return]

    def together(self, sources: Tensor) -> Tensor:
        """See `Layout`."""
        return sources.flatten(0, 1)
