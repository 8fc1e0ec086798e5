"""A dispatcher through any history: each request ends once, and all counts return to nothing."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dragoman.server.dispatch.dispatcher import MIN_LOOKAHEAD
from dragoman.server.dispatch.queue import SUSPICIOUS_SECONDS
from dragoman.server.engine.messages import Request, ScoreRequest, SearchOptions, Share, Shrunk, Tokens
from tests.examples import num_examples
from tests.server.dispatch.fakes import FakeCaller, FakeDispatcher, FakeEngine

SHARES = (Share(), Share("a", 2.0), Share("b", 1.0, 2, 3), Share("c", 0.5, 4, 0))
KINDS = st.tuples(
    st.integers(0, 5),
    st.integers(1, 8),
    st.none() | st.floats(-1, 5),
    st.integers(0, 3),
    st.sampled_from(SHARES),
    st.booleans(),
)


class DispatcherMachine(RuleBasedStateMachine):
    """Callers and engines do whatever the protocol lets them do; a width of 0 is a score request."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1

    @initialize(slots=st.integers(1, 5), requests=st.sampled_from([1, 3, 30]), tokens=st.sampled_from([6, 500]))
    def start(self, slots: int, requests: int, tokens: int) -> None:
        self.slots, self.max_waiting = slots, requests
        self.dispatcher = FakeDispatcher(requests, tokens, 16)
        self.clock, self.caller = self.dispatcher.clock, FakeCaller(self.dispatcher)
        self.engines: dict[int, FakeEngine] = {}
        self.asked: set[int] = set()
        self.cancelled: set[int] = set()
        self.shrunk: dict[int, int] = {}
        self.open(0)

    def open(self, index: int) -> None:
        self.engines[index] = FakeEngine(self.dispatcher, index, self.slots)

    @precondition(lambda self: self.engines)
    @rule(drawn=st.lists(KINDS, min_size=1, max_size=8))
    def submit(self, drawn: list[Any]) -> None:
        new: list[Request | ScoreRequest] = []
        for width, num_tokens, seconds, priority, share, is_streamed in drawn:
            source, number, now = [7] * num_tokens, self.next_id, self.clock.now
            deadline = None if seconds is None else now + seconds
            self.next_id += 1
            if width:
                search = SearchOptions(num_beams=min(width, self.slots))
                new.append(Request(number, source, 10, now, deadline, is_streamed, priority, search=search, share=share))
            else:
                new.append(ScoreRequest(number, source, source, now, deadline, priority, share=share))
        self.asked |= {one.id for one in new}
        self.caller.submit(*new)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(1, self.next_id), max_size=4))
        self.cancelled |= set(ids) - self.caller.ends.keys()
        self.caller.cancel(*ids)

    @precondition(lambda self: any(engine.requests for engine in self.engines.values()))
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([one for one in self.engines.values() if one.requests]))
        number = data.draw(st.sampled_from(sorted(engine.requests)))
        reason = data.draw(st.sampled_from(["eos", "step_failed", "deadline", "queue_full", "draining"]))
        engine.finish(number, reason="cancelled" if number in engine.cancelled else reason)

    @precondition(lambda self: any(engine.requests for engine in self.engines.values()))
    @rule(data=st.data())
    def stream_and_shrink(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([one for one in self.engines.values() if one.requests]))
        number = data.draw(st.sampled_from(sorted(engine.requests)))
        engine.report(tokens=[Tokens(number, [number])])
        assert number in self.cancelled or self.caller.tokens[number][-1] == number
        self.shrunk[number] = data.draw(st.integers(1, self.slots_of(engine.requests[number])))
        engine.report(shrunk=[Shrunk(number, self.shrunk[number])])

    def slots_of(self, request: Request) -> int:
        return self.shrunk.get(request.id, request.search.num_slots)

    @precondition(lambda self: any(engine.pairs for engine in self.engines.values()))
    @rule(data=st.data())
    def end_score_requests(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([one for one in self.engines.values() if one.pairs]))
        numbers = data.draw(st.lists(st.sampled_from(sorted(engine.pairs)), min_size=1, unique=True))
        engine.score(*numbers, reason=data.draw(st.sampled_from(["eos", "step_failed", "deadline"])))

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def lose_engine(self, data: st.DataObject) -> None:
        self.engines.pop(data.draw(st.sampled_from(sorted(self.engines)))).lose()

    @rule(index=st.sampled_from((0, 1, 2)))
    def open_engine(self, index: int) -> None:
        if index not in self.engines:
            self.open(index)

    @rule(seconds=st.floats(0.01, 4))
    def let_time_pass(self, seconds: float) -> None:
        self.dispatcher.wait(seconds)

    @invariant()
    def nothing_is_given_too_much(self) -> None:
        for engine in self.engines.values():
            num_slots = sum(map(self.slots_of, engine.requests.values()))
            load = self.dispatcher._requests._loads[engine.index]
            assert load.num_units == num_slots
            assert load.num_tokens == sum(len(one.source_ids) for one in engine.requests.values())
            widest = max((one.search.num_slots for one in engine.requests.values()), default=0)
            assert num_slots < self.slots + MIN_LOOKAHEAD + max(widest, 1)

    @invariant()
    def no_caller_has_more_slots_than_its_limit(self) -> None:
        held: Counter[str] = Counter()
        for engine in self.engines.values():
            for one in engine.requests.values():
                held[one.share.caller] += self.slots_of(one)
        assert all(not share.max_slots or held[share.caller] <= share.max_slots for share in SHARES)

    @invariant()
    def only_requests_that_were_asked_end(self) -> None:
        assert self.caller.ends.keys() <= self.asked

    @invariant()
    def no_request_waits_past_its_deadline_or_beside_a_free_engine(self) -> None:
        waiting = self.dispatcher._requests._fair
        assert all(one.request.deadline is None or one.request.deadline > self.clock.now for one in waiting)
        if not self.engines:
            assert not self.dispatcher._entries
        loads = [self.dispatcher._requests._loads[engine.index] for engine in self.engines.values() if not engine.requests]
        if any(self.clock.now - load.last_heard <= SUSPICIOUS_SECONDS for load in loads):
            assert all(one.request.share.max_slots for one in waiting), "only what its caller's limit holds back"

    @invariant()
    def statistics_are_those_of_what_waits(self) -> None:
        statistics = self.dispatcher.statistics_for_callers()
        assert statistics.num_waiting >= 0 and statistics.num_waiting_tokens >= 0
        assert statistics.queue_seconds >= 0 and statistics.retry_after_seconds > 0

    def teardown(self) -> None:
        """Have engines end all they are given: then everything has ended, and nothing is counted any more."""
        if not hasattr(self, "dispatcher"):
            return
        if not self.engines:
            self.open(0)
        while any(engine.requests or engine.pairs for engine in self.engines.values()):
            for engine in self.engines.values():
                engine.finish()
                engine.score()
        assert self.asked - self.cancelled <= self.caller.ends.keys(), "each has ended"
        assert not self.dispatcher._entries
        for queue in self.dispatcher._queues:
            assert not queue.has_work and queue.num_used == queue.num_waiting_tokens == 0
            assert queue._fair.num_slots == queue._fair.num_held_back == queue._fair._num_held == 0
            assert all((load.num_units, load.num_tokens) == (0, 0) for load in queue._loads.values())
        assert self.dispatcher._requests.num_places == self.max_waiting + self.slots * len(self.engines)


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=num_examples(25, of=200), stateful_step_count=25, deadline=None)
