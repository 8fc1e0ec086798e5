"""A dispatcher and a clock around an engine, which check after each operation what must be true of it."""

from collections import Counter
from dataclasses import dataclass, field

from dragoman.server.engine.engine import MAX_CONSECUTIVE_FAILURES, EngineIsBroken
from dragoman.server.engine.messages import Finished, Request
from dragoman.server.engine.sequence import Sequence
from tests.server.engine.bench import MAX_TARGET, Bench, reference_answers

MAX_SOURCE = 14


@dataclass
class Record:
    """The dispatcher's record of a request.

    Attributes:
        request: What was asked.
        streamed: Tokens that were reported.
        finished: How it ended.
        is_spoiled: Whether its search was made to raise.
    """

    request: Request
    streamed: list[int] = field(default_factory=list)
    finished: Finished | None = None
    is_spoiled: bool = False


class Witness:
    """A dispatcher and a clock around one engine with the fake runner, and a new engine when one is broken.

    Args:
        limits: A bench's arguments.
        seen: Counts of what has happened.
    """

    def __init__(self, limits: tuple[int, ...], seen: Counter[str]) -> None:
        self._limits, self.seen = limits, seen
        self.records: dict[int, Record] = {}
        self._expected: set[str] = set()
        self._first_in_line: tuple[Sequence | None, int] = (None, 0)
        self._start()

    def _start(self) -> None:
        bench = Bench(*self._limits)
        if self.records:
            bench.clock.now = self.clock.now
        self.engine, self.runner, self.clock = bench.engine, bench.runner, bench.clock
        self.slots = self.engine.slots
        self.runner.on_step, self.runner.on_refetch = self._check_rows_of_step, self._check_refetch

    @property
    def outstanding(self) -> list[int]:
        return [key for key, record in self.records.items() if record.finished is None]

    def is_outstanding(self, key: int) -> bool:
        return key in self.records and self.records[key].finished is None

    # Actions.

    def submit(self, request: Request) -> None:
        self.records[request.id] = Record(request)
        self._expected = set()
        self.engine.submit(request)
        self.collect()

    def cancel(self, key: int) -> None:
        self._expected = {"cancelled"} if self.is_outstanding(key) else set()
        self.engine.cancel(key)
        self.collect()
        assert not self.is_outstanding(key)

    def end_all(self) -> None:
        self._expected = {"draining"}
        self.engine.end_all("draining")
        self.collect()
        assert not self.outstanding

    def spoil(self, sequence: Sequence) -> None:
        """Let a sequence's search raise at the next step, alone or beside others like it, which it alone does not survive."""

        def fail(_: object) -> None:
            raise RuntimeError("made to fail")

        for way in ("advance", "go_on_with"):
            if hasattr(sequence.search, way):
                setattr(sequence.search, way, fail)
        self.records[sequence.request.id].is_spoiled = True
        self.step()
        assert not self.is_outstanding(sequence.request.id)

    def step(self) -> None:
        self._expected, now = {"eos", "length", "deadline", "step_failed"}, self.clock.now
        running, failing = list(self.engine.running.values()), self.runner.fail_next
        try:
            self.engine.step()
        except EngineIsBroken:
            self.seen["broken"] += 1
            assert self.engine._num_failures == MAX_CONSECUTIVE_FAILURES
            self._expected.add("draining")
            self.collect(may_fail=True)
            assert not self.engine.has_work and not self.outstanding
            self._start()  # as a new process would
            return
        has_failed = failing is not None and self.runner.fail_next is None
        self.collect(may_fail=has_failed)
        if has_failed and failing == "step":
            assert not len(self.engine.running) and not any(self.is_outstanding(s.request.id) for s in running)
        deadlines = [self.records[key].request.deadline for key in self.outstanding]
        assert all(deadline is None or deadline > now for deadline in deadlines)
        head = next(iter(self.engine.waiting.values()), None)
        count = self._first_in_line[1] + 1 if head is not None and head is self._first_in_line[0] else 0
        assert count <= MAX_TARGET + MAX_SOURCE, "the first in line starves"
        self._first_in_line = head, count

    def drain(self) -> None:
        """Give no new work: everything ends, and nothing is left."""
        num_steps = (len(self.engine.waiting) + 1) * (MAX_TARGET + MAX_SOURCE)
        while self.engine.has_work:
            self.step()
            num_steps -= 1
        assert num_steps >= 0 and not self.outstanding
        self.step()
        prefill = self.engine._prefill
        assert self.slots.num_rows == self.engine.num_used_slots == getattr(prefill, "_num_bytes", 0) == 0
        assert not getattr(prefill, "_held", None)
        assert not len(self.engine._refetch) and not self.engine.has_news

    # Results.

    def collect(self, *, may_fail: bool = False) -> None:
        assert self.runner.complaints == []
        report = self.engine.take_report()
        for tokens in report.tokens:
            record = self.records[tokens.id]
            assert record.request.is_streamed and record.finished is None and tokens.token_ids
            record.streamed += tokens.token_ids
        for end in report.finished:
            record = self.records[end.id]
            assert record.finished is None, "a request ended twice"
            record.finished = end
            assert end.reason in self._expected
            assert end.reason != "step_failed" or record.is_spoiled or may_fail
            self._check_end(record, end)
            self.seen[end.reason] += 1

    def _check_end(self, record: Record, end: Finished) -> None:
        """Compare an end with the reference; what was streamed before an error is a beginning of it."""
        request = record.request
        assert (end.incident != "") == (end.reason == "step_failed")
        if end.reason == "deadline":
            assert request.deadline is not None and request.deadline <= end.ended
        if end.reason not in ("eos", "length"):
            assert end.answers == []
            if record.streamed:
                assert record.streamed == reference_answers(request)[0].token_ids[: len(record.streamed)]
            return
        assert end.answers == reference_answers(request)
        assert end.reason == end.answers[0].reason
        assert end.num_generated == sum(len(answer.log_probs) for answer in end.answers)
        assert record.streamed == (end.answers[0].token_ids if request.is_streamed else [])
        assert end.admitted is not None and end.admitted <= end.ended
        if end.num_generated:
            assert end.first_token is not None and end.admitted <= end.first_token <= end.ended
        search = request.search
        is_kind = {"beams": search.num_beams > 1, "samples": search.sampling, "alternatives": search.has_alternatives}
        self.seen[next((kind for kind, is_it in is_kind.items() if is_it), "greedy")] += 1

    # Invariants.

    def _waiting(self) -> list[Sequence]:
        return list(self.engine.waiting.values())

    def _check_rows_of_step(self) -> None:
        """See, whenever the decoder runs, that all rows belong to somebody, and none to two; holes are for what just failed."""
        rows = sorted(row for sequence in self.engine.running.values() for row in sequence.rows)
        assert rows == list(range(self.slots.num_rows))
        self.clock.now += 0.01

    def _check_refetch(self) -> None:
        self.seen["look"] += 1
        self.seen["look beside others"] += len(self.engine._refetch) < len(self.engine.running)
        self.clock.now += 0.02

    def check_books(self) -> None:
        """See that scheduler and slots have what is outstanding and nothing else; count what is under way."""
        prefill, limits = self.engine._prefill, self.engine.limits
        running, waiting = list(self.engine.running.values()), self._waiting()
        rows = [row for sequence in running for row in sequence.rows]
        assert len(rows) == len(set(rows)), "a row is used twice"
        assert all(self.slots.owner(row) is sequence for sequence in running for row in sequence.rows)
        assert all(1 <= len(sequence.rows) <= sequence.num_slots for sequence in running)
        assert self.engine.num_used_slots == sum(s.num_slots for s in running) <= limits.max_slots
        assert not any(s.rows or s.search or s.admitted for s in waiting)
        inside = {s.request.id: s.request for s in (*running, *waiting)}
        assert inside == {key: self.records[key].request for key in self.outstanding}
        num_prefetched = len(getattr(prefill, "_held", ()))  # prompts are not prefetched
        assert num_prefetched <= min(limits.max_prefetch, len(waiting))
        assert num_prefetched or not getattr(prefill, "_num_bytes", 0)
        self.seen["encoded ahead"] += num_prefetched > 0
        self.seen["pause"] += len(self.engine._refetch) > 0
        if self.runner.has_prompts:
            read = {s: self.runner.sources[s.rows[0]] for s in running}
            assert all(read[s] == tuple(s.request.source_ids[: len(read[s])]) for s in running)
            unread = [s for s in running if len(read[s]) < s.num_source_tokens]
            self.seen["read in pieces"] += any(read[s] for s in unread)
            self.seen["read beside others"] += 0 < len(unread) < len(running)
