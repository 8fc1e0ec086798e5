"""Device runner: caches and steps stay in device memory, the host receives token ids and log-probabilities.

While a batch continues unchanged, as greedy rows do, the next step is started speculatively, fed on the device with the tokens just
chosen. It is used if it turns out to be the next step, and dropped otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.server.runtime.device.cache import DeviceCache
from dragoman.server.runtime.device.device import Device, DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.encoder import DeviceEncoder
from dragoman.server.runtime.device.memory import MemoryPlan
from dragoman.server.runtime.device.model import Buckets, DeviceModel
from dragoman.server.runtime.device.steps import DeviceSteps, Shape, StepGraphs, Ticket
from dragoman.server.runtime.runner import Candidates

# Unchanged steps required before speculation: where batches change often, it is wasted work.
STEADY_STEPS = 4


@dataclass(frozen=True, slots=True)
class Step:
    """A step with a copy of its positions `[N]`; greedy if K was 1."""

    ticket: Ticket
    positions: NDArray[np.int64]
    is_greedy: bool


class DeviceRunner:
    """A `Runner` on a device with its own memory; `num_ahead` steps were started speculatively, `num_taken` of them used."""

    # Device memory is allocated in advance: encoded sources go into rows at once.
    holder = None
    reader = None
    aligner = None
    can_skip_log_probs = False

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        buckets: Buckets,
        *,
        prefill_tokens: int,
        max_bytes: int = 0,
        has_graphs: bool = True,
        is_ahead: bool = True,
        warn: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Load both graphs and reserve all memory; raise `DeviceError` if the model does not fit or does not run on the device.

        The last row bucket is the number of slots. `prefill_tokens` are positions of one encoder run, padding included, at least
        the longest source; `max_bytes` 0 is nine tenths of the free memory. `has_graphs` captures and replays steps, `is_ahead`
        starts them speculatively; `warn` is called with the reason if steps cannot be captured.
        """
        prefill_tokens = max(prefill_tokens, model.max_source_tokens)
        self.device, self.max_rows, self.buckets = device.name, buckets.rows[-1], buckets
        self.graphs = StepGraphs(buckets, has_graphs, self.capture, warn)
        self.plan = MemoryPlan.of(model, buckets, prefill_tokens, len(list(self.graphs.shapes())) * self.graphs.is_on)
        self.budget = self.plan.budget(device.available_bytes(), max_bytes)
        self._device, self._model, self._is_ahead = device, model, is_ahead
        encoder = device.open_session(model.encoder_path, max_arena_bytes=self.budget.encoder, is_captured=False)
        decoder = self._open_decoder()
        self.cache = DeviceCache(device, model, self.max_rows, buckets.targets, buckets.sources)
        self._encoder = DeviceEncoder(device, model, encoder, prefill_tokens)
        self._steps = DeviceSteps(device, model, decoder, self.cache, buckets, self.graphs)
        self._rows_at_once = {False: self.max_rows, True: self.max_rows}  # by whether K exceeds the largest bucket
        self._last: Step | None = None
        self._next: Step | None = None
        self._num_steady = self._num_rows = self._num_positions = 0
        self.num_ahead = self.num_taken = 0

    def warm_up(self) -> None:
        """Run the encoder, and capture the steps of the smallest layouts.

        The largest batches come first, so that the arenas are large enough for all others and no request waits for allocation.
        """
        for length in (self._model.max_source_tokens, 1):
            count = self._encoder.num_fitting([length] * self.max_rows)
            try:
                self.prefill([[self._model.eos_id] * length] * count, range(count))
            except OutOfDeviceMemory:
                if length == 1:
                    raise  # longer sources that do not fit are refused at request time
        for shape in self.graphs.at_start():
            self.capture(shape)
        self.graphs.end_start()

    def capture(self, shape: Shape) -> None:
        """Capture a step of a shape by running it at the last position of its layouts; the contents of the caches are lost."""
        self._empty()
        self.cache.source_lengths[: shape.num_rows] = min(shape.sources, self._model.max_source_tokens)
        positions = np.full(shape.num_rows, min(shape.targets, self._model.max_target_tokens) - 1)
        try:
            with self._steps.capturing():
                self.step(np.full(shape.num_rows, self._model.decoder_start_id, np.int64), positions, shape.num_candidates)
        finally:
            self._empty()

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Encode sources into rows; raise `OutOfDeviceMemory` if a single source does not fit."""
        self._forget()
        pairs = sorted(zip(rows, sources, strict=True))
        start = 0
        while start < len(pairs):
            count = self._encoder.num_fitting([len(source) for _, source in pairs[start:]])
            part = pairs[start : start + count]
            try:
                encoded = self._encoder.encode([source for _, source in part])
            except OutOfDeviceMemory:
                if not self._encoder.shrink([len(source) for _, source in part]):
                    raise
                continue
            self.cache.write_cross([row for row, _ in part], encoded.lengths, encoded.tensors, encoded.padded_length)
            self._device.synchronize()  # the next run overwrites the encoder's outputs
            start += count

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """Decode one token for rows `[0, N)`; raise `OutOfDeviceMemory` if a single row does not fit."""
        num_rows = len(tokens)
        assert 0 < num_rows <= self.max_rows
        assert int(positions.max()) < self._model.max_target_tokens, "a row is longer than its cache"
        self._num_rows, self._num_positions = num_rows, int(positions.sum()) + num_rows
        is_continued = self._continues(tokens, positions, num_candidates)
        self._num_steady = self._num_steady + 1 if is_continued else 0
        if is_continued and self._next is not None:
            step, self._next = self._next, None
            self.num_taken += 1
        else:
            self._next = None
            self.cache.fit(num_rows, int(positions.max()) + 1)
            step = Step(self._start(tokens, positions, num_candidates), positions.copy(), num_candidates == 1)
        if self._is_ahead and step.is_greedy and self._num_steady >= STEADY_STEPS:
            self._next = self._start_ahead(step)
        self._device.wait(step.ticket.mark)
        self._last = step
        return step.ticket.candidates

    def refetch(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """Run rows of the last step again with more candidates; raise `OutOfDeviceMemory` if a single row does not fit."""
        self._forget()
        if first_row == 0 and len(tokens) == self._num_rows:
            ticket = self._start(tokens, positions, num_candidates)  # same padding and computation as before
            self._device.wait(ticket.mark)
            return ticket.candidates.kept(num_candidates)
        return self._in_parts(tokens, positions, num_candidates, first_row)

    def rest(self) -> None: ...

    def cache_bytes(self) -> tuple[int, int]:
        live = self.cache.source_lengths[: self._num_rows]
        pairs = (self.cache.cross_kv.kind, int(live.sum())), (self.cache.self_kv.kind, self._num_positions)
        used = sum(num_positions * kind.num_tensors * kind.token_bytes for kind, num_positions in pairs)
        return self.cache.num_bytes_reserved, used

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._forget()
        self.cache.copy_row(source, target)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy the whole row, since the positions before `start` are the same in both."""
        self._forget()
        self.cache.copy_self(source, target)

    def _open_decoder(self) -> onnxruntime.InferenceSession:
        """Load the decode step, without graphs if it cannot be captured."""
        path, limit = self._model.decoder_path, self.budget.decoder
        if self.graphs.is_on:
            try:
                return self._device.open_session(path, max_arena_bytes=limit, is_captured=True)
            except DeviceError as error:
                session = self._device.open_session(path, max_arena_bytes=limit, is_captured=False)
                self.graphs.give_up(error)
                return session
        return self._device.open_session(path, max_arena_bytes=limit, is_captured=False)

    def _empty(self) -> None:
        """Empty all rows; the caches return to their first layout."""
        self._forget()
        self.cache.empty()
        self._num_rows = self._num_positions = 0

    def _continues(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> bool:
        """Return whether a step follows the last one with the likeliest token of every row."""
        last = self._last
        if last is None or not last.is_greedy or num_candidates != 1 or len(tokens) != len(last.positions):
            return False
        likeliest = last.ticket.candidates.ids[:, 0]
        return bool(np.array_equal(positions, last.positions + 1) and np.array_equal(tokens, likeliest))

    def _start_ahead(self, step: Step) -> Step | None:
        """Start the step after a running one, unless it needs another cache layout; rows at their last position stay there."""
        positions = np.minimum(step.positions + 1, self._model.max_target_tokens - 1)
        if int(positions.max()) >= self.cache.self_kv.capacity or len(positions) > self._rows_at_once[False]:
            return None
        try:
            ticket = self._steps.start(None, positions, 1)
        except OutOfDeviceMemory:
            return None
        self.num_ahead += 1
        return Step(ticket, step.positions + 1, True)

    def _start(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Ticket:
        """Start a step, or run it in parts if memory is too short for all rows."""
        is_wide = num_candidates > self.buckets.candidates[-1]
        if len(tokens) <= self._rows_at_once[is_wide]:
            try:
                return self._steps.start(tokens, positions, num_candidates)
            except OutOfDeviceMemory:
                self._halve(len(tokens), is_wide)
        return Ticket(self._device.mark(), self._in_parts(tokens, positions, num_candidates, 0))

    def _in_parts(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """Run rows, as many at once as fit into memory."""
        is_wide = num_candidates > self.buckets.candidates[-1]
        parts: list[Candidates] = []
        start = 0
        while start < len(tokens):
            part = slice(start, min(start + self._rows_at_once[is_wide], len(tokens)))
            try:
                ticket = self._steps.start(tokens[part], positions[part], num_candidates, first_row + start)
            except OutOfDeviceMemory:
                self._halve(part.stop - start, is_wide)
                continue
            self._device.wait(ticket.mark)
            parts.append(ticket.candidates.kept(num_candidates))
            start = part.stop
        return Candidates(np.concatenate([part.ids for part in parts]), np.concatenate([part.log_probs for part in parts]))

    def _halve(self, num_rows: int, is_wide: bool) -> None:
        """Run fewer rows at once from now on; call in an `except` block, whose error is re-raised for a single row."""
        if num_rows == 1:
            raise
        self._rows_at_once[is_wide] = num_rows // 2

    def _forget(self) -> None:
        """Drop a speculative step: rows are about to change."""
        self._last = self._next = None

    @property
    def memory(self) -> Mapping[str, int]:
        return self.plan.parts(self.budget)

    def open_session(self, path: Path) -> onnxruntime.InferenceSession:
        """Load the scorer on the same device, in the same stream, within its part of the memory."""
        return self._device.open_session(path, max_arena_bytes=self.budget.scorer, is_captured=False)
