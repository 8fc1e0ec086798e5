"""The scheduler by itself: order, limits, budgets, and that nothing is ever lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.scheduler import SECONDS_PER_PRIORITY, Limits, QueueIsFull, Scheduler
from dragoman.server.engine.sequence import Sequence


def sequence(
    request_id: int,
    num_tokens: int = 5,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    width: int = 1,
) -> Sequence:
    search = SearchOptions(num_beams=width)
    return Sequence(b"front", Request(request_id, [7] * num_tokens, 10, arrival, deadline, priority=priority, search=search))


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
    assert len(policy._expiry) < 100


def test_the_first_in_line_is_not_passed_over_for_being_wide() -> None:
    policy = scheduler(slots=4)
    for i, width in enumerate((2, 3, 1, 1)):
        policy.submit(sequence(i, arrival=i, width=width))
    assert policy.num_waiting_slots == 7
    assert ids(policy.admit()) == [0], "two slots are free, but the next in line needs three"
    policy.remove((b"front", 0))
    assert ids(policy.admit()) == [1, 2]
    assert (policy.num_used_slots, policy.num_waiting_slots) == (4, 1)


def test_slots_a_sequence_will_not_need_again_go_to_the_next() -> None:
    policy = scheduler(slots=4)
    wide = sequence(0, width=4)
    policy.submit(wide)
    policy.admit()
    policy.submit(sequence(1, width=2))
    policy.shrink(wide, 3)
    assert policy.admit() == [] and policy.num_used_slots == 3
    policy.shrink(wide, 2)
    assert ids(policy.admit()) == [1] and policy.num_used_slots == 4
    policy.remove(wide.key)
    assert policy.num_used_slots == 2, "what it gave up is not taken twice"


def test_what_does_not_run_cannot_shrink_and_nothing_can_grow() -> None:
    policy = scheduler(slots=4)
    waiting = sequence(0, width=2)
    policy.submit(waiting)
    with pytest.raises(AssertionError):
        policy.shrink(waiting, 1)
    policy.admit()
    with pytest.raises(AssertionError):
        policy.shrink(waiting, 3)


@pytest.mark.parametrize("leave", ["remove", "expire", "remove_all", "admit"])
def test_waiting_slots_are_counted_until_they_are_left(leave: str) -> None:
    policy = scheduler(slots=6)
    for i, width in enumerate((4, 2)):
        policy.submit(sequence(i, width=width, deadline=5.0))
    assert policy.num_waiting_slots == 6
    match leave:
        case "remove":
            policy.remove((b"front", 1))
            assert policy.num_waiting_slots == 4
            policy.remove((b"front", 0))
        case "expire":
            policy.expire(5.0)
        case "remove_all":
            policy.remove_all(b"front")
        case "admit":
            policy.admit()
            assert policy.num_used_slots == 6
    assert policy.num_waiting_slots == policy.num_waiting_tokens == 0


OPERATION = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(-2, 3), st.one_of(st.none(), st.floats(0, 30))),
    st.tuples(st.just("remove"), st.integers(0, 80), st.just(0), st.none()),
    st.tuples(st.just("admit"), st.just(0), st.just(0), st.none()),
    st.tuples(st.just("expire"), st.just(0), st.just(0), st.none()),
    st.tuples(st.just("finish"), st.integers(0, 7), st.just(0), st.none()),
    st.tuples(st.just("shrink"), st.integers(0, 7), st.just(0), st.none()),
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

    def used() -> int:
        return sum(s.num_slots for s in running.values())

    def rank(s: Sequence) -> tuple[float, int]:
        return s.request.arrival - s.request.priority * SECONDS_PER_PRIORITY, s.request.id

    for kind, number, priority, deadline in operations:
        now += 1.0
        if kind == "submit":
            width = 1 + number % slots
            new = sequence(count, number, now, priority, None if deadline is None else now + deadline, width)
            tokens = sum(s.num_source_tokens for s in waiting.values())
            is_full = len(waiting) - (slots - used()) >= 20 or (bool(waiting) and tokens + number > 200)
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
            ranks = [rank(s) for s in admitted]
            assert ranks == sorted(ranks)
            assert len(admitted) <= 1 or sum(s.num_source_tokens for s in admitted[1:]) <= budget
            for s in admitted:
                running[s.request.id] = waiting.pop(s.request.id)
            if waiting and not admitted:
                assert min(waiting.values(), key=rank).num_slots > slots - used(), "the first in line fits"
            assert not ranks or not waiting or max(ranks) <= min(rank(s) for s in waiting.values())
        elif kind == "expire":
            for s in policy.expire(now):
                assert s.request.deadline is not None and s.request.deadline <= now
                assert (waiting.pop(s.request.id, None) or running.pop(s.request.id, None)) is s
            assert all(s.request.deadline is None or s.request.deadline > now for s in (*waiting.values(), *running.values()))
        elif kind == "shrink" and running:
            shrinking = running[sorted(running)[number % len(running)]]
            policy.shrink(shrinking, max(shrinking.num_slots - number, 1))
        elif running:
            request_id = sorted(running)[number % len(running)]
            assert policy.remove((b"front", request_id)) is running.pop(request_id)
        assert policy.num_waiting == len(waiting)
        assert policy.num_waiting_tokens == sum(s.num_source_tokens for s in waiting.values())
        assert policy.num_waiting_slots == sum(s.num_slots for s in waiting.values())
        assert policy.num_running == len(running)
        assert policy.num_used_slots == used() <= slots
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
    line = policy._queue.line("")
    assert line is not None and len(line._places) < 100 and len(policy._expiry) < 100
    policy.remove((b"front", 0))
    assert ids(policy.admit()) == [1]
