"""Encoder on a device; its outputs, cross-attention keys and values, stay in device memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.server.runtime.device.device import Device
from dragoman.server.runtime.device.model import DeviceModel, at_least, padded_sizes


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded batch of `[B]` source lengths, padded to `padded_length` S.

    `tensors` are addresses of keys and values `[B, H, S, Dh]`, layer by layer, valid until the next batch; the rest is padding.
    """

    lengths: NDArray[np.int64]
    padded_length: int
    tensors: list[int]


class DeviceEncoder:
    """Encoder for batches that fit into the memory of outputs and session.

    Rows and positions are padded to a few sizes: kernels are planned for few shapes, and arena chunks are reused. A padding row is
    a source of one token.
    """

    def __init__(self, device: Device, model: DeviceModel, session: onnxruntime.InferenceSession, max_positions: int) -> None:
        """Reserve outputs of `max_positions` = B · S, at least the longest source; raise `OutOfDeviceMemory` if they do not fit."""
        self.max_positions = max_positions
        self._device, self._model, self._session = device, model, session
        self._row_sizes, self._lengths = padded_sizes(max_positions), padded_sizes(model.max_source_tokens)
        self._kind = model.cross_kv
        self._pitch = max_positions * self._kind.token_bytes
        self._output = device.allocate(self._kind.num_tensors * self._pitch)
        self._input = device.allocate(16 * max_positions)
        self._staged = device.allocate_host(16 * max_positions).view(np.int64)

    def num_fitting(self, lengths: Sequence[int]) -> int:
        """Return how many of the first sources can be encoded together, at least one."""
        longest = count = 0
        for length in lengths:
            longest = max(longest, length)
            if count and (count >= self.max_positions or self._num_positions(count + 1, longest) > self.max_positions):
                break
            count += 1
        return count

    def padded_shape(self, num_rows: int, longest: int) -> tuple[int, int]:
        return at_least(self._row_sizes, num_rows), at_least(self._lengths, longest)

    def _num_positions(self, num_rows: int, longest: int) -> int:
        padded_rows, padded_length = self.padded_shape(num_rows, longest)
        return padded_rows * padded_length

    def shrink(self, lengths: Sequence[int]) -> bool:
        """Halve the batch size after a batch did not fit; return False for a single source."""
        if len(lengths) == 1:
            return False
        self.max_positions = self._num_positions(len(lengths), max(lengths)) // 2
        return True

    def encode(self, sources: Sequence[Sequence[int]]) -> Encoded:
        """Encode a batch of `num_fitting` sources; raise `OutOfDeviceMemory` if the session needs more than is free."""
        lengths = np.array([len(source) for source in sources], np.int64)
        num_rows, longest = self.padded_shape(len(sources), int(lengths.max()))
        staged = self._staged[: num_rows * (longest + 1)]
        ids = staged[: num_rows * longest].reshape(num_rows, longest)
        ids.fill(self._model.pad_id)
        for row, source in zip(ids, sources, strict=False):
            row[: len(source)] = source
        staged_lengths = staged[num_rows * longest :]
        staged_lengths[: len(sources)], staged_lengths[len(sources) :] = lengths, 1
        self._device.upload(self._input, staged)
        binding = self._session.io_binding()
        where = self._device.kind, self._device.ordinal
        binding.bind_input("src_ids", *where, np.int64, ids.shape, self._input)
        binding.bind_input("src_lens", *where, np.int64, (num_rows,), self._input + ids.nbytes)
        shape = self._kind.shape(num_rows, longest)
        tensors = [self._output + i * self._pitch for i in range(self._kind.num_tensors)]
        for name, address in zip(self._kind.names, tensors, strict=True):
            binding.bind_output(name, *where, self._model.element_type, shape, address)
        self._device.run(self._session, binding, onnxruntime.RunOptions())
        return Encoded(lengths, longest, tensors)
