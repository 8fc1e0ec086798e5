"""Keys and values of every slot, in buffers that stay where they are.

Buffers are reserved at full size but the operating system gives memory only to the parts that are written, so short sentences
in a large reservation cost what short sentences need.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from export.bundle import Manifest, cross_kv_names, self_kv_names

Buffer = NDArray[np.float32]


class SlotCache:
    """Self-attention caches `[max_rows, H, T, Dh]`, cross-attention caches `[max_rows, H, S, Dh]`, and source lengths.

    Attributes:
        self_kv: Tensor name to buffer; row r holds as many positions as it has decoded.
        cross_kv: Tensor name to buffer; row r holds `source_lengths[r]` positions.
        source_lengths: `[max_rows]`, tokens, end-of-sequence included; 1 for a row that was never used.
    """

    def __init__(self, manifest: Manifest, max_rows: int) -> None:
        """Reserve buffers for the longest source and target that the model takes."""
        self.target_capacity = manifest.max_target_tokens
        self_shape = max_rows, manifest.num_heads, manifest.max_target_tokens, manifest.head_dim
        cross_shape = max_rows, manifest.num_heads, manifest.max_source_tokens, manifest.head_dim
        num_layers = manifest.num_decoder_layers
        self._self_kv = np.zeros((2 * num_layers, *self_shape), np.float32)
        self._cross_kv = np.zeros((2 * num_layers, *cross_shape), np.float32)
        self.self_kv: dict[str, Buffer] = dict(zip(self_kv_names(num_layers), self._self_kv, strict=True))
        self.cross_kv: dict[str, Buffer] = dict(zip(cross_kv_names(num_layers), self._cross_kv, strict=True))
        self.source_lengths = np.ones(max_rows, np.int64)

    @property
    def cross_names(self) -> list[str]:
        """Names of the cross-attention tensors: the encoder's outputs, in the order `write_cross` takes them."""
        return list(self.cross_kv)

    def write_cross(self, rows: Sequence[int], lengths: NDArray[np.int64], tensors: Sequence[Buffer]) -> None:
        """Store encoded sources: tensors `[B, H, S, Dh]`, of which row b goes to `rows[b]` up to `lengths[b]`."""
        for buffer, tensor in zip(self.cross_kv.values(), tensors, strict=True):
            for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                buffer[row, :, :length] = tensor[b, :, :length]
        self.source_lengths[list(rows)] = lengths

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the valid part of a row: its source and the first `length` positions of its self-attention cache."""
        source_length = int(self.source_lengths[source])
        self.copy_positions(source, target, 0, length)
        self._cross_kv[:, target, :, :source_length] = self._cross_kv[:, source, :, :source_length]
        self.source_lengths[target] = source_length

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions `[start, stop)` of a row's self-attention cache."""
        self._self_kv[:, target, :, start:stop] = self._self_kv[:, source, :, start:stop]
