"""The encoder of a device: sources in, cross-attention keys and values out, in memory that stays on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.server.runtime.device.device import Device
from dragoman.server.runtime.device.model import DeviceModel


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch that has been encoded.

    Attributes:
        lengths: `[B]`, tokens of each source.
        padded_length: S, the longest.
        tensors: Address of each tensor `[B, H, S, Dh]`, keys, then values, layer by layer; the next batch overwrites them.
    """

    lengths: NDArray[np.int64]
    padded_length: int
    tensors: list[int]


class DeviceEncoder:
    """Runs the encoder on batches that fit into what is reserved for its outputs, and into what has proved to fit."""

    def __init__(self, device: Device, model: DeviceModel, session: onnxruntime.InferenceSession, max_positions: int) -> None:
        """Reserve memory for the outputs.

        Args:
            device: Where.
            model: Its dimensions.
            session: Of the encoder.
            max_positions: B · S at the most; at least the longest source.

        Raises:
            OutOfDeviceMemory: If they do not fit.
        """
        self.max_positions = max_positions
        self._device, self._model, self._session = device, model, session
        self._kind = model.cross_kv
        self._pitch = max_positions * self._kind.token_bytes
        self._output = device.allocate(self._kind.num_tensors * self._pitch)
        self._input = device.allocate(16 * max_positions)
        self._staged = device.allocate_host(16 * max_positions).view(np.int64)

    def num_fitting(self, lengths: Sequence[int]) -> int:
        """Return how many of the first sources can be encoded together; one always can be tried."""
        longest = count = 0
        for length in lengths:
            longest = max(longest, length)
            if count and longest * (count + 1) > self.max_positions:
                break
            count += 1
        return count

    def shrink(self, lengths: Sequence[int]) -> bool:
        """Take smaller batches from now on, for one has proved too large; return whether there is a smaller one to try."""
        if len(lengths) == 1:
            return False
        self.max_positions = max(lengths) * len(lengths) // 2
        return True

    def encode(self, sources: Sequence[Sequence[int]]) -> Encoded:
        """Encode a batch that `num_fitting` has allowed.

        Raises:
            OutOfDeviceMemory: If it does not fit all the same.
        """
        lengths = np.array([len(source) for source in sources], np.int64)
        num_rows, longest = len(sources), int(lengths.max())
        staged = self._staged[: num_rows * (longest + 1)]
        ids = staged[: num_rows * longest].reshape(num_rows, longest)
        ids.fill(self._model.pad_id)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = source
        staged[num_rows * longest :] = lengths
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
