"""The runner on ONNX Runtime's CPU provider: two sessions, and the caches that the decode step updates in place."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle, Manifest
from dragoman.export.tensor_names import output_name
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.runtime.binding import bind_input, bind_output
from dragoman.server.runtime.cache import SlotCache
from dragoman.server.runtime.encoder import Encoder, PackedEncoder, PaddedEncoder
from dragoman.server.runtime.prompts import PromptReader
from dragoman.server.runtime.runner import Held, Holder, Reader
from dragoman.server.runtime.weights import Weights

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
