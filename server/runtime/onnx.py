"""CPU runner on ONNX Runtime, and the scorer, which also runs on a device."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle, Manifest
from dragoman.export.tensors import LOG_PROBS_OUTPUT, PACKED_OUTPUT, QUERIES_OUTPUT, STATES_OUTPUT, output_name, pack
from dragoman.server.runtime.alignment import Aligner
from dragoman.server.runtime.cache import Buffer, SlotCache
from dragoman.server.runtime.elastic import Elastic, Sessions, open_mark
from dragoman.server.runtime.runner import Candidates, Held
from dragoman.server.runtime.weights import Weights


def bind_input(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    """Bind an array as an input in place; it must not move while the binding is used."""
    assert array.flags.c_contiguous
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def bind_output(binding: onnxruntime.IOBinding, name: str, array: NDArray[np.generic]) -> None:
    """Bind an array as an output in place; it must not move while the binding is used."""
    assert array.flags.c_contiguous
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


Sources = Sequence[Sequence[int]]

# Results up to this size reuse a buffer: the system takes longer to provide fresh memory than to fill it.
MAX_KEPT_BYTES = 2**26


class PackedEncoder:
    """Encoder without padding: concatenated tokens as input, the numbers of all caches for each token and source as output."""

    def __init__(self, sessions: Sessions, cache: SlotCache) -> None:
        self._sessions, self._cache = sessions, cache
        self._num_columns, self._num_state_columns = cache.token_columns, cache.state_columns
        self._kept: Buffer = np.empty((0, self._num_columns), cache.token_type)

    def fill(self, sources: Sources, rows: Sequence[int]) -> None:
        """Encode sources (end-of-sequence included) as one batch into `rows`."""
        self._cache.write_packed(rows, *self._run(sources))

    def place(self, held: Sequence[Held], rows: Sequence[int]) -> None:
        for one, row in zip(held, rows, strict=True):
            self._cache.write_packed([row], np.array([len(one.tokens)]), one.tokens, one.states[None])

    def encode(self, sources: Sources) -> list[Held]:
        lengths, tokens, states = self._run(sources)
        parts = np.split(tokens, lengths.cumsum()[:-1])
        return [Held(part.copy(), state.copy()) for part, state in zip(parts, states, strict=True)]

    def _run(self, sources: Sources) -> tuple[NDArray[np.int64], Buffer, Buffer]:
        """Encode sources; return lengths, tokens in a reused buffer, and states."""
        inputs = pack(sources)
        tokens = self._results(len(inputs["src_ids"]))
        states = np.empty((len(sources), self._num_state_columns), tokens.dtype)
        session = self._sessions.choose()
        binding = session.io_binding()
        for name, array in inputs.items():
            bind_input(binding, name, array)
        for name, output in ((PACKED_OUTPUT, tokens), (STATES_OUTPUT, states)):
            if output.shape[1]:
                bind_output(binding, name, output)
        session.run_with_iobinding(binding)
        return inputs["src_lens"], tokens, states

    def _results(self, num_tokens: int) -> Buffer:
        """Return a buffer for tokens, reused where small."""
        if num_tokens <= len(self._kept):
            return self._kept[:num_tokens]
        capacity = 1 << (num_tokens - 1).bit_length()
        if capacity * self._num_columns * self._kept.itemsize > MAX_KEPT_BYTES:
            return np.empty((num_tokens, self._num_columns), self._kept.dtype)
        self._kept = np.empty((capacity, self._num_columns), self._kept.dtype)
        return self._kept[:num_tokens]


class PaddedEncoder:
    """Encoder with padding to the longest source; its outputs are the caches' tensors."""

    def __init__(self, sessions: Sessions, cache: SlotCache, pad_id: int) -> None:
        self._sessions, self._cache, self._pad_id = sessions, cache, pad_id

    def fill(self, sources: Sources, rows: Sequence[int]) -> None:
        lengths = np.array([len(source) for source in sources], np.int64)
        ids = np.full((len(sources), lengths.max()), self._pad_id, np.int64)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = source
        tensors = self._sessions.choose().run(self._cache.cross_names, {"src_ids": ids, "src_lens": lengths})
        self._cache.write_cross(rows, lengths, tensors)


class PromptReader:
    """Chunked prefill: the graph reads a piece of a row's prompt and appends to the row's caches."""

    def __init__(self, sessions: Sessions, cache: SlotCache) -> None:
        self._sessions, self._cache = sessions, cache

    def fill(self, sources: Sources, rows: Sequence[int]) -> None:
        for source, row in zip(sources, rows, strict=True):
            self.read(row, source, 0, len(source))

    def read(self, row: int, source_ids: Sequence[int], first: int, stop: int) -> None:
        cache = self._cache
        if first == 0:
            cache.begin_prompt(row)
        if first == stop:
            return
        assert first == cache.source_lengths[row], "a piece that does not follow the one before"
        cache.make_target_room(stop + 1)  # the graph may write one place more
        inputs = {
            "src_ids": np.array(source_ids[first:stop], np.int64),
            "positions": np.arange(first, stop),
            "src_lens": np.array([stop]),
        }
        session = self._sessions.choose()
        binding = session.io_binding()
        for name, array in inputs.items():
            bind_input(binding, name, array)
        for name, buffer in cache.self_kv.items():
            bind_input(binding, name, buffer[row : row + 1])
            bind_output(binding, output_name(name), buffer[row : row + 1])
        session.run_with_iobinding(binding)
        cache.note_read(row, stop)


# Bindings with more candidates are rare and their buffers large, so they are not kept.
MAX_KEPT_CANDIDATES = 256
# Creating a binding takes 0.1 ms; the oldest is dropped first.
MAX_KEPT_BINDINGS = 256


class OnnxRunner:
    """A `Runner` on the CPU. Caches are bound by address, once for each number of rows, and copied only when they grow."""

    device = "cpu"
    graphs = None
    memory: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        bundle: Bundle,
        max_rows: int,
        num_threads: int,
        weights: Weights | None = None,
        elastic: Elastic | None = None,
    ) -> None:
        """Load both graphs, by default from the checked bundle; `num_threads` of each session include the calling one.

        With an `elastic` of wide steps, sessions with more threads are loaded beside them.
        """
        manifest = bundle.manifest
        self.max_rows = max_rows
        self.cache = SlotCache(manifest, max_rows)
        self.weights = weights or Weights(bundle)
        self._elastic = elastic
        self._encoder = _encoder_of(manifest, self._open(bundle.encoder_path, num_threads), self.cache)
        self.holder = self._encoder if isinstance(self._encoder, PackedEncoder) else None
        self.aligner = Aligner(manifest.alignment, self.cache) if manifest.alignment else None
        self.reader = self._encoder if isinstance(self._encoder, PromptReader) else None
        self._decoder = self._open(bundle.decoder_path, num_threads)
        self._tokens = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int64)
        self._num_candidates = np.ones(1, np.int64)
        self._buffers: dict[int, Candidates] = {}
        self._bindings: dict[tuple[onnxruntime.InferenceSession, int, int], tuple[onnxruntime.IOBinding, Candidates]] = {}
        self._num_moves_bound = 0
        has_all = LOG_PROBS_OUTPUT in manifest.tensors.decoder_outputs
        self.can_skip_log_probs = has_all and manifest.can_skip_log_probs
        self._all_log_probs = np.empty((max_rows, manifest.num_choices), np.float32) if has_all else None

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        self._encoder.fill(sources, rows)

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        num_rows = len(tokens)
        assert 0 < num_rows <= self.max_rows
        self.cache.make_room(positions)
        self._tokens[:num_rows] = tokens
        self._positions[:num_rows] = positions
        self._num_candidates[0] = num_candidates
        session = self._decoder.choose(num_rows)
        binding, candidates = self._bound(session, num_rows, num_candidates)
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        self._decoder.note(session, num_rows, time.perf_counter() - started)
        return candidates

    def rest(self) -> None:
        if self._elastic is not None:
            self._elastic.rest()

    def refetch(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        num_rows = len(tokens)
        self._tokens[first_row : first_row + num_rows] = tokens
        self._positions[first_row : first_row + num_rows] = positions
        self._num_candidates[0] = num_candidates
        shape = num_rows, num_candidates
        candidates = Candidates(np.empty(shape, np.int64), np.empty(shape, np.float32))
        self._decoder.narrow.run_with_iobinding(self._bind(self._decoder.narrow, first_row, candidates))
        return candidates

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.cache.copy_row(source, target, length)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        self.cache.copy_positions(source, target, start, stop)

    def cache_bytes(self) -> tuple[int, int]:
        return self.cache.num_bytes_reserved, self.cache.num_bytes_used

    def _open(self, path: Path, num_threads: int) -> Sessions:
        elastic = self._elastic
        wide = None if elastic is None or not elastic.num_threads else self.weights.open(path, elastic.num_threads)
        return Sessions(self.weights.open(path, num_threads), wide, elastic)

    def _bound(
        self, session: onnxruntime.InferenceSession, num_rows: int, num_candidates: int
    ) -> tuple[onnxruntime.IOBinding, Candidates]:
        """Return a cached binding to the caches' current addresses."""
        if self._num_moves_bound != self.cache.num_moves:
            self._bindings.clear()  # their addresses are invalid
            self._num_moves_bound = self.cache.num_moves
        key = session, num_rows, num_candidates
        if (bound := self._bindings.get(key)) is None:
            kept = self._candidates(num_candidates)
            everything = None if self._all_log_probs is None or not num_candidates else list(self._all_log_probs[:num_rows])
            kept = Candidates(kept.ids[:num_rows], kept.log_probs[:num_rows], everything)
            bound = self._bind(session, 0, kept), kept
            if num_candidates <= MAX_KEPT_CANDIDATES:
                if len(self._bindings) == MAX_KEPT_BINDINGS:
                    del self._bindings[next(iter(self._bindings))]
                self._bindings[key] = bound
        return bound

    def _bind(self, session: onnxruntime.InferenceSession, first_row: int, candidates: Candidates) -> onnxruntime.IOBinding:
        """Bind as many rows of every buffer as `candidates` has."""
        binding = session.io_binding()
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
        if candidates.all_log_probs is not None and self._all_log_probs is not None:
            bind_output(binding, LOG_PROBS_OUTPUT, self._all_log_probs[rows])
        if self.aligner is not None:
            bind_output(binding, QUERIES_OUTPUT, self.aligner.queries[rows])
        return binding

    def _candidates(self, num_candidates: int) -> Candidates:
        """Return buffers for K candidates of every row, kept where K is small."""
        if (kept := self._buffers.get(num_candidates)) is not None:
            return kept
        shape = self.max_rows, max(1, num_candidates)
        candidates = Candidates(np.empty(shape, np.int64), np.empty(shape, np.float32))
        if num_candidates <= MAX_KEPT_CANDIDATES:
            self._buffers[num_candidates] = candidates
        return candidates


def _encoder_of(manifest: Manifest, sessions: Sessions, cache: SlotCache) -> PackedEncoder | PaddedEncoder | PromptReader:
    if manifest.has_prompts:
        return PromptReader(sessions, cache)
    return PackedEncoder(sessions, cache) if manifest.is_packed else PaddedEncoder(sessions, cache, manifest.pad_id)


class OnnxScorer:
    """Scorer on ONNX Runtime; each pair is computed alone, without padding, so results are bit-identical."""

    def __init__(
        self,
        bundle: Bundle,
        num_threads: int,
        open_on_device: Callable[[Path], onnxruntime.InferenceSession] | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Load nothing yet; `check` compares the bundle's directory later, `open_on_device` loads the graph on a device."""
        self._bundle = bundle
        self._has_attention = bundle.manifest.attention_layers > 0
        self._num_threads = num_threads
        self._open_on_device = open_on_device
        self._weights = weights or Weights(bundle)
        self._mark = open_mark(self._weights.folder) or contextlib.nullcontext()
        self._session: onnxruntime.InferenceSession | None = None
        self._running: onnxruntime.RunOptions | None = None

    @property
    def is_loaded(self) -> bool:
        return self._session is not None

    @property
    def is_on_device(self) -> bool:
        """Whether the scorer uses the engine's device, so that opening and scoring must run between the engine's steps."""
        return self._open_on_device is not None

    def check(self) -> None:
        """Raise `BundleError` if the bundle is missing or was replaced."""
        self._bundle.check_unchanged()

    def open(self) -> None:
        path = self._bundle.scorer_path
        if self._open_on_device is not None:
            self._session = self._open_on_device(path)
        else:
            # Spinning threads would take time from decode steps.
            self._session = self._weights.open(path, self._num_threads, is_spinning=False)

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None, decoder_start_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return a target's log-probabilities `[T]` and attention to the source `[T, S]`, end-of-sequence included in both.

        Attention is averaged over heads, of one decoder layer or None for the mean of all; `[T, 0]` without attention.
        `decoder_start_id` None is the model's.
        """
        assert self._session is not None, "the scorer is not open"
        labels = np.array([target_ids], np.int64)
        start = self._bundle.manifest.decoder_start_id if decoder_start_id is None else decoder_start_id
        inputs = {
            "src_ids": np.array([source_ids], np.int64),
            "src_lens": np.array([len(source_ids)], np.int64),
            "tgt_ids": np.array([[start, *target_ids[:-1]]], np.int64),
            "tgt_lens": np.array([len(target_ids)], np.int64),
            "labels": labels,
        }
        self._running = onnxruntime.RunOptions()
        outputs = ["label_log_probs", "attention"] if self._has_attention else ["label_log_probs"]
        with self._mark:
            log_probs, *rest = self._session.run(outputs, inputs, self._running)
        if not rest:
            return log_probs[0], np.zeros((len(target_ids), 0), np.float32)
        (attention,) = rest
        return log_probs[0], attention[0].mean(0) if layer is None else attention[0, layer]

    def interrupt(self) -> None:
        """Make a running computation fail soon; thread-safe."""
        if self._running is not None:
            self._running.terminate = True
