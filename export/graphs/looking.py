"""How a recurrent decoder's step looks at the source in the graph: one attention node with one head as wide as a state.

The operator is that of the Transformer's graphs, whose sums run over a row's own source and no further: a row has the same bits
whatever room there is beyond it. A product of plain matrices would sum over the room. Dot products are the operator's own; scores
of another kind are added to products with a query of zeros.
"""

import torch
from torch import Tensor

from dragoman.export.graphs.attention import Heads, group_query_attention
from dragoman.export.recording import axis_size, write_node
from dragoman.model.networks.attention import AdditiveAttention
from dragoman.model.networks.rnn import DotAlignment

LANES = 8
"""The operator takes heads of a multiple of so many numbers."""


class CachedSource:
    """Encoded sources in caches with room to spare; see `rnn.Looked`."""

    def __init__(self, alignment: AdditiveAttention | DotAlignment, keys: Tensor, values: Tensor, source_lengths: Tensor) -> None:
        """Take the caches `[N, S, A]` and `[N, S, padded_width(d_model)]`, and the tokens of each row's source, `[N]`."""
        self.alignment, self.keys = alignment, keys
        self.values = values.unsqueeze(1)
        self.last_positions = (source_lengths - 1).to(torch.int32)
        self.capacity = axis_size(values, 1)

    def look(self, query: Tensor) -> Tensor:
        """See `Looked`."""
        bias, scale, asked = None, 1.0, pad_columns(query).unsqueeze(1)
        if isinstance(self.alignment, DotAlignment):
            scale = self.alignment.scale
        else:
            bias = self.alignment.scores(query.unsqueeze(1), self.keys).unsqueeze(1)
            asked = asked * 0.0
        nothing, past = asked[:, :0], (self.values, self.values)
        added = nothing, nothing
        mixed = group_query_attention(asked, added, past, self.last_positions, self.capacity, Heads(1, scale), bias)[0]
        return drop_columns(mixed.squeeze(1), query.shape[-1])


def padded_width(width: int) -> int:
    """Return how wide states and values are for the operator."""
    return -(-width // LANES) * LANES


def pad_columns(x: Tensor) -> Tensor:
    """Fill rows `[…, d]` up with zeros, where the operator wants them wider."""
    width = x.shape[-1]
    missing = padded_width(width) - width
    if not missing:
        return x
    pads = torch.tensor([0] * len(x.shape) + [0] * (len(x.shape) - 1) + [missing])
    (wider,) = write_node("Pad", (x, pads), ((*x.shape[:-1], width + missing),), (x.dtype,))
    return wider  # type: ignore[no-any-return]


def drop_columns(x: Tensor, width: int) -> Tensor:
    """Undo it: rows `[N, …]` → `[N, width]`."""
    return x if x.shape[-1] == width else x[:, :width]
