"""Key and value caches of all slots in device memory, laid out for a capacity near the longest row in use.

The tensors of a kind are in one block, each with space for the model's longest rows. Within a tensor rows are contiguous at the
current capacity, one of a few, since attention kernels take longer on longer buffers. When a row outgrows it, all rows are moved
apart; addresses of tensors never change, as captured graphs require.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.server.runtime.device.device import Device
from dragoman.server.runtime.device.model import CacheKind, DeviceModel, at_least

# Steps for which a smaller capacity must have been enough before it is used.
SHRINK_PATIENCE = 256


class DeviceTensors:
    """The caches of one kind, `[max_rows, H, capacity, Dh]` each; the tensors are `pitch` bytes apart from `address`."""

    def __init__(self, device: Device, kind: CacheKind, max_rows: int, capacities: tuple[int, ...]) -> None:
        """Reserve the tensors at the smallest capacity; raise `OutOfDeviceMemory` if they do not fit."""
        self.capacities, self.capacity = capacities, capacities[0]
        self.kind = kind
        self._num_pieces, self._num_tensors, self._position_bytes = kind.num_pieces, kind.num_tensors, kind.position_bytes
        self.pitch = max_rows * self.row_bytes_at(capacities[-1])
        self.address = device.allocate(self._num_tensors * self.pitch)
        self._device = device
        self._num_roomy_steps = 0

    @property
    def addresses(self) -> list[int]:
        """Address of each tensor: keys, then values, layer by layer."""
        return [self.address + i * self.pitch for i in range(self._num_tensors)]

    @property
    def row_bytes(self) -> int:
        return self.row_bytes_at(self.capacity)

    @property
    def num_bytes(self) -> int:
        return self._num_tensors * self.pitch

    def row_bytes_at(self, capacity: int) -> int:
        """Return the size of one row of one tensor at a capacity."""
        return self._num_pieces * capacity * self._position_bytes

    def copy_row(self, source: int, target: int) -> None:
        """Copy a whole row of every tensor, valid or not, in one call."""
        if source != target:
            size = self.row_bytes
            self._device.copy_pieces(
                self.address + target * size, self.pitch, self.address + source * size, self.pitch, size, self._num_tensors
            )

    def write(self, row: int, sources: Sequence[int], padded_length: int, length: int, num_rows: int) -> None:
        """Store the first `length` positions of tensors `[B, H, padded_length, Dh]` in consecutive rows from `row`."""
        pitch, size = (positions * self._position_bytes for positions in (padded_length, length))
        for address, source in zip(self.addresses, sources, strict=True):
            target = address + row * self.row_bytes
            self._device.copy_pieces(target, self.capacity * self._position_bytes, source, pitch, size, num_rows * self._num_pieces)

    def fit(self, needed: int, num_rows: int, scratch: int) -> None:
        """Choose a capacity for `needed` positions of the longest row; a smaller one only after `SHRINK_PATIENCE` steps.

        Contents of rows beyond `num_rows` are lost; `scratch` is memory for one tensor, if there are several capacities.
        """
        wanted = at_least(self.capacities, needed)
        if wanted > self.capacity:
            self._lay_out(wanted, num_rows, scratch)
        elif wanted < self.capacity:
            self._num_roomy_steps += 1
            if self._num_roomy_steps >= SHRINK_PATIENCE:
                self._lay_out(wanted, num_rows, scratch)
        else:
            self._num_roomy_steps = 0

    def empty(self) -> None:
        """Return to the smallest capacity; contents are lost."""
        self._lay_out(self.capacities[0], 0, 0)

    def _lay_out(self, capacity: int, num_rows: int, scratch: int) -> None:
        """Move rows to another capacity, each tensor through the scratch memory."""
        old, new = self.capacity * self._position_bytes, capacity * self._position_bytes
        pieces = num_rows * self._num_pieces
        for address in self.addresses if pieces else ():
            self._device.copy_pieces(scratch, new, address, old, min(old, new), pieces)
            self._device.copy(address, scratch, pieces * new)
        self.capacity, self._num_roomy_steps = capacity, 0


class DeviceCache:
    """The caches of both kinds, and the source length of each row `[max_rows]` in host memory, 1 for a row never used."""

    def __init__(
        self, device: Device, model: DeviceModel, max_rows: int, targets: tuple[int, ...], sources: tuple[int, ...]
    ) -> None:
        """Reserve all memory for ascending capacities of both kinds; raise `OutOfDeviceMemory` if it does not fit."""
        self.self_kv = DeviceTensors(device, model.self_kv, max_rows, targets)
        self.cross_kv = DeviceTensors(device, model.cross_kv, max_rows, sources)
        self.source_lengths: NDArray[np.int64] = np.ones(max_rows, np.int64)
        moved = [tensors.pitch for tensors in (self.self_kv, self.cross_kv) if len(tensors.capacities) > 1]
        self._scratch = device.allocate(max(moved)) if moved else 0
        self._scratch_bytes = max(moved, default=0)
        self._num_rows = 0

    @property
    def num_bytes_reserved(self) -> int:
        """Device memory reserved, scratch included."""
        return self.self_kv.num_bytes + self.cross_kv.num_bytes + self._scratch_bytes

    def write_cross(self, rows: Sequence[int], lengths: NDArray[np.int64], tensors: Sequence[int], padded_length: int) -> None:
        """Store encoded sources: tensors `[B, H, S, Dh]`, of which row b goes to `rows[b]`, ascending.

        Consecutive rows are stored in one call, with padding, which no row attends to.
        """
        self._num_rows = max(self._num_rows, rows[-1] + 1)
        longest = int(lengths.max())
        self.cross_kv.fit(max(longest, int(self.source_lengths[: self._num_rows].max())), self._num_rows, self._scratch)
        first = 0
        for b in range(1, len(rows) + 1):
            if b < len(rows) and rows[b] == rows[b - 1] + 1:
                continue
            offset = first * self.cross_kv.row_bytes_at(padded_length)
            self.cross_kv.write(rows[first], [address + offset for address in tensors], padded_length, longest, b - first)
            first = b
        self.source_lengths[list(rows)] = lengths

    def empty(self) -> None:
        self._num_rows = 0
        self.source_lengths.fill(1)
        self.self_kv.empty()
        self.cross_kv.empty()

    def fit(self, num_rows: int, num_positions: int) -> None:
        """Prepare a step of rows `[0, num_rows)`, the longest with `num_positions` after it; other rows become empty."""
        self._num_rows = num_rows
        self.self_kv.fit(num_positions, num_rows, self._scratch)
        self.cross_kv.fit(int(self.source_lengths[:num_rows].max()), num_rows, self._scratch)

    def copy_row(self, source: int, target: int) -> None:
        self._num_rows = max(self._num_rows, target + 1)
        self.self_kv.copy_row(source, target)
        self.cross_kv.copy_row(source, target)
        self.source_lengths[target] = self.source_lengths[source]

    def copy_self(self, source: int, target: int) -> None:
        """Copy the self-attention caches of a row to another with the same source."""
        self.self_kv.copy_row(source, target)
