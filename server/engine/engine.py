"""The step loop: take what is new, admit, prefill, decode one token for every row, search, and say what happened.

One iteration is one call of `Engine.step`. The engine has no thread and no socket of its own; `process.py` gives it both.
"""

import time
import uuid
from collections.abc import Callable
from functools import partial

import structlog

from dragoman.server.engine.costs import PACKED, Costs
from dragoman.server.engine.filling import Filling
from dragoman.server.engine.forecast import Forecast
from dragoman.server.engine.looks import Looks
from dragoman.server.engine.messages import FinishReason, Report, Request, Share, Statistics, Step
from dragoman.server.engine.outbox import Outbox
from dragoman.server.engine.prefill import Prefills
from dragoman.server.engine.reading import Readings
from dragoman.server.engine.rows import Rows
from dragoman.server.engine.scheduler import Limits, QueueIsFull, Scheduler
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide, num_common_tokens
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.searches import Advance, advances, search_for, search_from
from dragoman.server.engine.sequence import Sequence
from dragoman.server.engine.slots import Slots
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.engine.watched import Watched
from dragoman.server.runtime.runner import Candidates, Reader, Runner

log = structlog.get_logger("dragoman.engine")

MAX_CONSECUTIVE_FAILURES = 3
# How many steps apart the caches are asked what they hold.
STEPS_PER_CACHE_READING = 16

Choice = tuple[Sequence, Search, list[Hypothesis], list[int]]
"""A sequence, its search, the hypotheses it had before a step, and the parents among them of those it has after it."""


class EngineIsBroken(Exception):
    """Steps fail again and again; the process should be replaced."""


class Engine:
    """Scheduler, slots, searches and runner of one model, used from one thread."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        target: TargetSide,
        *,
        costs: Costs = PACKED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(limits)
        self.slots = Slots(limits.max_slots)
        self._rows = Rows(limits.max_slots, target)
        self._forecast = Forecast()
        self._target, self._clock = target, clock
        self._searching: dict[Sequence, Search] = {}
        self._looks = Looks(lambda: self.runner, self._rows, clock)
        self._streamed: dict[Sequence, None] = {}
        self._waiting_for_first_token: list[Sequence] = []
        self._outbox = Outbox()
        self._steps: list[Step] = []
        self._filling = self._filling_of(runner, costs, limits)
        self._num_failures = 0
        self._num_failures_before = 0
        self._num_steps = 0
        self._cache_bytes = runner.cache_bytes()
        self._watched = Watched(self.scheduler, self._num_generated, clock)

    @property
    def has_work(self) -> bool:
        """Whether there is something to step for."""
        return self.scheduler.has_work

    @property
    def has_news(self) -> bool:
        """Whether a front end waits for something that happened since the last report, or gave up a place in the queue for it."""
        return self._outbox.has_news or any(prefill.num_admitted for prefill in self._filling.done)

    def submit(self, origin: bytes, request: Request) -> None:
        """Queue a request, or report at once that the queue is full or that its deadline cannot be met.

        Where the queue is full a request may push out others, of a caller who has more in it; these end as if they were refused.
        """
        sequence, now = Sequence(origin, request), self._clock()
        if not self.has_work:
            self._forecast.start(now)
        elif request.deadline is not None:
            needed = self._forecast.needed_seconds(sequence, self.scheduler)
            if now + needed > request.deadline:
                self._report(sequence, "deadline_unmet", needed_seconds=needed)
                return
        try:
            pushed_out = self.scheduler.submit(sequence)
        except QueueIsFull as full:
            self._report(sequence, "queue_full", limit=full.limit)
            return
        for other in pushed_out:
            self._release(other, "queue_full")

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
        self._num_failures_before = self._num_failures
        for sequence in self.scheduler.expire(self._clock()):
            self._release(sequence, "deadline")
        self._admit()
        self._compact()
        if self.scheduler.num_running > len(self._filling.unfilled):
            self._decode()
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            self.remove_all("draining")
            raise EngineIsBroken(f"{self._num_failures} steps in a row have failed")

    @property
    def is_unprepared(self) -> bool:
        """Whether there is something left to do for `prepare`."""
        return self.runner.graphs is not None and self.runner.graphs.has_pending

    def prepare(self) -> None:
        """Use a moment in which nothing runs: have a step captured that some later batch may need."""
        if self.has_work or self.runner.graphs is None:
            return
        try:
            self.runner.graphs.capture_next()
        except Exception:  # it is not tried again, and whoever needs such a step will see whether it can be done
            log.exception("a step could not be prepared")

    def take_reports(self) -> dict[bytes, Report]:
        """Return, for each front end, what happened to its requests since the last call."""
        reports = self._outbox.take(self.scheduler.running(), self.statistics())
        self._watched.count(self._steps)
        self._steps, self._filling.done = [], []
        return reports

    def snapshot(self) -> Snapshot:
        """Describe what every slot does, between two steps."""
        return self._watched.snapshot(self._filling.unfilled, self._steps)

    def statistics(self) -> Statistics:
        """Describe the engine after its last step, and what it did since the last report."""
        scheduler = self.scheduler
        without_claim = scheduler.without_claim()
        return Statistics(
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_running=scheduler.num_running,
            num_slots=scheduler.num_used_slots,
            num_places=scheduler.num_places,
            retry_after_seconds=self._forecast.seconds_until_a_place(scheduler.num_waiting),
            queue_seconds=self._forecast.queue_seconds(scheduler),
            cache_bytes_reserved=self._cache_bytes[0],
            cache_bytes_used=self._cache_bytes[1] if scheduler.num_used_slots else 0,
            steps=self._steps,
            prefills=self._filling.done,
            without_claim=None if without_claim is None else self._seconds_until_places(without_claim),
            at_their_limit=self._seconds_until_places(scheduler.at_their_limit()),
            num_ahead=self._filling.num_ahead,
            ahead_bytes=self._filling.ahead_bytes,
            are_graphs_disabled=self.runner.graphs is not None and self.runner.graphs.is_disabled,
        )

    def _filling_of(self, runner: Runner, costs: Costs, limits: Limits) -> Filling:
        """Return what puts sources into rows of such a runner."""
        clock, observe = self._clock, self._forecast.observe_prefill
        if runner.reader is None:
            return Prefills(lambda: self.runner, costs, limits, clock, observe, self._fail, self._refuse)
        return Readings(self._reader, limits, clock, observe, self._fail, self._refuse)

    def _reader(self) -> Reader:
        assert self.runner.reader is not None
        return self.runner.reader

    def _admit(self) -> None:
        """Give rows to the next in line, and put into rows what a decoder reads of their sources; those that have it start."""
        admitted = self.scheduler.admit(self._filling.num_unread_tokens)
        if not admitted and not self._filling.unfilled:
            return
        started = self._clock()
        for sequence in admitted:
            sequence.admitted = started
            self._rows.park(self.slots.take(sequence))
        for sequence in self._filling.fill(admitted, self.scheduler.next_in_line):
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Let a sequence begin its answer."""
        request = sequence.request
        sequence.search = search_for(request, self._target)
        is_plain = sequence.search is None
        self._rows.start(sequence.rows[0], request.max_new_tokens, request.decoder_start_id, request.search, is_plain=is_plain)
        self._waiting_for_first_token.append(sequence)
        if request.is_streamed:
            self._streamed[sequence] = None
        if sequence.search is not None:
            self._searching[sequence] = sequence.search

    def _compact(self) -> None:
        """Close the holes that ended requests left."""
        for move in self.slots.compact():
            self.runner.copy_row(move.source, move.target, int(self._rows.positions[move.source]))
            self._rows.move(move.source, move.target)

    def _decode(self) -> None:
        """Decode one token for every row, and let every sequence go on with it."""
        started = self._clock()
        num_rows = self.slots.num_rows
        try:
            candidates = self._step(self._num_candidates())
            choices = self._search(candidates)
        except Exception:
            self._fail(list(self.scheduler.running()), "decode step failed")
            return
        ended = [(self.slots.owner(row), row) for row in self._rows.take_likeliest(candidates)]
        for sequence in self._filling.unfilled:
            self._rows.park(sequence.rows[0])
        if self._looks:
            self._look(self._clock() - started, choices)
        self._num_failures = 0
        now = self._clock()
        self._forecast.observe_step(now - started)
        following = [choice for choice in choices if choice[-1]]
        for choice in following:
            self._follow(*choice)
        self._rows.feed_all((choice[0].rows, choice[1].live) for choice in following)
        self._note_first_tokens(now)
        self._stream()
        self._hand_over(num_rows)
        for sequence, row in ended:
            sequence.answers = [self._rows.answer(row)]
            self._finish(sequence)
        for sequence, search, _, parents in choices:
            if not parents:
                sequence.answers = search.answers()
                self._finish(sequence)
        if self._num_steps % STEPS_PER_CACHE_READING == 0:
            self._cache_bytes = self.runner.cache_bytes()
        self._num_steps += 1
        self._steps.append(Step(num_rows - len(self._filling.unfilled), self._clock() - started))

    def _hand_over(self, num_rows: int) -> None:
        """Let a search end those plain answers of which the end is forced, for it has to be found among the candidates."""
        for row in self._rows.before_forced_end(num_rows):
            sequence = self.slots.owner(row)
            sequence.search = search_from(sequence.request, self._target, self._rows.hypothesis(row))
            self._searching[sequence] = sequence.search

    def _step(self, num_candidates: int) -> Candidates:
        """Run the decoder on all rows, with K rounded up so that few different ones occur."""
        num_rows, rows = self.slots.num_rows, self._rows
        k = min(1 << (num_candidates - 1).bit_length(), self._target.num_choices)
        return self.runner.step(rows.tokens[:num_rows], rows.positions[:num_rows], k)

    def _num_candidates(self) -> int:
        """Return the K of the next step: those that wait for a look ask for nothing."""
        return max(
            (search.num_candidates for sequence, search in self._searching.items() if sequence not in self._looks), default=1
        )

    def _search(self, candidates: Candidates) -> list[Choice]:
        """Let every search choose that does not wait for a look; those that cannot choose yet will; one that raises fails alone."""
        choices: list[Choice] = []
        able = {sequence: search for sequence, search in self._searching.items() if sequence not in self._looks}
        each = advances(list(able.values()), [sequence.rows for sequence in able], candidates)
        for (sequence, search), advance in zip(able.items(), each, strict=True):
            self._advance(sequence, search, advance, choices)
        return choices

    def _look(self, step_seconds: float, choices: list[Choice]) -> None:
        """Take the looks there is time for, and let those choose that can now."""
        self._looks.hold()
        is_anyone_else = len(self._looks) < self.scheduler.num_running
        able = self._looks.take(step_seconds, is_anyone_else=is_anyone_else, fail=partial(self._fail, event="look failed"))
        for sequence in able:
            search = self._searching[sequence]
            self._advance(sequence, search, search.resume, choices)

    def _advance(self, sequence: Sequence, search: Search, advance: Advance, choices: list[Choice]) -> None:
        """Let one search choose and note what it chose, or let it wait for a look."""
        before = search.live
        try:
            parents = advance()
        except Exception:
            self._fail([sequence], "search failed")
            return
        if parents is None:
            self._looks.add(sequence, search)
        else:
            choices.append((sequence, search, before, parents))

    def _follow(self, sequence: Sequence, search: Search, before: list[Hypothesis], parents: list[int]) -> None:
        """Give a search's hypotheses their rows: twins get a copy of what they continue, beginning where the two rows differ."""
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
            self.scheduler.shrink(sequence, search.max_rows)
            self._outbox.add_shrunk(sequence)

    def _note_first_tokens(self, now: float) -> None:
        """Note when sequences generated their first token; those that are still fed a prefix have none."""
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
        """Report the tokens of streamed requests that are certain since the last step."""
        for sequence in self._streamed:
            if sequence.search is None:
                row = sequence.rows[0]
                new = [] if self._rows.is_eos(row) else [int(self._rows.tokens[row])]
            else:
                new = sequence.search.certain_tokens[sequence.num_streamed :]
            if new:
                sequence.num_streamed += len(new)
                self._outbox.add_tokens(sequence, new)

    def _finish(self, sequence: Sequence) -> None:
        """End a sequence that has its answers."""
        self.scheduler.remove(sequence.key)
        self._forecast.observe_completion(sequence, self._clock())
        self._release(sequence, sequence.answers[0].reason)

    def _release(self, sequence: Sequence, reason: FinishReason, incident: str = "") -> None:
        """Take the rows back of a sequence that the scheduler no longer has, and report its end."""
        if sequence.answers:
            sequence.num_generated = sum(len(answer.log_probs) for answer in sequence.answers)
        else:
            sequence.num_generated = self._num_generated(sequence)
        self._filling.forget(sequence)
        if sequence.admitted is not None:
            self.slots.release(sequence)
            self._streamed.pop(sequence, None)
            self._searching.pop(sequence, None)
            self._looks.discard(sequence)
            if sequence in self._waiting_for_first_token:
                self._waiting_for_first_token.remove(sequence)
        self._report(sequence, reason, incident)

    def _num_generated(self, sequence: Sequence) -> int:
        """Return how many tokens have been generated for an answer of a sequence; 0 for one that never ran."""
        if sequence.search is not None:
            return sequence.search.num_generated
        return self._rows.num_generated(sequence.rows[0]) if sequence.rows else 0

    def _report(
        self, sequence: Sequence, reason: FinishReason, incident: str = "", *, needed_seconds: float = 0.0, limit: str = ""
    ) -> None:
        seconds = self._seconds_until_a_place(sequence.request.share) if reason == "queue_full" else 0.0
        finished = sequence.finished(
            reason, self._clock(), incident=incident, retry_after_seconds=seconds, needed_seconds=needed_seconds, limit=limit
        )
        self._outbox.add_finished(sequence, finished)

    def _seconds_until_a_place(self, share: Share) -> float:
        return self._forecast.seconds_until_a_place(*self.scheduler.crowd_of(share))

    def _seconds_until_places(self, shares: list[Share]) -> dict[str, float]:
        return {share.caller: self._seconds_until_a_place(share) for share in shares}

    def _refuse(self, sequence: Sequence) -> None:
        """End a sequence for whose source there is no memory."""
        self.scheduler.remove(sequence.key)
        self._release(sequence, "queue_full")

    def _fail(self, sequences: list[Sequence], event: str) -> None:
        """End the sequences of a step that raised; call it while the exception is being handled."""
        incident = uuid.uuid4().hex[:12]
        log.exception(event, incident=incident, num_requests=len(sequences))
        self._num_failures = self._num_failures_before + 1  # however many groups of one step fail
        for sequence in sequences:
            self.scheduler.remove(sequence.key)
            self._release(sequence, "step_failed", incident)
