"""Step loop of one model: retire, admit, prefill, decode, search, report.

Requests run in the order given; queue policy is the dispatcher's, threads and sockets are in `process.py`.
"""

import math
import time
import uuid
from collections.abc import Callable
from functools import partial

import structlog
from msgspec.structs import replace

from dragoman.server.engine.costs import PACKED, Costs
from dragoman.server.engine.messages import (
    EngineSnapshot,
    Finished,
    FinishReason,
    Report,
    Request,
    Shrunk,
    SlotUse,
    Snapshot,
    Statistics,
    Step,
    StepTotals,
    Tokens,
)
from dragoman.server.engine.prefill import EncoderPrefiller, Prefiller, PromptPrefiller
from dragoman.server.engine.rows import Rows
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide, num_common_tokens
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.searches import Advance, advances, search_for, search_from
from dragoman.server.engine.sequence import Sequence
from dragoman.server.engine.settings import Limits
from dragoman.server.engine.slots import Slots
from dragoman.server.engine.topk_refetch import TopKRefetch
from dragoman.server.runtime.runner import Candidates, Runner

log = structlog.get_logger("dragoman.engine")

MAX_CONSECUTIVE_FAILURES = 3
# Steps between two readings of the caches' use.
STEPS_PER_CACHE_READING = 16
# Time after a snapshot for which steps are still counted for the next one.
WATCH_SECONDS = 3.0

# A sequence, its search, its hypotheses before a step, and the parents among them of its hypotheses after the step.
Choice = tuple[Sequence, Search, list[Hypothesis], list[int]]


class EngineIsBroken(Exception):
    """Steps fail repeatedly; the process should be replaced."""


class Engine:
    """Sequences, slots, searches and runner of one model; used from one thread.

    Attributes:
        waiting: Sequences without slots, in order of submission.
        running: Sequences with slots, in order of admission.
        num_used_slots: Slots reserved for running sequences.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        target: TargetSide,
        *,
        costs: Costs = PACKED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.limits = runner, limits
        self.slots = Slots(limits.max_slots)
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.num_used_slots = 0
        self._rows = Rows(limits.max_slots, target)
        self._target, self._clock = target, clock
        self._next_deadline = math.inf
        self._searching: dict[Sequence, Search] = {}
        self._refetch = TopKRefetch(runner, self._rows, clock)
        self._streamed: dict[Sequence, None] = {}
        self._aligned: dict[Sequence, None] = {}
        self._with_log_probs: dict[Sequence, None] = {}
        self._waiting_for_first_token: list[Sequence] = []
        self._tokens: list[Tokens] = []
        self._finished: list[Finished] = []
        self._shrunk: list[Shrunk] = []
        self._steps: list[Step] = []
        self._prefill: Prefiller
        if runner.reader is None:
            self._prefill = EncoderPrefiller(runner, costs, limits, clock, self._fail, self._refuse)
        else:
            self._prefill = PromptPrefiller(runner.reader, limits, clock, self._fail, self._refuse)
        self._num_failures = self._num_failures_before = self._num_steps = 0
        self._cache_bytes = runner.cache_bytes()
        self._totals = StepTotals()
        self._counted_until: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether there are sequences to step."""
        return bool(self.running or self.waiting)

    @property
    def has_news(self) -> bool:
        """Whether tokens or ends have not been reported."""
        return bool(self._tokens or self._finished)

    def submit(self, request: Request) -> None:
        """Add a request, to be run once the ones before it have their slots."""
        assert request.id not in self.waiting and request.id not in self.running, "a request id is used twice"
        assert request.search.num_slots <= self.limits.max_slots, "a request needs more slots than there are"
        self.waiting[request.id] = Sequence(request)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; its rows are free from the next step on."""
        if (sequence := self.waiting.get(request_id) or self.running.get(request_id)) is not None:
            self._end(sequence, "cancelled")

    def end_all(self, reason: FinishReason) -> None:
        """End all requests."""
        for sequence in [*self.running.values(), *self.waiting.values()]:
            self._end(sequence, reason)

    def step(self) -> None:
        """Do one iteration; `take_report` returns the outcome.

        Raises:
            EngineIsBroken: After `MAX_CONSECUTIVE_FAILURES` failed steps in a row; all remaining requests have ended as `draining`.
        """
        self._num_failures_before = self._num_failures
        self._retire()
        self._admit()
        if len(self.running) > len(self._prefill.unfilled):
            started, cpu_started = self._clock(), time.thread_time()
            if (candidates := self._decode()) is not None:
                self._search(candidates, started, cpu_started)
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            self.end_all("draining")
            raise EngineIsBroken(f"{self._num_failures} steps in a row have failed")

    @property
    def is_unprepared(self) -> bool:
        """Whether `prepare` has steps to capture."""
        return self.runner.graphs is not None and self.runner.graphs.has_pending

    def prepare(self) -> None:
        """Capture a step that a later batch may need; no effect unless idle."""
        if self.has_work or self.runner.graphs is None:
            return
        try:
            self.runner.graphs.capture_next()
        except Exception:  # not retried; a batch that needs such a step runs without a graph
            log.exception("a step could not be prepared")

    def take_report(self) -> Report:
        """Return the events since the last call."""
        report = Report(self._tokens, self._finished, self.statistics(), shrunk=self._shrunk)
        if self._counted_until is not None:
            if self._clock() > self._counted_until:
                self._counted_until = None
            else:
                self._totals = self._counted()
        self._tokens, self._finished, self._shrunk, self._steps, self._prefill.done = [], [], [], [], []
        return report

    def snapshot(self) -> Snapshot:
        """Return the state of every slot; steps are counted only while snapshots are taken."""
        now = self._clock()
        self._counted_until = now + WATCH_SECONDS
        slots = [
            SlotUse(
                row,
                sequence.request.id,
                sequence in self._prefill.unfilled,
                sequence.num_source_tokens,
                self._num_generated(sequence),
                sequence.request.max_new_tokens,
            )
            for sequence in self.running.values()
            for row in sequence.rows
        ]
        return Snapshot([EngineSnapshot(now, sorted(slots, key=lambda slot: slot.slot), self._counted())], [])

    def statistics(self) -> Statistics:
        """Return the state after the last step, and the work since the last report."""
        return Statistics(
            num_waiting=len(self.waiting),
            num_waiting_tokens=sum(sequence.num_source_tokens for sequence in self.waiting.values()),
            num_running=len(self.running),
            num_slots=self.num_used_slots,
            cache_bytes_reserved=self._cache_bytes[0],
            cache_bytes_used=self._cache_bytes[1] if self.num_used_slots else 0,
            steps=self._steps,
            prefills=self._prefill.done,
        )

    def _counted(self) -> StepTotals:
        totals, steps = self._totals, self._steps
        return StepTotals(
            totals.num_steps + len(steps),
            totals.num_rows + sum(step.num_rows for step in steps),
            totals.seconds + sum(step.seconds for step in steps),
        )

    def _retire(self) -> None:
        if (now := self._clock()) < self._next_deadline:
            return
        self._next_deadline = math.inf
        for sequence in [*self.running.values(), *self.waiting.values()]:
            if (deadline := sequence.request.deadline) is not None:
                if deadline <= now:
                    self._end(sequence, "deadline")
                else:
                    self._next_deadline = min(self._next_deadline, deadline)

    def _admit(self) -> None:
        """Give rows to the next sequences and prefill them, start the filled ones, and close holes in the rows."""
        admitted = self._next_admitted()
        if admitted or self._prefill.unfilled:
            started = self._clock()
            for sequence in admitted:
                sequence.admitted = started
                self._rows.park(self.slots.take(sequence))
            for sequence in self._prefill.fill(admitted, self.waiting.values()):
                self._start(sequence)
        for move in self.slots.compact():
            self.runner.copy_row(move.source, move.target, int(self._rows.positions[move.source]))
            self._rows.move(move.source, move.target)

    def _next_admitted(self) -> list[Sequence]:
        """Move sequences from waiting to running, within free slots and the prefill budget, which one larger source may exceed."""
        admitted: list[Sequence] = []
        num_unread = self._prefill.num_unread_tokens
        budget = self.limits.prefill_tokens_per_step - (num_unread or 0)
        num_free = self.limits.max_slots - self.num_used_slots
        for sequence in self.waiting.values():
            num_least = sequence.num_source_tokens if num_unread is None else min(sequence.num_source_tokens, 1)
            is_over_budget = bool(admitted or num_unread) and num_least > max(budget, 0)
            if is_over_budget or sequence.num_slots > num_free:
                break
            num_free -= sequence.num_slots
            budget -= sequence.num_source_tokens
            admitted.append(sequence)
        for sequence in admitted:
            self.running[sequence.request.id] = self.waiting.pop(sequence.request.id)
            self.num_used_slots += sequence.num_slots
        return admitted

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.search = search_for(request, self._target)
        is_plain = sequence.search is None
        self._rows.start(sequence.rows[0], request.max_new_tokens, request.decoder_start_id, request.search, is_plain=is_plain)
        self._waiting_for_first_token.append(sequence)
        if request.is_streamed:
            self._streamed[sequence] = None
        if request.text_range is not None and self.runner.aligner is not None:
            self._aligned[sequence] = None
        if request.search.has_log_probs:
            self._with_log_probs[sequence] = None
        if sequence.search is not None:
            self._searching[sequence] = sequence.search

    def _decode(self) -> Candidates | None:
        """Decode one token for every row, or return None on failure; K is a power of two, so that few shapes occur."""
        num_rows, rows = self.slots.num_rows, self._rows
        k = self._num_candidates()
        k = min(1 << (k - 1).bit_length(), self._target.num_choices) if k else 0
        try:
            return self.runner.step(rows.tokens[:num_rows], rows.positions[:num_rows], k)
        except Exception:
            self._fail(list(self.running.values()), "decode step failed")
            return None

    def _search(self, candidates: Candidates, started: float, cpu_started: float) -> None:
        """Advance every sequence with a step's candidates, and end the finished ones."""
        num_rows = len(candidates.ids)
        try:
            if self._aligned and self.runner.aligner is not None:
                self.runner.aligner.keep([row for sequence in self._aligned for row in sequence.rows])
            choices = self._choose(candidates)
        except Exception:
            self._fail(list(self.running.values()), "decode step failed")
            return
        ended = [(self.slots.owner(row), row) for row in self._rows.take_likeliest(candidates)]
        for sequence in self._prefill.unfilled:
            self._rows.park(sequence.rows[0])
        if self._refetch:
            self._refetch_candidates(self._clock() - started, choices)
        self._num_failures = 0
        now = self._clock()
        following = [choice for choice in choices if choice[-1]]
        for choice in following:
            self._follow(*choice)
        self._rows.feed_all((choice[0].rows, choice[1].live) for choice in following)
        self._note_first_tokens(now)
        self._stream()
        for row in self._rows.before_forced_end(num_rows):  # a search has to find the end among the candidates
            sequence = self.slots.owner(row)
            sequence.search = search_from(sequence.request, self._target, self._rows.hypothesis(row))
            self._searching[sequence] = sequence.search
        for sequence, row in ended:
            answer = self._rows.answer(row)
            if sequence in self._aligned:
                answer = replace(answer, alignment=self._align(sequence, answer.token_ids, row, answer.reason == "eos"))
            sequence.answers = [answer]
            self._end(sequence, sequence.answers[0].reason)
        for sequence, search, _, parents in choices:
            if not parents:
                sequence.answers = search.answers()
                self._end(sequence, sequence.answers[0].reason)
        if self._num_steps % STEPS_PER_CACHE_READING == 0:
            self._cache_bytes = self.runner.cache_bytes()
        self._num_steps += 1
        num_stepped = num_rows - len(self._prefill.unfilled)
        self._steps.append(Step(num_stepped, self._clock() - started, time.thread_time() - cpu_started))

    def _num_candidates(self) -> int:
        """Return the K of the next step, without paused searches."""
        least = 1 if self._with_log_probs or not self.runner.can_skip_log_probs else 0
        return max(
            (search.num_candidates for sequence, search in self._searching.items() if sequence not in self._refetch), default=least
        )

    def _choose(self, candidates: Candidates) -> list[Choice]:
        """Advance all searches that are not paused; pause those that need more candidates, and fail those that raise."""
        choices: list[Choice] = []
        able = {sequence: search for sequence, search in self._searching.items() if sequence not in self._refetch}
        each = advances(list(able.values()), [sequence.rows for sequence in able], candidates)
        for (sequence, search), advance in zip(able.items(), each, strict=True):
            self._advance(sequence, search, advance, choices)
        return choices

    def _refetch_candidates(self, step_seconds: float, choices: list[Choice]) -> None:
        self._refetch.hold()
        is_anyone_else = len(self._refetch) < len(self.running)
        for sequence in self._refetch.take(
            step_seconds, is_anyone_else=is_anyone_else, fail=partial(self._fail, event="refetch failed")
        ):
            search = self._searching[sequence]
            self._advance(sequence, search, search.resume, choices)

    def _advance(self, sequence: Sequence, search: Search, advance: Advance, choices: list[Choice]) -> None:
        """Advance one search and append its choice, or pause it."""
        before = search.live
        try:
            parents = advance()
        except Exception:
            self._fail([sequence], "search failed")
            return
        if parents is None:
            self._refetch.add(sequence, search)
        else:
            if sequence in self._aligned:
                for ended in search.finished:
                    if not ended.alignment:
                        ended.alignment.extend(self._align(sequence, ended.token_ids, sequence.rows[ended.parent], ended.is_eos))
            choices.append((sequence, search, before, parents))

    def _align(self, sequence: Sequence, token_ids: list[int], row: int, is_eos: bool) -> list[int]:
        """Return the alignment of tokens that have ended in a row."""
        text_range = sequence.request.text_range
        assert self.runner.aligner is not None and text_range is not None
        return self.runner.aligner.align(row, len(token_ids) + is_eos, len(token_ids), text_range)

    def _follow(self, sequence: Sequence, search: Search, before: list[Hypothesis], parents: list[int]) -> None:
        """Assign rows to a search's hypotheses; twins get a copy of their parent's cache from where the two rows differ."""
        for copy in self.slots.inherit(sequence, parents):
            tokens = before[copy.parent].token_ids
            num_cached = len(tokens) + 1  # the first position holds the start token
            if copy.predecessor is None:
                self.runner.copy_row(copy.source, copy.target, num_cached)
                self._rows.is_plain[copy.target] = False
            else:
                first = num_common_tokens(tokens, before[copy.predecessor].token_ids) + 1
                self.runner.copy_positions(copy.source, copy.target, first, num_cached)
        if search.max_rows < sequence.num_slots:
            self.num_used_slots -= sequence.num_slots - search.max_rows
            sequence.num_slots = search.max_rows
            self._shrunk.append(Shrunk(sequence.request.id, sequence.num_slots))

    def _note_first_tokens(self, now: float) -> None:
        """Record the time of first tokens; sequences still fed a prefix have none."""
        if not self._waiting_for_first_token:
            return
        still_waiting: list[Sequence] = []
        for sequence in self._waiting_for_first_token:
            if self._num_generated(sequence):
                sequence.first_token = now
            else:
                still_waiting.append(sequence)
        self._waiting_for_first_token = still_waiting

    def _stream(self) -> None:
        """Report the new certain tokens of streamed requests."""
        for sequence in self._streamed:
            if sequence.search is None:
                row = sequence.rows[0]
                new = [] if self._rows.is_eos(row) else [int(self._rows.tokens[row])]
            else:
                new = sequence.search.certain_tokens[sequence.num_streamed :]
            if new:
                sequence.num_streamed += len(new)
                self._tokens.append(Tokens(sequence.request.id, new))

    def _end(self, sequence: Sequence, reason: FinishReason, incident: str = "") -> None:
        if sequence.answers:
            num_generated = sum(len(answer.log_probs) for answer in sequence.answers)
        else:
            num_generated = self._num_generated(sequence)
        self._prefill.forget(sequence)
        if self.waiting.pop(sequence.request.id, None) is None:
            del self.running[sequence.request.id]
            self.num_used_slots -= sequence.num_slots
            self.slots.release(sequence)
            self._streamed.pop(sequence, None)
            self._aligned.pop(sequence, None)
            self._with_log_probs.pop(sequence, None)
            self._searching.pop(sequence, None)
            self._refetch.discard(sequence)
            if sequence in self._waiting_for_first_token:
                self._waiting_for_first_token.remove(sequence)
        self._finished.append(sequence.finished(reason, self._clock(), num_generated, incident))

    def _num_generated(self, sequence: Sequence) -> int:
        if sequence.search is not None:
            return sequence.search.num_generated
        return self._rows.num_generated(sequence.rows[0]) if sequence.rows else 0

    def _refuse(self, sequence: Sequence) -> None:
        self._end(sequence, "queue_full")

    def _fail(self, sequences: list[Sequence], event: str) -> None:
        """End the sequences of a step that raised; call it while the exception is being handled."""
        incident = uuid.uuid4().hex[:12]
        log.exception(event, incident=incident, num_requests=len(sequences))
        self._num_failures = self._num_failures_before + 1  # once a step, however many of its groups fail
        for sequence in sequences:
            self._end(sequence, "step_failed", incident)
