"""The scheduler by itself: order, limits, budgets, and that nothing is ever lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.messages import Request
from server.engine.scheduler import SECONDS_PER_PRIORITY, Limits, QueueIsFull, Scheduler
from server.engine.sequence import Sequence


def sequence(
    request_id: int, num_tokens: int = 5, arrival: float = 0.0, priority: int = 0, deadline: float | None = None
) -> Sequence:
    return Sequence(b"front", Request(request_id, [7] * num_tokens, 10, arrival, deadline, priority=priority))


def scheduler(slots: int = 4, requests: int = 100, tokens: int = 1000, budget: int = 1000) -> Scheduler:
    return Scheduler(Limits(slots, requests, tokens, budget))


def ids(sequences: list[Sequence]) -> list[int]:
    return [s.request.id for s in sequences]


def test_admits_in_order_of_arrival_up_to_the_slots() -> None:
    policy = scheduler(slots=2)
    for i in range(5):
        policy.submit(sequence(i, arrival=i))
    assert ids(policy.admit()) == [0, 1]
    assert policy.admit() == []
    policy.remove((b"front", 0))
    assert ids(policy.admit()) == [2]
    assert (policy.num_running, policy.num_waiting, policy.num_used_slots) == (2, 2, 2)


def test_prefill_budget_bounds_a_step_but_never_blocks_a_large_source() -> None:
    policy = scheduler(budget=10)
    for i, size in enumerate((30, 6, 4, 4)):
        policy.submit(sequence(i, size, arrival=i))
    assert ids(policy.admit()) == [0]
    assert ids(policy.admit()) == [1, 2]
    assert ids(policy.admit()) == [3]


def test_full_queue_refuses_by_requests_and_by_tokens() -> None:
    policy = scheduler(slots=1, requests=2)
    for i in range(3):
        policy.submit(sequence(i))
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(3))
    policy = scheduler(tokens=10)
    policy.submit(sequence(0, 9))
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(1, 2))
    policy.submit(sequence(2, 1))
    assert policy.num_waiting_tokens == 10


def test_a_burst_that_fits_the_free_slots_is_not_refused() -> None:
    policy = scheduler(slots=4, requests=1)
    for i in range(5):
        policy.submit(sequence(i))
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(5))
    assert ids(policy.admit()) == [0, 1, 2, 3]


def test_a_source_over_the_token_limit_fits_an_empty_queue() -> None:
    policy = scheduler(tokens=10)
    policy.submit(sequence(0, 50))
    assert ids(policy.admit()) == [0]


def test_priority_overtakes_but_waiting_counts() -> None:
    policy = scheduler(slots=1)
    policy.submit(sequence(0, arrival=0.0))
    policy.submit(sequence(1, arrival=0.5 * SECONDS_PER_PRIORITY, priority=1))
    policy.submit(sequence(2, arrival=1.5 * SECONDS_PER_PRIORITY, priority=1))
    order = []
    while policy.has_work:
        (admitted,) = policy.admit()
        order.append(admitted.request.id)
        policy.remove(admitted.key)
    assert order == [1, 0, 2], "one step of priority is worth one second of waiting, not more"


def test_expire_takes_waiting_and_running_past_their_deadline() -> None:
    policy = scheduler(slots=1)
    policy.submit(sequence(0, deadline=5.0))
    policy.submit(sequence(1, deadline=4.0))
    policy.submit(sequence(2))
    policy.admit()
    assert policy.expire(3.9) == []
    assert sorted(ids(policy.expire(5.0))) == [0, 1]
    assert (policy.num_running, policy.num_waiting, policy.num_used_slots) == (0, 1, 0)


def test_an_id_may_be_used_again_after_its_end() -> None:
    """A deadline that outlives its request must not end a later one of the same id."""
    policy = scheduler()
    policy.submit(sequence(0, deadline=5.0))
    policy.submit(sequence(9))
    policy.remove((b"front", 0))
    policy.submit(sequence(0, deadline=50.0))
    assert policy.expire(6.0) == []
    assert ids(policy.admit()) == [9, 0]


def test_a_running_sequence_still_expires_when_nothing_waits() -> None:
    policy = scheduler()
    policy.submit(sequence(0, deadline=5.0))
    policy.admit()
    assert ids(policy.expire(5.0)) == [0]


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    policy = scheduler()
    for i in range(1000):
        policy.submit(sequence(i, deadline=1e9))
        policy.remove((b"front", i))
    assert len(policy._deadlines) < 100


OPERATION = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(-2, 3), st.one_of(st.none(), st.floats(0, 30))),
    st.tuples(st.just("remove"), st.integers(0, 80), st.just(0), st.none()),
    st.tuples(st.just("admit"), st.just(0), st.just(0), st.none()),
    st.tuples(st.just("expire"), st.just(0), st.just(0), st.none()),
    st.tuples(st.just("finish"), st.integers(0, 7), st.just(0), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATION, max_size=120), st.integers(1, 6), st.integers(1, 60))
def test_every_sequence_is_in_one_place_and_limits_hold(
    operations: list[tuple[str, int, int, float | None]], slots: int, budget: int
) -> None:
    policy = scheduler(slots, requests=20, tokens=200, budget=budget)
    now, count = 0.0, 0
    waiting: dict[int, Sequence] = {}
    running: dict[int, Sequence] = {}
    for kind, number, priority, deadline in operations:
        now += 1.0
        if kind == "submit":
            new = sequence(count, number, now, priority, None if deadline is None else now + deadline)
            tokens = sum(s.num_source_tokens for s in waiting.values())
            is_full = len(waiting) - (slots - len(running)) >= 20 or (bool(waiting) and tokens + number > 200)
            try:
                policy.submit(new)
                assert not is_full
                waiting[count] = new
            except QueueIsFull:
                assert is_full
            count += 1
        elif kind == "remove":
            expected = waiting.pop(number, None) or running.pop(number, None)
            assert policy.remove((b"front", number)) is expected
        elif kind == "admit":
            admitted = policy.admit()
            ranks = [s.request.arrival - s.request.priority * SECONDS_PER_PRIORITY for s in admitted]
            assert ranks == sorted(ranks)
            assert len(admitted) <= 1 or sum(s.num_source_tokens for s in admitted[1:]) <= budget
            for s in admitted:
                running[s.request.id] = waiting.pop(s.request.id)
            if waiting and len(running) < slots:
                assert admitted, "slots are free, and somebody waits"
            left = [s.request.arrival - s.request.priority * SECONDS_PER_PRIORITY for s in waiting.values()]
            assert not ranks or not left or max(ranks) <= min(left)
        elif kind == "expire":
            for s in policy.expire(now):
                assert s.request.deadline is not None and s.request.deadline <= now
                assert (waiting.pop(s.request.id, None) or running.pop(s.request.id, None)) is s
            assert all(s.request.deadline is None or s.request.deadline > now for s in (*waiting.values(), *running.values()))
        elif running:
            request_id = sorted(running)[number % len(running)]
            assert policy.remove((b"front", request_id)) is running.pop(request_id)
        assert policy.num_waiting == len(waiting)
        assert policy.num_waiting_tokens == sum(s.num_source_tokens for s in waiting.values())
        assert policy.num_running == policy.num_used_slots == len(running) <= slots
    assert {s.request.id for s in policy.remove_all()} == waiting.keys() | running.keys()
    assert not policy.has_work and policy.num_used_slots == policy.num_waiting_tokens == 0


def test_requests_that_come_and_go_behind_a_waiting_one_leave_nothing() -> None:
    policy = scheduler(slots=1)
    policy.submit(sequence(0))
    policy.admit()
    policy.submit(sequence(1, arrival=1.0))
    for i in range(2, 2000):
        policy.submit(sequence(i, arrival=i, deadline=1e9))
        policy.remove((b"front", i))
    assert len(policy._queue) < 100 and len(policy._deadlines) < 100
    policy.remove((b"front", 0))
    assert ids(policy.admit()) == [1]
