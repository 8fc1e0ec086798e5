"""The queue: order, limits of the queue and of callers, deadlines, the engine that gets a request; nothing is lost."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.dispatch.fair_queue import NUM_KEPT, Entry
from dragoman.server.dispatch.queue import (
    FORGET_SECONDS,
    SECONDS_PER_PRIORITY,
    SUSPICIOUS_SECONDS,
    Load,
    QueueIsFull,
    RequestQueue,
    queue_position,
)
from dragoman.server.engine.messages import Share, Step
from dragoman.server.engine.settings import QueueLimits
from tests.examples import num_examples
from tests.server.dispatch.queues import caller_of, entry, numbers, queue

NAMES = "abcd"


def places(assigned: list[Entry]) -> list[tuple[int, int]]:
    """Return the engine and the number of each entry."""
    return [(one.engine, one.request.id) for one in assigned if one.engine is not None]


@pytest.mark.parametrize(
    ("sizes", "engines"),
    [
        ([(5, 1)] * 5, [0, 1, 0, 1, 0]),  # to the engine that has fewest
        ([(90, 1), (3, 1), (5, 1)], [0, 1, 1]),  # of equally full ones to that with shorter texts
        ([(5, 3), (5, 2), (5, 2)], [0, 1, 1]),  # a wide one is in one engine as a whole
        ([(5, 4), (5, 3), (5, 3), (5, 1)], [0, 1, 1, 0]),  # and waits where least is missing
    ],
)
def test_requests_go_to_the_engine_with_most_room(sizes: list[tuple[int, int]], engines: list[int]) -> None:
    policy = queue(slots=4, engines=2, lookahead=2)
    for i, (num_tokens, width) in enumerate(sizes):
        policy.submit(entry(i, num_tokens=num_tokens, width=width, arrival=i), 0.0)
    assert sorted(places(policy.assign(0.0)), key=lambda one: one[1]) == [(index, i) for i, index in enumerate(engines)]
    policy.remove_all()
    for i in range(10, 13):  # one at a time
        policy.submit(one := entry(i), 0.0)
        assert places(policy.assign(0.0)) == [(0, i)]
        policy.remove(one)


def test_engines_are_given_a_few_requests_beyond_their_slots_and_no_more() -> None:
    policy = queue(slots=16, engines=2, lookahead=4)
    entries = [entry(i, arrival=i, num_tokens=1) for i in range(100)]
    for one in entries:
        policy.submit(one, 0.0)
    assert Counter(index for index, _ in places(policy.assign(0.0))) == {0: 20, 1: 20}
    assert policy.assign(0.0) == []
    policy.remove(entries[7])
    assert places(policy.assign(0.0)) == [(1, 40)], "one for one, where it has ended"


def test_requests_above_the_lowest_priority_are_counted_until_they_end() -> None:
    policy = queue(slots=2)
    entries = [entry(number, priority=priority) for number, priority in enumerate((0, -10, -9, 10, -10, 0))]
    for one in entries:
        policy.submit(one, 0.0)
    counts = [policy.num_urgent]
    for one in entries:
        policy.assign(0.0)
        policy.remove(one)
        policy.remove(one)
        counts.append(policy.num_urgent)
    assert counts == [4, 3, 3, 2, 1, 1, 0]


def test_few_requests_go_to_the_engine_that_has_its_core_for_itself() -> None:
    """One that other processes take half of its core from gets some of many, and its part again when it is not known any more."""

    def divided(num: int, now: float) -> list[int]:
        policy = queue(slots=16, engines=2)
        policy.note_report(0, 1.0, [Step(1, 0.01, 0.005)] * 50)
        policy.note_report(1, 1.0, [Step(1, 0.01, 0.01), Step(1, 0.01), Step(1, 0.0)] * 20)
        entries = [entry(number) for number in range(num)]
        for one in entries:
            policy.submit(one, now)
        return [sum(one.engine == index for one in entries) for index in (0, 1)]

    assert divided(6, 1.0) == [0, 6]
    assert divided(16, 1.0)[0] in (2, 3)
    assert divided(6, 1.0 + FORGET_SECONDS) == [3, 3]


def test_an_engine_that_is_silent_is_given_nothing_while_another_reports() -> None:
    policy = queue(slots=2, engines=2, lookahead=2)
    now = 2 * SUSPICIOUS_SECONDS
    policy.note_report(1, now, [])
    for i in range(5):
        policy.submit(entry(i, arrival=i), now)
    assert [index for index, _ in places(policy.assign(now))] == [1] * 4
    now += 2 * SUSPICIOUS_SECONDS
    assert places(policy.assign(now)) == [(0, 4)], "none was heard: this process may have been held up"


def test_a_callers_slots_are_counted_over_all_engines() -> None:
    policy = queue(slots=4, engines=2, lookahead=2)
    entries = [entry(i, Share("a", max_slots=3), arrival=i) for i in range(6)] + [entry(6, Share("b"), arrival=6)]
    for one in entries:
        policy.submit(one, 0.0)
    assert places(policy.assign(0.0)) == [(0, 0), (1, 1), (0, 2), (1, 6)]
    policy.remove(entries[1])
    assert places(policy.assign(0.0)) == [(1, 3)]


def test_score_requests_go_by_tokens_and_take_no_place_of_the_queue() -> None:
    policy = RequestQueue(QueueLimits(3, 1000), has_slots=False)
    for index in range(2):
        policy.open(Load(index, 0, 10, 0.0))
    entries = [entry(i, num_tokens=8, width=0, arrival=i) for i in range(8)]
    for one in entries[:7]:
        policy.submit(one, 0.0)
    with pytest.raises(QueueIsFull):
        policy.submit(entries[7], 0.0)
    assert places(policy.assign(0.0)) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    policy.remove(entries[1])
    policy.remove(entries[3])
    assert places(policy.assign(0.0)) == [(1, 4), (1, 5)] and policy.num_waiting == 1


def test_one_step_of_priority_is_worth_a_second_of_waiting() -> None:
    policy = queue(slots=1)
    policy.submit(first := entry(9), 0.0)
    policy.submit(entry(0), 0.0)
    policy.submit(entry(1, arrival=0.5 * SECONDS_PER_PRIORITY, priority=1), 0.0)
    policy.submit(entry(2, arrival=1.5 * SECONDS_PER_PRIORITY, priority=1), 0.0)
    order = []
    policy.assign(0.0)
    policy.remove(first)
    while policy.has_work:
        (admitted,) = policy.assign(0.0)
        order.append(admitted.request.id)
        policy.remove(admitted)
    assert order == [1, 0, 2]


def test_deadlines_end_waiting_requests_alone() -> None:
    policy = queue(slots=1)
    for i in range(4):
        policy.submit(entry(i, deadline=5.0 + i), 0.0)
    assert numbers(policy.assign(0.0)) == [0]
    assert policy.next_deadline == 6.0 and policy.expire(5.9) == []
    assert numbers(policy.expire(7.0)) == [1, 2] and policy.num_waiting == 1


SHARES = st.builds(
    Share,
    st.sampled_from(NAMES),
    st.sampled_from([1e-9, 0.5, 1.0, 1.0, 3.0, 1e9]),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0, 0, 1, 6]),
)
SUBMISSIONS = st.tuples(st.integers(0, 40), st.integers(-2, 3), SHARES, st.sampled_from([None, None, 3, 20]))
OPERATIONS = st.one_of(
    SUBMISSIONS,
    SUBMISSIONS,
    st.tuples(st.sampled_from(["hand over", "hand over", "remove", "finish", "shrink", "expire"]), st.integers(0, 80)),
)


class Book:
    """Invariants of a queue before one engine: every submitted request is in one place, or has ended once."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.policy = queue(slots, 12, 150)
        self.waiting: dict[int, Entry] = {}
        self.running: dict[int, Entry] = {}
        self.shares: dict[str, Share] = {}

    @property
    def num_open(self) -> int:
        """Free slots; negative where a wide request has been given that waits for some of its slots."""
        return self.slots - sum(one.num_slots for one in self.running.values())

    @property
    def num_free(self) -> int:
        return max(self.num_open, 0)

    def held(self, caller: str) -> int:
        return sum(one.num_slots for one in self.running.values() if caller_of(one) == caller)

    def line(self, caller: str) -> list[Entry]:
        """Return what a caller waits for, in the order in which it must be admitted."""
        own = [one for one in self.waiting.values() if caller_of(one) == caller]
        return sorted(own, key=lambda one: (queue_position(one.request), one.request.id))

    def is_at_limit(self, share: Share) -> bool:
        """Return whether as many requests wait as a caller may have beyond those that its free slots will take."""
        num_open = max(min(self.num_free, share.max_slots - self.held(share.caller)), 0) if share.max_slots else self.num_free
        return 0 < share.max_waiting <= len(self.line(share.caller)) - num_open

    def submit(self, one: Entry) -> None:
        share = one.request.share
        tokens = sum(other.num_tokens for other in self.waiting.values()) + one.num_tokens
        is_by_tokens = bool(self.waiting) and tokens > 150
        is_full = len(self.waiting) >= 12 + self.num_open or is_by_tokens
        is_wide, is_at_limit = 0 < share.max_slots < one.num_slots, self.is_at_limit(share)
        try:
            pushed_out = self.policy.submit(one, 0.0)
        except QueueIsFull as full:
            assert full.limit == ("max_slots" if is_wide else "max_waiting" if is_at_limit else "")
            assert full.limit or is_full
            return
        assert not (is_wide or is_at_limit)
        assert is_full == bool(pushed_out)
        if pushed_out:
            self.push_out(one, pushed_out, is_by_tokens=is_by_tokens)
        self.shares[share.caller] = share
        if one.engine is None:
            self.waiting[one.request.id] = one
        else:
            assert not self.waiting and (not share.max_slots or self.held(share.caller) + one.num_slots <= share.max_slots)
            self.running[one.request.id] = one

    def push_out(self, one: Entry, pushed_out: list[Entry], *, is_by_tokens: bool) -> None:
        """Check that the last in the line of the caller with most leave, and no more than have to."""
        (caller,) = {caller_of(other) for other in pushed_out}
        line = self.line(caller)
        assert caller != caller_of(one)
        assert line[-len(pushed_out) :] == pushed_out[::-1] and len(line) > len(pushed_out)

        def part(caller: str, share: Share, more: Entry | None = None) -> float:
            own = [*self.line(caller), *([more] if more else [])]
            return (sum(other.num_tokens for other in own) if is_by_tokens else len(own)) / share.weight

        most = part(caller, self.shares[caller])
        assert part(caller_of(one), one.request.share, one) < most
        others = [name for name in NAMES if len(self.line(name)) > 1 and name != caller_of(one)]
        assert all(part(name, self.shares[name]) <= most for name in others)
        assert is_by_tokens or len(pushed_out) == 1
        for other in pushed_out:
            assert self.waiting.pop(other.request.id) is other
            assert not other.is_waiting and other.engine is None

    def assign(self) -> None:
        before = {name: self.line(name) for name in NAMES}
        for one in self.policy.assign(0.0):
            if one.request.id not in self.waiting:
                continue  # given when it was submitted
            assert before[caller_of(one)].pop(0) is one, "a caller's own order"
            held, limit = self.held(caller_of(one)), self.shares[caller_of(one)].max_slots
            assert self.num_free and (not limit or not held or held + one.num_slots <= limit)
            self.running[one.request.id] = self.waiting.pop(one.request.id)
        if self.num_free:  # no slot is idle but for callers' limits
            assert all(self.is_held_back(self.line(name)[0]) for name in NAMES if self.line(name))

    def is_held_back(self, one: Entry) -> bool:
        limit, held = self.shares[caller_of(one)].max_slots, self.held(caller_of(one))
        return bool(limit and held and held + one.num_slots > limit)

    def expire(self, now: float) -> None:
        late = [number for number, one in self.waiting.items() if one.request.deadline is not None and one.request.deadline <= now]
        assert sorted(numbers(self.policy.expire(now))) == sorted(late)
        for number in late:
            del self.waiting[number]

    def remove(self, one: Entry) -> None:
        self.policy.remove(one)
        self.waiting.pop(one.request.id, None)
        self.running.pop(one.request.id, None)

    def check(self) -> None:
        policy, waiting, fair = self.policy, self.waiting.values(), self.policy._fair
        assert {one.request.id: one for one in fair} == self.waiting
        assert {one.request.id: one for one in policy.running()} == self.running
        assert policy.num_used == self.slots - self.num_open == policy._loads[0].num_units
        assert policy._loads[0].num_tokens == sum(one.num_tokens for one in self.running.values())
        assert len(fair) == policy.num_waiting == len(waiting)
        assert policy.num_waiting_tokens == sum(one.num_tokens for one in waiting)
        assert fair.num_slots == sum(one.num_slots for one in waiting)
        assert fair.parts_of_weight == sum(line.parts_of_weight for line in fair.waiting)
        assert dict(policy.waiting_by_caller()) == {name: len(self.line(name)) for name in NAMES if self.line(name)}
        assert policy.at_their_limit().keys() == {name for name in NAMES if self.line(name) and self.is_at_limit(self.shares[name])}
        excess = 0
        for name in NAMES:
            if name in self.shares and (limit := self.shares[name].max_slots):
                excess += max(sum(one.num_slots for one in self.line(name)) - max(limit - self.held(name), 0), 0)
        assert fair.num_held_back == excess
        assert policy.has_work or not fair._queues


@settings(max_examples=num_examples(120, of=2000), deadline=None)
@given(st.lists(OPERATIONS, max_size=100), st.integers(3, 6))
def test_limits_hold_and_everything_ends_once_in_any_history(operations: list[tuple], slots: int) -> None:  # type: ignore[type-arg]
    book = Book(slots)
    for number, (kind, value, *rest) in enumerate(operations):
        running, waiting = sorted(book.running), sorted(book.waiting)
        if isinstance(kind, int):
            share, patience = rest
            deadline = None if patience is None else float(number + patience)
            book.submit(entry(number, share, kind, 1 + kind % 3, value, float(number), deadline=deadline))
        elif kind == "hand over":
            book.assign()
        elif kind == "expire":
            book.expire(float(number))
        elif kind == "remove" and waiting:
            book.remove(book.waiting[waiting[value % len(waiting)]])
        elif kind == "shrink" and running:
            one = book.running[running[value % len(running)]]
            book.policy.shrink(one, max(one.num_slots - value, 1))
        elif kind == "finish" and running:
            book.remove(book.running[running[value % len(running)]])
        book.check()
    assert set(numbers(book.policy.remove_all())) == book.waiting.keys() | book.running.keys()
    assert not book.policy.has_work and not book.policy._fair._queues


def test_requests_that_come_and_go_leave_nothing() -> None:
    policy = queue(1)
    entries = [entry(i, arrival=i, deadline=1e9) for i in range(2000)]
    for i, one in enumerate(entries):
        policy.submit(one, 0.0)
        if i > 2:
            policy.remove(entries[i - 1])
    line = policy._fair.of("")
    assert line is not None and max(len(line._places), len(policy._fair._turns), len(policy._deadlines)) < 3 * NUM_KEPT
    assert policy.assign(0.0) == [entries[0]]
    policy.remove(entries[0])
    assert numbers(policy.assign(0.0)) == [1]
