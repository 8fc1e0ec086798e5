"""The step loop: take what is new, admit, prefill, decode one token for every row, search, and say what happened.

One iteration is one call of `Engine.step`. The engine has no thread and no socket of its own; `process.py` gives it both.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import structlog

from server.engine.messages import Finished, FinishReason, Report, Request, Statistics, Tokens
from server.engine.prefill import group_by_length
from server.engine.scheduler import Limits, QueueIsFull, Scheduler
from server.engine.search import GreedySearch, Search
from server.engine.sequence import Sequence
from server.engine.slots import Slots
from server.runtime.runner import Runner

log = structlog.get_logger("dragoman.engine")

MAX_CONSECUTIVE_FAILURES = 3


class EngineIsBroken(Exception):
    """Steps fail again and again; the process should be replaced."""


class Engine:
    """Scheduler, slots, search and runner of one model, used from one thread."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        *,
        eos_id: int,
        decoder_start_id: int,
        max_target_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(limits)
        self.slots = Slots(limits.max_slots)
        self.search: Search = GreedySearch()
        self._eos_id, self._start_id, self._clock = eos_id, decoder_start_id, clock
        # Rows of these arrays are rows of the decode batch.
        self._tokens = np.zeros(limits.max_slots, np.int64)
        self._positions = np.zeros(limits.max_slots, np.int64)
        self._max_positions = np.zeros(limits.max_slots, np.int64)
        self._history = np.zeros((limits.max_slots, max_target_tokens), np.int32)
        self._streamed: dict[Sequence, None] = {}
        self._waiting_for_first_token: list[Sequence] = []
        self._tokens_out: defaultdict[bytes, list[Tokens]] = defaultdict(list)
        self._finished_out: defaultdict[bytes, list[Finished]] = defaultdict(list)
        self._statistics: dict[str, float] = {}
        self._completion_rate = 0.0
        self._last_completion = 0.0
        self._num_failures = 0
        self._num_failures_before = 0

    @property
    def has_work(self) -> bool:
        """Whether there is something to step for."""
        return self.scheduler.has_work

    def submit(self, origin: bytes, request: Request) -> None:
        """Queue a request, or report at once that the queue is full."""
        sequence = Sequence(origin, request)
        if not self.has_work:
            self._last_completion = self._clock()  # an idle hour says nothing about how fast requests complete
        try:
            self.scheduler.submit(sequence)
        except QueueIsFull:
            self._report(sequence, "queue_full", retry_after_seconds=self._seconds_until_a_place())

    def cancel(self, origin: bytes, request_id: int) -> None:
        """End a request that nobody waits for; its rows are free from the next step on."""
        sequence = self.scheduler.remove((origin, request_id))
        if sequence is not None:
            self._release(sequence, "cancelled")

    def remove_all(self, reason: FinishReason, origin: bytes | None = None) -> None:
        """End everything, or everything of one front end."""
        for sequence in self.scheduler.remove_all(origin):
            self._release(sequence, reason)

    def step(self) -> None:
        """Do one iteration.

        Raises:
            EngineIsBroken: After several failed steps in a row; requests that were in none of them have ended as `draining`.
        """
        self._statistics = {}
        self._num_failures_before = self._num_failures
        for sequence in self.scheduler.expire(self._clock()):
            self._release(sequence, "deadline")
        self._admit()
        self._compact()
        if self.slots.num_rows:
            self._decode()
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            self.remove_all("draining")
            raise EngineIsBroken(f"{self._num_failures} steps in a row have failed")

    def take_reports(self) -> dict[bytes, Report]:
        """Return, for each front end, what happened to its requests since the last call."""
        statistics = self.statistics()
        origins = self._tokens_out.keys() | self._finished_out.keys() | {s.origin for s in self.scheduler.running()}
        reports = {
            origin: Report(self._tokens_out.pop(origin, []), self._finished_out.pop(origin, []), statistics) for origin in origins
        }
        self._statistics = {}
        return reports

    def statistics(self) -> Statistics:
        """Describe the engine after its last step."""
        scheduler = self.scheduler
        return Statistics(
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_running=scheduler.num_running,
            num_slots=scheduler.num_used_slots,
            **self._statistics,  # type: ignore[arg-type]
        )

    def _admit(self) -> None:
        """Give rows to the next in line and encode their sources, similar lengths together."""
        admitted = self.scheduler.admit()
        if not admitted:
            return
        started = self._clock()
        for sequence in admitted:
            sequence.admitted = started
            row = self.slots.take(sequence)
            self._tokens[row] = self._start_id
            self._positions[row] = 0
            self._max_positions[row] = sequence.request.max_new_tokens
        groups = group_by_length(admitted)
        for group in groups:
            self._prefill(group)
        self._statistics |= {
            "prefill_rows": len(admitted),
            "prefill_tokens": sum(sequence.num_source_tokens for sequence in admitted),
            "prefill_padded_tokens": sum(len(group) * max(s.num_source_tokens for s in group) for group in groups),
            "prefill_seconds": self._clock() - started,
        }

    def _prefill(self, group: list[Sequence]) -> None:
        """Encode one batch of sources into the rows of their sequences."""
        started = self._clock()
        try:
            self.runner.prefill([sequence.request.source_ids for sequence in group], [sequence.rows[0] for sequence in group])
        except Exception:
            self._fail(group, "prefill failed")
            return
        for sequence in group:
            sequence.prefill_seconds = self._clock() - started
            self._waiting_for_first_token.append(sequence)
            if sequence.request.is_streamed:
                self._streamed[sequence] = None

    def _compact(self) -> None:
        """Close the holes that ended requests left."""
        for move in self.slots.compact():
            length = int(self._positions[move.source])
            self.runner.copy_row(move.source, move.target, length)
            for array in (self._tokens, self._positions, self._max_positions):
                array[move.target] = array[move.source]
            self._history[move.target, :length] = self._history[move.source, :length]

    def _decode(self) -> None:
        """Decode one token for every row."""
        started = self._clock()
        num_rows = self.slots.num_rows
        tokens, positions = self._tokens[:num_rows], self._positions[:num_rows]
        try:
            choice = self.search.choose(self.runner.step(tokens, positions, self.search.num_candidates))
        except Exception:
            self._fail(list(self.scheduler.running()), "decode step failed")
            return
        self._num_failures = 0
        tokens[:] = choice.tokens
        self._history[np.arange(num_rows), positions] = tokens
        positions += 1
        now = self._clock()
        for sequence in self._waiting_for_first_token:
            sequence.first_token = now
        self._waiting_for_first_token.clear()
        is_eos = tokens == self._eos_id
        for sequence in self._streamed:
            row = sequence.rows[0]
            if not is_eos[row]:
                self._tokens_out[sequence.origin].append(Tokens(sequence.request.id, [int(tokens[row])]))
        for row in np.flatnonzero(is_eos | (positions >= self._max_positions[:num_rows])).tolist():
            sequence = self.slots.owner(row)
            self.scheduler.remove(sequence.key)
            self._release(sequence, "eos" if is_eos[row] else "length")
        self._statistics |= {"step_rows": num_rows, "step_seconds": self._clock() - started}

    def _release(self, sequence: Sequence, reason: FinishReason, incident: str = "") -> None:
        """Take the rows back of a sequence that the scheduler no longer has, and report its end."""
        if sequence.rows:
            row = sequence.rows[0]
            length = int(self._positions[row])
            sequence.num_generated = length
            sequence.token_ids = self._history[row, : length - (reason == "eos")].tolist()
            self.slots.release(sequence)
            self._streamed.pop(sequence, None)
            if sequence in self._waiting_for_first_token:
                self._waiting_for_first_token.remove(sequence)
        if reason in ("eos", "length"):
            self._note_completion()
        self._report(sequence, reason, incident)

    def _report(self, sequence: Sequence, reason: FinishReason, incident: str = "", retry_after_seconds: float = 0.0) -> None:
        finished = sequence.finished(reason, self._clock(), incident, retry_after_seconds)
        self._finished_out[sequence.origin].append(finished)

    def _fail(self, sequences: list[Sequence], event: str) -> None:
        """End the sequences of a step that raised; call it while the exception is being handled."""
        incident = uuid.uuid4().hex[:12]
        log.exception(event, incident=incident, num_requests=len(sequences))
        self._num_failures = self._num_failures_before + 1  # however many groups of one step fail
        for sequence in sequences:
            self.scheduler.remove(sequence.key)
            self._release(sequence, "step_failed", incident)

    def _note_completion(self) -> None:
        """Follow the rate of completions, in requests a second of work, with an exponential average over about 32 of them."""
        now = self._clock()
        interval = max(now - self._last_completion, 1e-6)
        average = interval if not self._completion_rate else 31 / 32 / self._completion_rate + interval / 32
        self._completion_rate = 1 / average
        self._last_completion = now

    def _seconds_until_a_place(self) -> float:
        """Guess when the queue has a place: the time in which a tenth of it, at least one, is completed."""
        if not self._completion_rate:
            return 1.0
        places = max(1.0, self.scheduler.num_waiting / 10)
        return min(max(places / self._completion_rate, 0.01), 30.0)
