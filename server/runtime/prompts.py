"""Prompts on the CPU: read piece by piece into the caches that steps write, where the answer follows them."""

from collections.abc import Sequence

import numpy as np
import onnxruntime

from dragoman.export.tensor_names import output_name
from dragoman.server.runtime.binding import bind_input, bind_output
from dragoman.server.runtime.cache import SlotCache
from dragoman.server.runtime.encoder import Sources


class PromptReader:
    """Reads a piece of one row's prompt at a time; what stands in the row before it is where the graph finds it and writes on."""

    def __init__(self, session: onnxruntime.InferenceSession, cache: SlotCache) -> None:
        """Take a loaded graph and the caches that it writes."""
        self._session, self._cache = session, cache

    def fill(self, cache: SlotCache, sources: Sources, rows: Sequence[int]) -> None:
        """See `Encoder`: each prompt is read whole, one after the other."""
        assert cache is self._cache
        for source, row in zip(sources, rows, strict=True):
            self.read(row, source, 0, len(source))

    def read(self, row: int, source_ids: Sequence[int], first: int, stop: int) -> None:
        """See `Reader`."""
        cache = self._cache
        if first == 0:
            cache.begin_prompt(row)
        if first == stop:
            return
        assert first == cache.source_lengths[row], "a piece that does not follow what has been read"
        cache.make_target_room(stop + 1)  # the graph may write a place more, which whatever comes next overwrites
        inputs = {
            "src_ids": np.array(source_ids[first:stop], np.int64),
            "positions": np.arange(first, stop),
            "src_lens": np.array([stop]),
        }
        binding = self._session.io_binding()
        for name, array in inputs.items():
            bind_input(binding, name, array)
        for name, buffer in cache.self_kv.items():
            bind_input(binding, name, buffer[row : row + 1])
            bind_output(binding, output_name(name), buffer[row : row + 1])
        self._session.run_with_iobinding(binding)
        cache.note_read(row, stop)
