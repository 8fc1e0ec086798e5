"""A model on a device with memory of its own: caches and steps stay there, the host sees token ids and log-probabilities.

Where a batch goes on unchanged, as plain greedy rows do between one arrival or ending and the next, the step after the one that was
asked for is begun at once, fed by the device with the tokens it has just chosen. It is taken if it turns out to be what is asked
for next, bit for bit what would have been computed then, and forgotten otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.server.runtime.device.buckets import Buckets
from dragoman.server.runtime.device.cache import DeviceCache
from dragoman.server.runtime.device.device import Device, DeviceError, OutOfDeviceMemory
from dragoman.server.runtime.device.encoder import DeviceEncoder
from dragoman.server.runtime.device.memory import MemoryPlan
from dragoman.server.runtime.device.model import DeviceModel
from dragoman.server.runtime.device.steps import DeviceSteps, Likeliest, Shape, StepGraphs, Ticket, When

STEADY_STEPS = 4
"""Steps that must have gone on unchanged before one is begun ahead: where batches change often, guesses are work thrown away."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step and what it was given, to recognise what follows it.

    Attributes:
        ticket: The step.
        positions: `[N]`, a copy.
        is_greedy: Whether K was 1.
    """

    ticket: Ticket
    positions: NDArray[np.int64]
    is_greedy: bool


class DeviceDecoder:
    """Encodes sources into rows, decodes one token for every row, copies rows; used from one thread.

    Attributes:
        device: Name of the device.
        max_rows: Rows of the decode batch at the most.
        plan: What it takes of the device's memory.
        budget: How that was divided.
        buckets: Sizes of its steps.
        graphs: Steps that are captured.
        num_ahead: Steps begun before they were asked for.
        num_taken: Of those, the ones that were asked for then.
    """

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        buckets: Buckets,
        *,
        prefill_tokens: int,
        max_bytes: int = 0,
        capture: When = "idle",
        is_ahead: bool = True,
        warn: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Load both graphs and reserve all memory there will be need of.

        Args:
            device: Where to run.
            model: What to run.
            buckets: Sizes of steps; the last of its rows is the number of slots.
            prefill_tokens: Positions the encoder computes at once, padding included; at least the longest source.
            max_bytes: Memory that may be taken; 0 for nine tenths of what is free.
            capture: When steps are captured as graphs, to be replayed.
            is_ahead: Whether steps are begun ahead.
            warn: Told why, if steps that should be captured cannot be.

        Raises:
            DeviceError: If the model does not fit or does not run there.
        """
        prefill_tokens = max(prefill_tokens, model.max_source_tokens)
        self.device, self.max_rows, self.buckets = device.name, buckets.rows[-1], buckets
        self.graphs = StepGraphs(buckets, capture, self.capture, warn)
        self.plan = MemoryPlan.of(model, buckets, prefill_tokens, len(list(self.graphs.shapes())) * self.graphs.is_on)
        self.budget = self.plan.budget(device.available_bytes(), max_bytes)
        self._device, self._model, self._is_ahead = device, model, is_ahead
        encoder = device.open_session(model.encoder_path, max_arena_bytes=self.budget.encoder, is_captured=False)
        decoder = self._open_decoder()
        self.cache = DeviceCache(device, model, self.max_rows, buckets.targets, buckets.sources)
        self._encoder = DeviceEncoder(device, model, encoder, prefill_tokens)
        self._steps = DeviceSteps(device, model, decoder, self.cache, buckets, self.graphs)
        self._rows_at_once = {False: self.max_rows, True: self.max_rows}  # by whether there are more candidates than usual
        self._last: Step | None = None
        self._next: Step | None = None
        self._num_steady = self._num_rows = self._num_positions = 0
        self.num_ahead = self.num_taken = 0

    def warm_up(self) -> None:
        """Run the encoder, and every shape of steps that is to be ready at the start, which captures them where that is on.

        The largest batches come first: the arenas then have what any other needs, and no request waits for memory.
        """
        for length in (self._model.max_source_tokens, 1):
            count = self._encoder.num_fitting([length] * self.max_rows)
            try:
                self.prefill([[self._model.eos_id] * length] * count, range(count))
            except OutOfDeviceMemory:
                if length == 1:
                    raise  # a longer source that does not fit is refused when it comes
        for shape in self.graphs.at_start():
            self.capture(shape)
        self.graphs.end_start()

    def capture(self, shape: Shape) -> None:
        """Run a step of a shape on whatever lies in the caches, at the end of its layouts, so that these are what is needed.

        It is captured where that is on. What lies in the caches is lost.
        """
        self._empty()
        self.cache.source_lengths[: shape.num_rows] = min(shape.sources, self._model.max_source_tokens)
        positions = np.full(shape.num_rows, min(shape.targets, self._model.max_target_tokens) - 1)
        try:
            with self._steps.capturing():
                self.decode(np.full(shape.num_rows, self._model.decoder_start_id, np.int64), positions, shape.num_candidates)
        finally:
            self._empty()

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """See `runner.Runner`.

        Raises:
            OutOfDeviceMemory: If a source does not fit even alone.
        """
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
            self._device.synchronize()  # what the encoder wrote is overwritten by its next run
            start += count

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Likeliest:
        """Decode one token for rows `[0, N)`; see `runner.Runner.step`.

        Raises:
            OutOfDeviceMemory: If a row does not fit even alone.
        """
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
        return step.ticket.likeliest

    def decode_part(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int
    ) -> Likeliest:
        """Do rows of the last step again, with more candidates; see `runner.Runner.look`.

        Raises:
            OutOfDeviceMemory: If a row does not fit even alone.
        """
        self._forget()
        if first_row == 0 and len(tokens) == self._num_rows:
            ticket = self._start(tokens, positions, num_candidates)  # padded and computed as it was
            self._device.wait(ticket.mark)
            return Likeliest(ticket.likeliest.ids.copy(), ticket.likeliest.log_probs.copy())
        return self._in_parts(tokens, positions, num_candidates, first_row)

    def cache_bytes(self) -> tuple[int, int]:
        """See `runner.Runner`."""
        live = self.cache.source_lengths[: self._num_rows]
        pairs = (self.cache.cross_kv.kind, int(live.sum())), (self.cache.self_kv.kind, self._num_positions)
        used = sum(num_positions * kind.num_tensors * kind.token_bytes for kind, num_positions in pairs)
        return self.cache.num_bytes_reserved, used

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See `runner.Runner`."""
        self._forget()
        self.cache.copy_row(source, target)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """See `runner.Runner`; the whole row goes along, for what comes before `start` is the same in both."""
        self._forget()
        self.cache.copy_self(source, target)

    def _open_decoder(self) -> onnxruntime.InferenceSession:
        """Load the decode step; one that cannot be captured is loaded to be run plainly."""
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
        """Drop all that rows hold; the caches are then laid out as they were made."""
        self._forget()
        self.cache.empty()
        self._num_rows = self._num_positions = 0

    def _continues(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> bool:
        """Tell whether a step is the one that follows the last if every row goes on with its likeliest token."""
        last = self._last
        if last is None or not last.is_greedy or num_candidates != 1 or len(tokens) != len(last.positions):
            return False
        likeliest = last.ticket.likeliest.ids[:, 0]
        return bool(np.array_equal(positions, last.positions + 1) and np.array_equal(tokens, likeliest))

    def _start_ahead(self, step: Step) -> Step | None:
        """Begin the step after one that is under way, unless the caches would have to be laid out anew for it.

        A row at its end stays where it is: its answer has ended, and what it writes is never read.
        """
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
        """Begin a step; where memory is too short for all rows at once, do it part by part."""
        is_wide = num_candidates > self.buckets.candidates[-1]
        if len(tokens) <= self._rows_at_once[is_wide]:
            try:
                return self._steps.start(tokens, positions, num_candidates)
            except OutOfDeviceMemory:
                self._halve(len(tokens), is_wide)
        return Ticket(self._device.mark(), self._in_parts(tokens, positions, num_candidates, 0))

    def _in_parts(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Likeliest:
        """Do a part of the rows, as many at once as there is memory for."""
        is_wide = num_candidates > self.buckets.candidates[-1]
        parts: list[Likeliest] = []
        start = 0
        while start < len(tokens):
            part = slice(start, min(start + self._rows_at_once[is_wide], len(tokens)))
            try:
                ticket = self._steps.start(tokens[part], positions[part], num_candidates, first_row + start)
            except OutOfDeviceMemory:
                self._halve(part.stop - start, is_wide)
                continue
            self._device.wait(ticket.mark)
            parts.append(Likeliest(ticket.likeliest.ids.copy(), ticket.likeliest.log_probs.copy()))
            start = part.stop
        return Likeliest(np.concatenate([part.ids for part in parts]), np.concatenate([part.log_probs for part in parts]))

    def _halve(self, num_rows: int, is_wide: bool) -> None:
        """Do fewer rows at once from now on; call it while the failure of so many is being handled, which it raises for one row."""
        if num_rows == 1:
            raise
        self._rows_at_once[is_wide] = num_rows // 2

    def _forget(self) -> None:
        """Drop what was begun ahead: rows are about to change."""
        self._last = self._next = None
