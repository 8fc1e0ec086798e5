"""The encoder on the CPU: sources in, what decoder layers attend to out, into rows of a cache or into memory of its own."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.packing import pack
from dragoman.export.tensor_names import PACKED_OUTPUT, STATES_OUTPUT
from dragoman.server.runtime.binding import bind_input, bind_output
from dragoman.server.runtime.block import Buffer
from dragoman.server.runtime.cache import SlotCache
from dragoman.server.runtime.runner import Held

Sources = Sequence[Sequence[int]]

MAX_KEPT_BYTES = 2**26
"""Results up to this size are written where the last ones were: fresh memory takes the system longer to give than to fill."""


class Encoder(Protocol):
    """A graph that encodes."""

    def fill(self, cache: SlotCache, sources: Sources, rows: Sequence[int]) -> None:
        """Encode sources (end-of-sequence included) as one batch, the first into the first of `rows`."""
        ...


class PackedEncoder:
    """Takes the tokens of all sources without padding, and gives all caches' numbers side by side, of each token and source."""

    def __init__(self, session: onnxruntime.InferenceSession, cache: SlotCache) -> None:
        """Take a loaded graph, and a cache of the kind that it fills, which says how many numbers it gives, and of which type."""
        self._session = session
        self._num_columns, self._num_state_columns = cache.token_columns, cache.state_columns
        self._kept: Buffer = np.empty((0, self._num_columns), cache.token_type)

    def fill(self, cache: SlotCache, sources: Sources, rows: Sequence[int]) -> None:
        """See `Encoder`."""
        cache.write_packed(rows, *self._run(sources))

    def encode(self, sources: Sources) -> list[Held]:
        """Encode sources as one batch, each into memory of its own."""
        lengths, tokens, states = self._run(sources)
        parts = np.split(tokens, lengths.cumsum()[:-1])
        return [Held(part.copy(), state.copy()) for part, state in zip(parts, states, strict=True)]

    def _run(self, sources: Sources) -> tuple[NDArray[np.int64], Buffer, Buffer]:
        """Encode sources → their lengths, their tokens, which the next batch overwrites, and their states."""
        inputs = pack(sources)
        tokens = self._results(len(inputs["src_ids"]))
        states = np.empty((len(sources), self._num_state_columns), tokens.dtype)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            bind_input(binding, name, array)
        for name, output in ((PACKED_OUTPUT, tokens), (STATES_OUTPUT, states)):
            if output.shape[1]:
                bind_output(binding, name, output)
        self._session.run_with_iobinding(binding)
        return inputs["src_lens"], tokens, states

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
