"""The scheduler: order, limits of the queue and of callers, budgets, deadlines, and that nothing is ever lost."""

import pytest
from dragoman.server.engine.line import NUM_KEPT
from dragoman.server.engine.scheduler import SECONDS_PER_PRIORITY, Limits, QueueIsFull, Scheduler, place_in_line
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.messages import Share
from dragoman.server.engine.sequence import Sequence
from tests.examples import num_examples
from tests.server.engine.sequences import caller_of, numbers, scheduler, sequence

NAMES = "abcd"


def filled(*sizes: int, **limits: int) -> Scheduler:
    policy = scheduler(**limits)
    for i, size in enumerate(sizes):
        policy.submit(sequence(i, num_tokens=size, arrival=i))
    return policy


BUDGETS: list[tuple[list[int], int | None, list[list[int]]]] = [
    ([30, 6, 4, 4], None, [[0], [1, 2], [3]]),  # a source larger than the budget is encoded alone
    ([4, 5, 6, 7], None, [[0, 1], [2], [3]]),
    ([4, 5, 6, 7], 0, [[0, 1, 2]]),  # what is read in pieces is admitted while less than the budget is unread
    ([4, 5, 6, 7], 7, [[0]]),
    ([4, 5], 10, [[]]),
    ([4, 5], 100, [[]]),
    ([2000, 3], 0, [[0]]),
    ([2000, 3], 9, [[0]]),
    ([0, 0, 3], 50, [[0, 1]]),
]


@pytest.mark.parametrize(("sizes", "num_unread", "admitted"), BUDGETS)
def test_the_prefill_budget_bounds_each_step(sizes: list[int], num_unread: int | None, admitted: list[list[int]]) -> None:
    policy = filled(*sizes, slots=8, budget=10)
    assert [numbers(policy.admit(num_unread)) for _ in admitted] == admitted


def test_one_step_of_priority_is_worth_a_second_of_waiting() -> None:
    policy = scheduler(slots=1)
    policy.submit(sequence(0))
    policy.submit(sequence(1, arrival=0.5 * SECONDS_PER_PRIORITY, priority=1))
    policy.submit(sequence(2, arrival=1.5 * SECONDS_PER_PRIORITY, priority=1))
    order = []
    while policy.has_work:
        (admitted,) = policy.admit()
        order.append(admitted.request.id)
        policy.remove(admitted.key)
    assert order == [1, 0, 2]


def test_a_deadline_that_outlives_its_request_does_not_end_a_later_one_of_the_same_id() -> None:
    policy = scheduler()
    policy.submit(sequence(0, deadline=5.0))
    policy.submit(sequence(9))
    policy.remove((b"", 0))
    policy.submit(sequence(0, deadline=50.0))
    assert policy.expire(6.0) == []
    assert numbers(policy.admit()) == [9, 0]
    assert policy.expire(49.9) == [] and numbers(policy.expire(50.0)) == [0]


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
    st.tuples(st.sampled_from(["admit", "admit", "remove", "finish", "shrink", "expire"]), st.integers(0, 80)),
)


class Book:
    """Invariants of a scheduler: every submitted request is in one place, or has ended once."""

    def __init__(self, slots: int, budget: int) -> None:
        self.limits = Limits(slots, 12, 150, budget)
        self.policy = Scheduler(self.limits)
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.shares: dict[str, Share] = {}

    @property
    def num_free(self) -> int:
        return self.limits.max_slots - sum(one.num_slots for one in self.running.values())

    def held(self, caller: str) -> int:
        return sum(one.num_slots for one in self.running.values() if caller_of(one) == caller)

    def line(self, caller: str) -> list[Sequence]:
        """Return what a caller waits for, in the order in which it must be admitted."""
        own = [one for one in self.waiting.values() if caller_of(one) == caller]
        return sorted(own, key=lambda one: (place_in_line(one.request), one.request.id))

    def is_at_limit(self, share: Share) -> bool:
        """Return whether as many requests wait as a caller may have beyond those that its free slots will take."""
        num_open = max(min(self.num_free, share.max_slots - self.held(share.caller)), 0) if share.max_slots else self.num_free
        return 0 < share.max_waiting <= len(self.line(share.caller)) - num_open

    def submit(self, one: Sequence) -> None:
        share, limits = one.request.share, self.limits
        tokens = sum(other.num_source_tokens for other in self.waiting.values()) + one.num_source_tokens
        is_by_tokens = bool(self.waiting) and tokens > limits.max_waiting_tokens
        is_full = len(self.waiting) >= limits.max_waiting_requests + self.num_free or is_by_tokens
        is_wide, is_at_limit = 0 < share.max_slots < one.num_slots, self.is_at_limit(share)
        try:
            pushed_out = self.policy.submit(one)
        except QueueIsFull as full:
            assert full.limit == ("max_slots" if is_wide else "max_waiting" if is_at_limit else "")
            assert full.limit or is_full
            return
        assert not (is_wide or is_at_limit)
        assert is_full == bool(pushed_out)
        if pushed_out:
            self.push_out(one, pushed_out, is_by_tokens=is_by_tokens)
        self.shares[share.caller] = share
        self.waiting[one.request.id] = one

    def push_out(self, one: Sequence, pushed_out: list[Sequence], *, is_by_tokens: bool) -> None:
        """Check that the last in the line of the caller with most leave, and no more than have to."""
        (caller,) = {caller_of(other) for other in pushed_out}
        line = self.line(caller)
        assert caller != caller_of(one)
        assert line[-len(pushed_out) :] == pushed_out[::-1] and len(line) > len(pushed_out)

        def part(caller: str, share: Share, more: Sequence | None = None) -> float:
            own = [*self.line(caller), *([more] if more else [])]
            return (sum(other.num_source_tokens for other in own) if is_by_tokens else len(own)) / share.weight

        most = part(caller, self.shares[caller])
        assert part(caller_of(one), one.request.share, one) < most
        others = [name for name in NAMES if len(self.line(name)) > 1 and name != caller_of(one)]
        assert all(part(name, self.shares[name]) <= most for name in others)
        assert is_by_tokens or len(pushed_out) == 1
        for other in pushed_out:
            assert self.waiting.pop(other.request.id) is other
            assert self.policy.remove(other.key) is None, "it has ended"

    def admit(self) -> None:
        before = {name: self.line(name) for name in NAMES}
        admitted = self.policy.admit()
        first, *others = [one.num_source_tokens for one in admitted] or [0]
        assert first + sum(others) <= self.limits.prefill_tokens_per_step or not any(others), "a larger source is encoded alone"
        for one in admitted:
            assert before[caller_of(one)].pop(0) is one, "a caller's own order"
            held, limit = self.held(caller_of(one)), self.shares[caller_of(one)].max_slots
            assert not limit or not held or held + one.num_slots <= limit
            self.running[one.request.id] = self.waiting.pop(one.request.id)
        assert self.num_free >= 0
        if not admitted and self.num_free:  # no slot is idle but for a wide request whose turn it is, or for callers' limits
            first = [self.line(name)[0] for name in NAMES if self.line(name)]
            free = [one for one in first if not self.is_held_back(one)]
            assert not free or max(one.num_slots for one in free) > self.num_free

    def is_held_back(self, one: Sequence) -> bool:
        limit, held = self.shares[caller_of(one)].max_slots, self.held(caller_of(one))
        return bool(limit and held and held + one.num_slots > limit)

    def expire(self, now: float) -> None:
        there = self.waiting | self.running
        late = [number for number, one in there.items() if one.request.deadline is not None and one.request.deadline <= now]
        assert sorted(numbers(self.policy.expire(now))) == sorted(late)
        for number in late:
            self.end(number)

    def end(self, number: int) -> Sequence | None:
        return self.waiting.pop(number, None) or self.running.pop(number, None)

    def check(self) -> None:
        policy, waiting = self.policy, self.waiting.values()
        queue = policy._queue
        assert {key[1]: one for key, one in policy._waiting.items()} == self.waiting
        assert {one.request.id: one for one in policy.running()} == self.running
        assert policy.num_used_slots == self.limits.max_slots - self.num_free <= self.limits.max_slots
        assert len(queue) == policy.num_waiting == len(waiting) <= self.limits.max_waiting_requests + self.limits.max_slots
        assert policy.num_waiting_tokens == sum(one.num_source_tokens for one in waiting)
        assert policy.num_waiting_slots == sum(one.num_slots for one in waiting)
        assert queue.parts_of_weight == sum(line.parts_of_weight for line in queue.crowd)
        assert {use.name: use.num_waiting for use in policy.waiting_by_caller()} == {
            name: len(self.line(name)) for name in NAMES if self.line(name)
        }
        assert {share.caller for share in policy.at_their_limit()} == {
            name for name in NAMES if self.line(name) and self.is_at_limit(self.shares[name])
        }
        excess = 0
        for name in NAMES:
            if name in self.shares and (limit := self.shares[name].max_slots):
                excess += max(sum(one.num_slots for one in self.line(name)) - max(limit - self.held(name), 0), 0)
        assert policy.num_held_back_slots == excess
        assert policy.has_work or not queue._lines


@settings(max_examples=num_examples(120, of=2000), deadline=None)
@given(st.lists(OPERATIONS, max_size=100), st.integers(3, 6), st.sampled_from([60, 10]))
def test_limits_hold_and_everything_ends_once_in_any_history(operations: list[tuple], slots: int, budget: int) -> None:  # type: ignore[type-arg]
    book = Book(slots, budget)
    for number, (kind, value, *rest) in enumerate(operations):
        running = sorted(book.running)
        if isinstance(kind, int):
            share, patience = rest
            deadline = None if patience is None else float(number + patience)
            book.submit(sequence(number, share, kind, 1 + kind % 3, value, float(number), deadline=deadline))
        elif kind == "admit":
            book.admit()
        elif kind == "expire":
            book.expire(float(number))
        elif kind == "remove" and value < number:
            assert book.policy.remove((b"", value)) is book.end(value)
        elif kind == "shrink" and running:
            one = book.running[running[value % len(running)]]
            book.policy.shrink(one, max(one.num_slots - value, 1))
        elif kind == "finish" and running:
            number = running[value % len(running)]
            assert book.policy.remove((b"", number)) is book.running.pop(number)
        book.check()
    assert set(numbers(book.policy.remove_all())) == book.waiting.keys() | book.running.keys()
    assert not book.policy.has_work and not book.policy._queue._lines


def test_requests_that_come_and_go_leave_nothing() -> None:
    policy = scheduler(1)
    policy.submit(sequence(0))
    policy.admit()
    policy.submit(sequence(1, arrival=1))
    for i in range(2, 2000):
        policy.submit(sequence(i, arrival=i, deadline=1e9))
        if i > 2:
            policy.remove((b"", i - 1))
    line = policy._queue.line("")
    assert line is not None and max(len(line._places), len(policy._queue._turns), len(policy._expiry)) < 3 * NUM_KEPT
    policy.remove((b"", 0))
    assert numbers(policy.admit()) == [1]
