"""Decode steps on a device, and their captured graphs."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.tensors import output_name
from dragoman.server.runtime.device.cache import DeviceCache
from dragoman.server.runtime.device.device import Device, OutOfDeviceMemory
from dragoman.server.runtime.device.memory import step_input_bytes, step_output_bytes
from dragoman.server.runtime.device.model import NO_GRAPH, Buckets, DeviceModel
from dragoman.server.runtime.runner import Candidates


@dataclass(frozen=True, slots=True)
class Shape:
    """Padded rows and K of a step, and the capacities of the caches."""

    num_rows: int
    num_candidates: int
    targets: int
    sources: int


class StepGraphs:
    """Captured graphs of one model's steps; given up, with a `reason`, when a capture fails."""

    def __init__(self, buckets: Buckets, is_on: bool, capture: Callable[[Shape], None], warn: Callable[[str], None]) -> None:
        """Start without graphs; `capture` runs a step of a shape, `warn` receives the reason for giving up."""
        self.is_on, self.is_disabled, self.reason = is_on, False, ""
        self._buckets, self._capture, self._warn = buckets, capture, warn
        self._captured: set[Shape] = set()
        self._shortage: Exception | None = None
        self._pending = list(self.shapes())[::-1] if self.is_on else []

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._captured

    def shapes(self) -> Iterator[Shape]:
        """Yield every shape: smallest layouts first, and per layout the largest batches first, whose memory the others reuse.

        In ascending order ONNX Runtime's arena would keep chunks of every size, which are not merged.
        """
        buckets = self._buckets
        layouts = sorted(itertools.product(buckets.targets, buckets.sources), key=lambda layout: layout[0] + layout[1])
        for (targets, sources), rows, candidates in itertools.product(layouts, buckets.rows[::-1], buckets.candidates[::-1]):
            yield Shape(rows, candidates, targets, sources)

    def at_start(self) -> list[Shape]:
        """Return the shapes to run before the model is ready: those of the smallest layouts."""
        smallest = self._buckets.targets[0], self._buckets.sources[0]
        return [shape for shape in self.shapes() if (shape.targets, shape.sources) == smallest]

    @property
    def has_pending(self) -> bool:
        """Whether a shape has been neither captured nor tried."""
        while self._pending and self._pending[-1] in self._captured:
            self._pending.pop()
        return bool(self._pending)

    def capture_next(self) -> None:
        """Try to capture the next shape, if any; only while all rows are empty."""
        if self.has_pending:
            self._capture(self._pending.pop())

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Replay nothing within the `with`."""
        captured, self._captured = self._captured, set()
        try:
            yield
        finally:
            self._captured = captured

    def note_captured(self, shape: Shape) -> None:
        """Record that a shape can be replayed."""
        self._captured.add(shape)

    def note_shortage(self, error: Exception) -> None:
        """Record that memory was too short to capture a shape, whose steps then run without a graph."""
        self._shortage = error

    def end_start(self) -> None:
        """Give up if no shape could be captured at the start."""
        if self.is_on and self._shortage is not None and not self._captured:
            self.give_up(self._shortage)

    def give_up(self, error: Exception) -> None:
        """Stop replaying and capturing, with one warning."""
        if self.is_on:
            self._warn(str(error))
        self.is_on, self.is_disabled, self.reason = False, True, str(error)
        self._captured.clear()
        self._pending.clear()


# Host buffers for the step being read, the step in flight, and its replacement.
NUM_STAGES = 3
ASYNCHRONOUS = "disable_synchronize_execution_providers"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step in flight; wait for its mark before reading its candidates."""

    mark: int
    candidates: Candidates


class DeviceSteps:
    """Runs the decoder on the first rows of a cache."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        session: onnxruntime.InferenceSession,
        cache: DeviceCache,
        buckets: Buckets,
        graphs: StepGraphs,
    ) -> None:
        """Reserve the arrays; raise `OutOfDeviceMemory` if they do not fit."""
        self._device, self._model, self._session, self._cache, self._buckets = device, model, session, cache, buckets
        self._graphs, self._is_capturing = graphs, False
        max_rows, max_candidates = buckets.rows[-1], buckets.candidates[-1]
        self._input = device.allocate(step_input_bytes(max_rows))
        self._output = device.allocate(step_output_bytes(max_rows, max_candidates))
        self._staged_inputs = [device.allocate_host(step_input_bytes(max_rows)) for _ in range(NUM_STAGES)]
        self._staged_outputs = [device.allocate_host(step_output_bytes(max_rows, max_candidates)) for _ in range(NUM_STAGES)]
        self._counts = {k: np.full(1, k, np.int64) for k in buckets.candidates}
        self._bound: dict[tuple[Shape, bool], tuple[onnxruntime.IOBinding, onnxruntime.RunOptions]] = {}
        self._stage = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the steps started within the `with`; no other is captured."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def start(
        self, tokens: NDArray[np.int64] | None, positions: NDArray[np.int64], num_candidates: int, first_row: int | None = None
    ) -> Ticket:
        """Start a step at positions `[N]`; raise `OutOfDeviceMemory` if it does not fit.

        Tokens are `[N]`; None for the likeliest tokens of the step before, on the device, with the same rows and K = 1.
        `first_row` is for a part of the rows in use, which is neither captured nor padded.
        """
        num_rows = len(positions)
        padded = self._buckets.padded_rows(num_rows) if first_row is None else num_rows
        is_wide = num_candidates > self._buckets.candidates[-1]
        shape = Shape(
            padded,
            self._buckets.padded_candidates(num_candidates),
            self._cache.self_kv.capacity,
            self._cache.cross_kv.capacity,
        )
        self._stage = (self._stage + 1) % NUM_STAGES
        self._feed(tokens, positions, padded, first_row or 0)
        if is_wide:
            return self._start_wide(shape, num_rows, first_row or 0)
        if first_row is None:
            self._run(shape)
        else:
            self._device.run(self._session, *self._bind(shape, self._output, first_row))
        return self._collect(self._staged_outputs[self._stage], self._output, shape, num_rows, num_candidates)

    def _run(self, shape: Shape) -> None:
        """Replay a shape, capture it, or run it without a graph."""
        is_known = shape in self._graphs
        if is_known or (self._is_capturing and self._graphs.is_on and shape.num_candidates in self._buckets.candidates):
            try:
                self._device.run(self._session, *self._binding(shape, is_captured=True))
            except Exception as error:  # ONNX Runtime's errors have no narrower base
                if is_known:
                    raise
                self._device.leave_capture()
                if isinstance(error, OutOfDeviceMemory):
                    self._graphs.note_shortage(error)  # a graph takes extra memory: the plain step may fit
                else:
                    self._graphs.give_up(error)
            else:
                self._graphs.note_captured(shape)
                return
        self._device.run(self._session, *self._binding(shape, is_captured=False))

    def _feed(self, tokens: NDArray[np.int64] | None, positions: NDArray[np.int64], padded: int, first_row: int) -> None:
        """Upload a step's inputs; padding rows get the padding token at position 0 of a source of one token."""
        num_rows = len(positions)
        staged = self._staged_inputs[self._stage][: step_input_bytes(padded)].view(np.int64).reshape(3, padded)
        staged[1, :num_rows], staged[1, num_rows:] = positions, 0
        staged[2, :num_rows], staged[2, num_rows:] = self._cache.source_lengths[first_row : first_row + num_rows], 1
        if tokens is None:
            self._device.copy(self._input, self._output, 8 * padded)
            self._device.upload(self._input + 8 * padded, staged[1:])
        else:
            staged[0, :num_rows], staged[0, num_rows:] = tokens, self._model.pad_id
            self._device.upload(self._input, staged)

    def _start_wide(self, shape: Shape, num_rows: int, first_row: int) -> Ticket:
        """Run a step with more candidates than the reserved arrays hold, in separate memory."""
        size = step_output_bytes(shape.num_rows, shape.num_candidates)
        output = self._device.allocate(size)
        try:
            self._device.run(self._session, *self._bind(shape, output, first_row))
            ticket = self._collect(np.empty(size, np.uint8), output, shape, num_rows, shape.num_candidates)
            self._device.wait(ticket.mark)
            return ticket
        finally:
            self._device.free(output)

    def _collect(self, staged: NDArray[np.uint8], output: int, shape: Shape, num_rows: int, num_candidates: int) -> Ticket:
        count = shape.num_rows * shape.num_candidates
        staged = staged[: 12 * count]
        self._device.download(staged, output)
        ids = staged[: 8 * count].view(np.int64).reshape(shape.num_rows, shape.num_candidates)
        log_probs = staged[8 * count :].view(np.float32).reshape(shape.num_rows, shape.num_candidates)
        return Ticket(self._device.mark(), Candidates(ids[:num_rows, :num_candidates], log_probs[:num_rows, :num_candidates]))

    def _binding(self, shape: Shape, *, is_captured: bool) -> tuple[onnxruntime.IOBinding, onnxruntime.RunOptions]:
        """Return the cached binding of a shape."""
        if (bound := self._bound.get((shape, is_captured))) is None:
            bound = self._bound[shape, is_captured] = self._bind(shape, self._output, 0, is_captured=is_captured)
        return bound

    def _bind(
        self, shape: Shape, output: int, first_row: int, *, is_captured: bool = False
    ) -> tuple[onnxruntime.IOBinding, onnxruntime.RunOptions]:
        """Bind arrays and caches by address; caches are inputs and outputs at one address."""
        device, cache, num_rows = self._device, self._cache, shape.num_rows
        binding = self._session.io_binding()
        where = device.kind, device.ordinal
        for i, name in enumerate(("prev_ids", "positions", "src_lens")):
            binding.bind_input(name, *where, np.int64, (num_rows,), self._input + 8 * i * num_rows)
        # The host reads the number of candidates: it is part of the shape and of the captured graph.
        counts = self._counts.setdefault(shape.num_candidates, np.full(1, shape.num_candidates, np.int64))
        binding.bind_input("num_candidates", "cpu", 0, np.int64, (1,), counts.ctypes.data)
        count = num_rows * shape.num_candidates
        output_shape = num_rows, shape.num_candidates
        binding.bind_output("candidate_ids", *where, np.int64, output_shape, output)
        binding.bind_output("candidate_log_probs", *where, np.float32, output_shape, output + 8 * count)
        element: Any = self._model.element_type
        for tensors in (cache.self_kv, cache.cross_kv):
            dimensions = tensors.kind.shape(num_rows, tensors.capacity)
            for name, address in zip(tensors.kind.names, tensors.addresses, strict=True):
                place = address + first_row * tensors.row_bytes
                binding.bind_input(name, *where, element, dimensions, place)
                if tensors is cache.self_kv:
                    binding.bind_output(output_name(name), *where, element, dimensions, place)
        return binding, self._options(shape, is_captured=is_captured)

    def _options(self, shape: Shape, *, is_captured: bool) -> onnxruntime.RunOptions:
        """Return run options: asynchronous, with the number of the shape's graph."""
        options = onnxruntime.RunOptions()
        options.add_run_config_entry(ASYNCHRONOUS, "1")
        graph = NO_GRAPH
        if is_captured:
            graph = self._buckets.graph_id(shape.num_rows, shape.num_candidates, shape.targets, shape.sources)
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options
