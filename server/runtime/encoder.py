"""The encoder on the CPU: sources in, what decoder layers attend to out, into rows of a cache or into memory of its own."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.packing import pack
from dragoman.export.tensor_names import PACKED_OUTPUT
from dragoman.server.runtime.block import Buffer, Element
from dragoman.server.runtime.cache import SlotCache

Sources = Sequence[Sequence[int]]

MAX_KEPT_BYTES = 2**26
"""Results up to this size are written where the last ones were: fresh memory takes the system longer to give than to fill."""


class Encoder(Protocol):
    """A graph that encodes."""

    def fill(self, cache: SlotCache, sources: Sources, rows: Sequence[int]) -> None:
        """Encode sources (end-of-sequence included) as one batch, the first into the first of `rows`."""
        ...


class PackedEncoder:
    """Takes the tokens of all sources without padding, and gives all caches' numbers of each token side by side."""

    def __init__(self, session: onnxruntime.InferenceSession, num_columns: int, element_type: Element) -> None:
        """Take a loaded graph, and how many numbers it gives for a token, and of which type."""
        self._session, self._num_columns = session, num_columns
        self._kept: Buffer = np.empty((0, num_columns), element_type)

    def fill(self, cache: SlotCache, sources: Sources, rows: Sequence[int]) -> None:
        """See `Encoder`."""
        cache.write_packed(rows, *self._run(sources))

    def encode(self, sources: Sources) -> list[Buffer]:
        """Encode sources as one batch → each one's tokens `[S, …]` in memory of its own, see `SlotCache.write_packed`."""
        lengths, tokens = self._run(sources)
        return [part.copy() for part in np.split(tokens, lengths.cumsum()[:-1])]

    def _run(self, sources: Sources) -> tuple[NDArray[np.int64], Buffer]:
        """Encode sources → their lengths, and their tokens, which the next batch overwrites."""
        inputs = pack(sources)
        tokens = self._results(len(inputs["src_ids"]))
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        binding.bind_output(PACKED_OUTPUT, "cpu", 0, tokens.dtype.type, tokens.shape, tokens.ctypes.data)
        self._session.run_with_iobinding(binding)
        return inputs["src_lens"], tokens

    def _results(self, num_tokens: int) -> Buffer:
        """Return memory for so many tokens."""
        if num_tokens <= len(self._kept):
            return self._kept[:num_tokens]
        capacity = 1 << (num_tokens - 1).bit_length()
        if capacity * self._num_columns * self._kept.itemsize > MAX_KEPT_BYTES:
            return np.empty((num_tokens, self._num_columns), self._kept.dtype)
        self._kept = np.empty((capacity, self._num_columns), self._kept.dtype)
        return self._kept[:num_tokens]


class PaddedEncoder:
    """Takes sources padded to the longest one, and gives each cache's tensor."""

    def __init__(self, session: onnxruntime.InferenceSession, pad_id: int) -> None:
        """Take a loaded graph, and what to fill short sources up with."""
        self._session, self._pad_id = session, pad_id

    def fill(self, cache: SlotCache, sources: Sources, rows: Sequence[int]) -> None:
        """See `Encoder`."""
        lengths = np.array([len(source) for source in sources], np.int64)
        ids = np.full((len(sources), lengths.max()), self._pad_id, np.int64)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = source
        cache.write_cross(rows, lengths, self._session.run(cache.cross_names, {"src_ids": ids, "src_lens": lengths}))
