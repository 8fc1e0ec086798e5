"""The CPU runner on ONNX Runtime."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle, Manifest
from dragoman.export.packing import pack
from dragoman.export.tensor_names import PACKED_OUTPUT, STATES_OUTPUT, output_name
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.runtime.cache import Buffer, SlotCache
from dragoman.server.runtime.runner import Held, Holder, Reader
from dragoman.server.runtime.weights import Weights


def bind_input(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    """Have a graph read an array where it lies, which is to stay there while the binding is used."""
    assert array.flags.c_contiguous
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def bind_output(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    """Have a graph write an output into an array; otherwise as `bind_input`."""
    assert array.flags.c_contiguous
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


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


# Bindings with more candidates are rare, and their buffers large: they are made anew each time.
MAX_KEPT_CANDIDATES = 256
# A binding takes 0.1 ms to make; of those that are kept the oldest goes first.
MAX_KEPT_BINDINGS = 256


class OnnxRunner:
    """See `runner.Runner`. Caches are bound by address, once for each number of rows, and copied by a step only when they grow."""

    device = "cpu"
    graphs = None
    memory: Mapping[str, int] = MappingProxyType({})

    def __init__(self, bundle: Bundle, max_rows: int, num_threads: int, weights: Weights | None = None) -> None:
        """Load both graphs.

        Args:
            bundle: Opened, and therefore checked.
            max_rows: Rows of the decode batch at the most.
            num_threads: Threads of ONNX Runtime's pool, this one included; both sessions run on them in turn.
            weights: What opens the graphs; from the bundle, where it is left out.
        """
        manifest = bundle.manifest
        self.max_rows = max_rows
        self.cache = SlotCache(manifest, max_rows)
        self.weights = weights or Weights(bundle)
        encoder = self.weights.open(bundle.encoder_path, num_threads)
        self._encoder = _encoder_of(manifest, encoder, self.cache)
        self._decoder = self.weights.open(bundle.decoder_path, num_threads)
        self._tokens = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int64)
        self._num_candidates = np.ones(1, np.int64)
        self._buffers: dict[int, Candidates] = {}
        self._bindings: dict[tuple[int, int], tuple[onnxruntime.IOBinding, Candidates]] = {}
        self._num_moves_bound = 0

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """See `Runner`."""
        self._encoder.fill(self.cache, sources, rows)

    @property
    def holder(self) -> Holder | None:
        """See `Runner`: sources that come padded go into rows at once."""
        return self if isinstance(self._encoder, PackedEncoder) else None

    @property
    def reader(self) -> Reader | None:
        """See `Runner`."""
        return self._encoder if isinstance(self._encoder, PromptReader) else None

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Held]:
        """See `Holder`."""
        assert isinstance(self._encoder, PackedEncoder)
        return self._encoder.encode(sources)

    def place(self, held: Sequence[Held], rows: Sequence[int]) -> None:
        """See `Holder`."""
        for one, row in zip(held, rows, strict=True):
            self.cache.write_packed([row], np.array([len(one.tokens)]), one.tokens, one.states[None])

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """See `Runner`."""
        num_rows = len(tokens)
        assert 0 < num_rows <= self.max_rows
        self.cache.make_room(positions)
        self._tokens[:num_rows] = tokens
        self._positions[:num_rows] = positions
        self._num_candidates[0] = num_candidates
        binding, candidates = self._bound(num_rows, num_candidates)
        self._decoder.run_with_iobinding(binding)
        return candidates

    def look(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """See `Runner`."""
        num_rows = len(tokens)
        self._tokens[first_row : first_row + num_rows] = tokens
        self._positions[first_row : first_row + num_rows] = positions
        self._num_candidates[0] = num_candidates
        shape = num_rows, num_candidates
        candidates = Candidates(np.empty(shape, np.int64), np.empty(shape, np.float32))
        self._decoder.run_with_iobinding(self._bind(first_row, candidates))
        return candidates

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See `Runner`."""
        self.cache.copy_row(source, target, length)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """See `Runner`."""
        self.cache.copy_positions(source, target, start, stop)

    def cache_bytes(self) -> tuple[int, int]:
        """See `Runner`."""
        return self.cache.num_bytes_reserved, self.cache.num_bytes_used

    def _bound(self, num_rows: int, num_candidates: int) -> tuple[onnxruntime.IOBinding, Candidates]:
        """Return a binding to where the caches are now, a kept one if there is one."""
        if self._num_moves_bound != self.cache.num_moves:
            self._bindings.clear()  # they point to memory that is gone
            self._num_moves_bound = self.cache.num_moves
        key = num_rows, num_candidates
        if (bound := self._bindings.get(key)) is None:
            kept = self._candidates(num_candidates)
            kept = Candidates(kept.ids[:num_rows], kept.log_probs[:num_rows])
            bound = self._bind(0, kept), kept
            if num_candidates <= MAX_KEPT_CANDIDATES:
                if len(self._bindings) == MAX_KEPT_BINDINGS:
                    del self._bindings[next(iter(self._bindings))]
                self._bindings[key] = bound
        return bound

    def _bind(self, first_row: int, candidates: Candidates) -> onnxruntime.IOBinding:
        """Bind as many rows of every buffer as there is room for candidates of."""
        binding = self._decoder.io_binding()
        rows = slice(first_row, first_row + len(candidates.ids))
        inputs = {"prev_ids": self._tokens, "positions": self._positions, "src_lens": self.cache.source_lengths}
        for name, vector in inputs.items():
            bind_input(binding, name, vector[rows])
        bind_input(binding, "num_candidates", self._num_candidates)
        caches = {**self.cache.self_kv, **self.cache.cross_kv}
        for name, cache in caches.items():
            bind_input(binding, name, cache[rows])
        for name in self.cache.output_names:
            bind_output(binding, output_name(name), caches[name][rows])
        bind_output(binding, "candidate_ids", candidates.ids)
        bind_output(binding, "candidate_log_probs", candidates.log_probs)
        return binding

    def _candidates(self, num_candidates: int) -> Candidates:
        """Return buffers for K candidates of every row, the same ones each time where K is small."""
        if (kept := self._buffers.get(num_candidates)) is not None:
            return kept
        shape = self.max_rows, num_candidates
        candidates = Candidates(np.empty(shape, np.int64), np.empty(shape, np.float32))
        if num_candidates <= MAX_KEPT_CANDIDATES:
            self._buffers[num_candidates] = candidates
        return candidates


def _encoder_of(manifest: Manifest, session: onnxruntime.InferenceSession, cache: SlotCache) -> Encoder:
    """Return what runs an encoder's graph in the form that a bundle has it."""
    if manifest.has_prompts:
        return PromptReader(session, cache)
    return PackedEncoder(session, cache) if manifest.is_packed else PaddedEncoder(session, manifest.pad_id)
