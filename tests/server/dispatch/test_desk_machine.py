"""A desk through any history: requests and pairs end once, at who asked, and what is counted comes back to nothing."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dragoman.server.dispatch.dispatcher import num_ahead
from dragoman.server.engine.messages import Request, Scored, ScoreRequest, SearchOptions, Share, Shrunk, Tokens
from tests.server.dispatch.fakes import FakeDesk, FakeFrontEnd, FakeReplica

ORIGINS = (b"ours", b"theirs")
INDEXES = (0, 1, 2)
SHARES = (Share(), Share("a", 2.0), Share("b", 1.0, 2, 3), Share("c", 0.5, 4, 0))


class DeskMachine(RuleBasedStateMachine):
    """Front ends and replicas do whatever the protocol lets them do."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1

    @initialize(slots=st.integers(1, 5), requests=st.sampled_from([0, 1, 3, 30]), tokens=st.sampled_from([6, 500]))
    def start(self, slots: int, requests: int, tokens: int) -> None:
        self.slots, self.max_waiting = slots, requests
        self.desk = FakeDesk(slots, requests, tokens, 16)
        self.clock = self.desk.clock
        self.replicas: dict[int, FakeReplica] = {}
        self.fronts: dict[bytes, FakeFrontEnd] = {}
        self.asked: dict[bytes, dict[int, Request | ScoreRequest]] = {}
        self.before: dict[bytes, dict[int, Request | ScoreRequest]] = {origin: {} for origin in ORIGINS}
        for origin in ORIGINS:
            self.attach(origin)
        self.open(0)

    def attach(self, origin: bytes) -> None:
        self.fronts[origin] = FakeFrontEnd(self.desk, origin)
        self.before[origin] |= self.asked.get(origin, {})
        self.asked[origin] = {}

    def open(self, index: int) -> None:
        self.replicas[index] = FakeReplica(self.desk, index, self.slots)

    def ended(self, origin: bytes) -> set[int]:
        front = self.fronts[origin]
        ends, scored = list(front.ends), [one.id for report in front.reports for one in report.scored]
        assert len(set(scored)) == len(scored) and not set(scored) & set(ends), "each ends once"
        return {*ends, *scored}

    @rule(
        origin=st.sampled_from(ORIGINS),
        drawn=st.lists(
            st.tuples(
                st.integers(1, 5),
                st.integers(1, 8),
                st.none() | st.floats(-1, 5),
                st.integers(0, 3),
                st.sampled_from(SHARES),
                st.booleans(),
            ),
            min_size=1,
            max_size=8,
        ),
    )
    def submit(self, origin: bytes, drawn: list[Any]) -> None:
        requests = []
        for width, num_tokens, seconds, priority, share, is_streamed in drawn:
            deadline = None if seconds is None else self.clock.now + seconds
            search = SearchOptions(num_beams=min(width, self.slots))
            requests.append(
                Request(
                    self.next_id, [7] * num_tokens, 10, self.clock.now, deadline, is_streamed, priority, search=search, share=share
                )
            )
            self.next_id += 1
        self.asked[origin] |= {one.id: one for one in requests}
        self.fronts[origin].submit(*requests)

    @rule(
        origin=st.sampled_from(ORIGINS),
        drawn=st.lists(
            st.tuples(st.integers(1, 12), st.none() | st.floats(-1, 5), st.sampled_from(SHARES)), min_size=1, max_size=8
        ),
    )
    def score(self, origin: bytes, drawn: list[Any]) -> None:
        pairs = []
        for num_tokens, seconds, share in drawn:
            deadline = None if seconds is None else self.clock.now + seconds
            pairs.append(ScoreRequest(self.next_id, [7] * num_tokens, [7] * num_tokens, self.clock.now, deadline, share=share))
            self.next_id += 1
        self.asked[origin] |= {one.id: one for one in pairs}
        self.fronts[origin].score(*pairs)

    @rule(origin=st.sampled_from(ORIGINS), data=st.data())
    def cancel(self, origin: bytes, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(1, self.next_id), max_size=4))
        self.fronts[origin].cancel(*ids)

    @precondition(lambda self: any(replica.requests for replica in self.replicas.values()))
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from([one for one in self.replicas.values() if one.requests]))
        number = data.draw(st.sampled_from(sorted(replica.requests)))
        reasons = ["eos", "step_failed", "deadline", "deadline_unmet", "draining"]
        reason = "cancelled" if number in replica.cancelled else data.draw(st.sampled_from(reasons))
        replica.finish(number, reason=reason)  # type: ignore[arg-type]

    @precondition(lambda self: any(replica.requests for replica in self.replicas.values()))
    @rule(data=st.data())
    def stream_and_shrink(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from([one for one in self.replicas.values() if one.requests]))
        number = data.draw(st.sampled_from(sorted(replica.requests)))
        before = {origin: len(front.reports) for origin, front in self.fronts.items()}
        replica.report(tokens=[Tokens(number, [number])])
        for origin, front in self.fronts.items():
            for report in front.reports[before[origin] :]:
                for tokens in report.tokens:
                    asked = (self.before[origin] | self.asked[origin])[tokens.id]
                    assert asked.arrival == replica.requests[number].arrival
                    assert isinstance(asked, Request) and asked.source_ids == replica.requests[number].source_ids
        now = self.slots_of(replica, number)
        fewer = data.draw(st.integers(1, now))
        self.shrunk[replica.index, number] = fewer
        replica.report(shrunk=[Shrunk(number, fewer)])

    @property
    def shrunk(self) -> dict[tuple[int, int], int]:
        return self.__dict__.setdefault("_shrunk", {})  # type: ignore[no-any-return]

    def slots_of(self, replica: FakeReplica, number: int) -> int:
        return self.shrunk.get((replica.index, number), replica.requests[number].search.num_slots)

    @precondition(lambda self: any(replica.pairs for replica in self.replicas.values()))
    @rule(data=st.data())
    def end_pairs(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from([one for one in self.replicas.values() if one.pairs]))
        numbers = data.draw(st.lists(st.sampled_from(sorted(replica.pairs)), min_size=1, unique=True))
        reason = data.draw(st.sampled_from(["eos", "step_failed", "deadline"]))
        for number in numbers:
            del replica.pairs[number]
        replica.report(scored=[Scored(number, reason, [-1.0], b"", 2.0) for number in numbers])

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def lose_replica(self, data: st.DataObject) -> None:
        replica = self.replicas.pop(data.draw(st.sampled_from(sorted(self.replicas))))
        replica.lose()

    @rule(index=st.sampled_from(INDEXES))
    def open_replica(self, index: int) -> None:
        if index not in self.replicas:
            self.open(index)

    @rule(origin=st.sampled_from(ORIGINS), is_told=st.booleans())
    def attach_again(self, origin: bytes, is_told: bool) -> None:
        if is_told:
            self.desk.detach(origin)
        self.attach(origin)

    @rule(seconds=st.floats(0.01, 4))
    def let_time_pass(self, seconds: float) -> None:
        self.desk.wait(seconds)

    @invariant()
    def nothing_is_given_twice_or_too_much(self) -> None:
        for replica in self.replicas.values():
            num_slots = sum(self.slots_of(replica, number) for number in replica.requests)
            load = self.desk._requests.dispatcher._loads[replica.index]
            assert load.num_slots == num_slots
            assert load.num_tokens == sum(len(one.source_ids) for one in replica.requests.values())
            widest = max((one.search.num_slots for one in replica.requests.values()), default=0)
            assert widest <= self.slots and num_slots < self.slots + num_ahead(self.slots) + max(widest, 1)

    @invariant()
    def no_caller_has_more_slots_than_its_limit(self) -> None:
        held: Counter[str] = Counter()
        for replica in self.replicas.values():
            for number, one in replica.requests.items():
                held[one.share.caller] += self.slots_of(replica, number)
        assert all(not share.max_slots or held[share.caller] <= share.max_slots for share in SHARES)

    @invariant()
    def who_asked_is_told_once_and_nobody_else(self) -> None:
        for origin in self.fronts:
            assert self.ended(origin) <= self.before[origin].keys() | self.asked[origin].keys()

    @invariant()
    def nobody_waits_past_a_deadline_or_beside_a_free_replica(self) -> None:
        dispatcher = self.desk._requests.dispatcher
        for key in dispatcher._waiting:
            deadline = dispatcher._waiting[key].request.deadline
            assert deadline is None or deadline > self.clock.now
        if not self.replicas:
            assert not dispatcher.has_work and not self.desk._pairs.dispatcher.num_waiting
        shares = [sequence.request.share for sequence in dispatcher._waiting.values()]
        free = [dispatcher._loads[replica.index] for replica in self.replicas.values() if not replica.requests]
        if any(not load.is_suspicious(self.clock.now) for load in free):
            assert all(share.max_slots for share in shares), "only what its caller's limit holds back"

    @invariant()
    def statistics_are_those_of_what_waits(self) -> None:
        statistics = self.desk.statistics()
        assert statistics.num_waiting >= 0 and statistics.num_waiting_tokens >= 0
        assert statistics.queue_seconds >= 0 and statistics.retry_after_seconds > 0

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            self.end_everything()

    def end_everything(self) -> None:
        """Have replicas end all they are given: then everything has ended, and nothing is counted any more."""
        if not self.replicas:
            self.open(0)
        while any(replica.requests or replica.pairs for replica in self.replicas.values()):
            for replica in self.replicas.values():
                replica.finish()
                replica.score()
        for origin, asked in self.asked.items():
            assert self.ended(origin) - self.before[origin].keys() == asked.keys(), "each has ended"
        requests, pairs = self.desk._requests, self.desk._pairs
        dispatcher = requests.dispatcher
        assert not dispatcher.has_work and not dispatcher._places and not requests._given._items and not requests._given._numbers
        assert dispatcher.num_used_slots == dispatcher.num_waiting_tokens == dispatcher.num_waiting_slots == 0
        assert dispatcher.num_held_back_slots == dispatcher._queue._num_held == 0
        assert dispatcher.num_places == self.max_waiting + self.slots * len(self.replicas)
        assert all((load.num_slots, load.num_tokens) == (0, 0) for load in dispatcher._loads.values())
        assert pairs.dispatcher.num_waiting == pairs.dispatcher.num_waiting_tokens == 0
        assert not pairs._given._items and not pairs.dispatcher._places
        assert all(load.num_tokens == 0 for load in pairs.dispatcher._loads.values())


TestDesk = DeskMachine.TestCase
TestDesk.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
