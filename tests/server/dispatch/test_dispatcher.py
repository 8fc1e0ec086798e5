"""One queue before several engines, by itself: order, limits, where requests go, and that nothing is ever lost."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.dispatch.dispatcher import SUSPICIOUS_SECONDS, Dispatcher, num_ahead
from dragoman.server.engine.messages import Request, SearchOptions, Share
from dragoman.server.engine.scheduler import Limits, QueueIsFull
from dragoman.server.engine.sequence import Sequence


def sequence(
    request_id: int, num_tokens: int = 5, arrival: float = 0.0, priority: int = 0, width: int = 1, **fields: Any
) -> Sequence:
    search = SearchOptions(num_beams=width)
    return Sequence(b"front", Request(request_id, [7] * num_tokens, 10, arrival, priority=priority, search=search, **fields))


def dispatcher(slots: int = 4, replicas: int = 2, requests: int = 100, tokens: int = 1000) -> Dispatcher:
    policy = Dispatcher(Limits(slots, requests, tokens, 1000))
    for index in range(replicas):
        policy.open(index, slots, now=0.0)
    return policy


def ids(handed: list[tuple[int, Sequence]]) -> list[tuple[int, int]]:
    return [(index, one.request.id) for index, one in handed]


def counts(handed: list[tuple[int, Sequence]]) -> Counter[int]:
    return Counter(index for index, _ in handed)


@pytest.mark.parametrize(
    ("sizes", "replicas"),
    [
        ([(5, 1)] * 5, [0, 1, 0, 1, 0]),  # to the replica that has fewest
        ([(90, 1), (3, 1), (5, 1)], [0, 1, 1]),  # of equally full ones to that with shorter texts
        ([(5, 3), (5, 2), (5, 2)], [0, 1, 1]),  # a wide one is in one replica as a whole
        ([(5, 4), (5, 3), (5, 3), (5, 1)], [0, 1, 1, 0]),  # and waits where least is missing
    ],
)
def test_requests_go_to_the_replica_with_most_room(sizes: list[tuple[int, int]], replicas: list[int]) -> None:
    policy = dispatcher()
    for i, (num_tokens, width) in enumerate(sizes):
        policy.submit(sequence(i, num_tokens, i, width=width))
    assert sorted(ids(policy.hand_over(0.0)), key=lambda one: one[1]) == [(index, i) for i, index in enumerate(replicas)]
    for i in range(len(sizes)):
        policy.remove((b"front", i))
    for i in range(10, 13):  # one at a time
        policy.submit(sequence(i))
        assert ids(policy.hand_over(0.0)) == [(0, i)]
        policy.remove((b"front", i))


def test_replicas_are_given_a_few_requests_beyond_their_slots_and_no_more() -> None:
    policy = dispatcher(slots=16)
    for i in range(100):
        policy.submit(sequence(i, arrival=i, num_tokens=1))
    assert counts(policy.hand_over(0.0)) == {0: 16 + num_ahead(16), 1: 16 + num_ahead(16)}
    assert policy.hand_over(0.0) == []
    policy.remove((b"front", 7))
    assert counts(policy.hand_over(0.0)) == {1: 1}, "one for one, where it has ended"


def test_slots_given_back_are_given_to_others() -> None:
    policy = dispatcher(slots=16, replicas=1)
    wide = sequence(0, width=16, arrival=0)
    policy.submit(wide)
    for i in range(1, 9):
        policy.submit(sequence(i, arrival=i))
    assert len(policy.hand_over(0.0)) == 1 + num_ahead(16)
    policy.shrink(wide, 13)
    assert len(policy.hand_over(0.0)) == 3


def test_a_replica_that_says_nothing_is_given_nothing_while_another_speaks() -> None:
    policy = dispatcher(slots=2)
    now = 2 * SUSPICIOUS_SECONDS
    policy.heard(1, now, 0)
    for i in range(2 + num_ahead(2) + 1):
        policy.submit(sequence(i, arrival=i))
    assert [index for index, _ in policy.hand_over(now)] == [1] * (2 + num_ahead(2))
    now += 2 * SUSPICIOUS_SECONDS
    assert [index for index, _ in policy.hand_over(now)] == [0], "nobody was heard: who knows why"


def test_what_a_lost_replica_had_is_gone_and_the_rest_goes_to_the_others() -> None:
    policy = dispatcher(slots=2)
    for i in range(12):
        policy.submit(sequence(i, arrival=i))
    handed = policy.hand_over(0.0)
    lost = policy.close(0)
    assert {one.request.id for one in lost} == {one.request.id for index, one in handed if index == 0}
    assert (policy.num_waiting, policy.limits.max_slots) == (12 - len(handed), 2)
    assert policy.hand_over(0.0) == []
    policy.open(0, 2, 0.0)
    assert counts(policy.hand_over(0.0)) == {0: 4}


def test_the_queue_counts_what_waits_in_replicas() -> None:
    policy = dispatcher(slots=2, requests=10)
    assert policy.num_places == 14
    accepted = 0
    with pytest.raises(QueueIsFull):
        for i in range(100):
            policy.submit(sequence(i, arrival=i))
            policy.hand_over(0.0)
            accepted += 1
    assert accepted == 14, "four slots, and ten that wait, wherever"


def test_a_callers_slots_are_counted_over_all_replicas() -> None:
    policy = dispatcher(slots=4)
    for i in range(6):
        policy.submit(sequence(i, arrival=i, share=Share("a", max_slots=3)))
    policy.submit(sequence(6, arrival=6, share=Share("b")))
    assert ids(policy.hand_over(0.0)) == [(0, 0), (1, 6), (0, 1), (1, 2)]
    policy.remove((b"front", 1))
    assert ids(policy.hand_over(0.0)) == [(0, 3)]


def test_a_callers_waiting_requests_are_counted_over_all_replicas() -> None:
    policy = dispatcher(slots=2)
    share = Share("a", max_slots=1, max_waiting=2)
    for i in range(3):
        policy.submit(sequence(i, arrival=i, share=share))
        policy.hand_over(0.0)
    with pytest.raises(QueueIsFull, match="max_waiting"):
        policy.submit(sequence(3, share=share))


def test_what_replicas_have_expires_there() -> None:
    policy = dispatcher(slots=1, replicas=1)
    for i in range(5):
        policy.submit(sequence(i, arrival=i, deadline=10.0))
    num_handed = len(policy.hand_over(0.0))
    assert [one.request.id for one in policy.expire(11.0)] == list(range(num_handed, 5))
    assert policy.num_running == num_handed


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_callers_have_what_their_weights_say_over_all_replicas(weight: float) -> None:
    """Two callers who always wait, one with long answers; slots and steps are charged, so it has fewer of them."""
    policy = dispatcher(slots=8, requests=1000)
    shares, steps = {"a": Share("a"), "b": Share("b", weight)}, {"a": 40, "b": 10}
    waiting, served, number = Counter[str](), Counter[str](), 0
    running: dict[Sequence, int] = {}
    for now in range(6000):
        for caller, share in shares.items():
            while waiting[caller] < 40:
                number += 1
                waiting[caller] += 1
                policy.submit(sequence(number, 1, number, share=share))
        for _, one in policy.hand_over(now):
            caller = one.request.share.caller
            waiting[caller] -= 1
            running[one] = now + steps[caller]
        for index in range(2):
            policy.heard(index, now, 1)
        for one in [one for one, end in running.items() if end == now]:
            served[one.request.share.caller] += 1 + steps[one.request.share.caller] + 1  # its token, and a tick for each step
            policy.remove(one.key)
            del running[one]
    assert served["b"] / served["a"] == pytest.approx(weight, rel=0.05)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.sampled_from("abc"), st.integers(-2, 2)),
        st.tuples(st.just("end"), st.integers(0, 40)),
        st.tuples(st.just("shrink"), st.integers(0, 40)),
        st.tuples(st.just("close"), st.integers(0, 2)),
        st.tuples(st.just("open"), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(0, 2)),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.integers(4, 9))
def test_whatever_happens_nothing_is_lost_and_no_replica_is_given_too_much(operations: list[Any], slots: int) -> None:
    policy = dispatcher(slots=slots, replicas=2, requests=20)
    shares = {"a": Share("a"), "b": Share("b", 2.0, 5), "c": Share("c", 0.5, 0, 3)}
    there: dict[int, tuple[Sequence, int | None]] = {}
    is_open, now = {0, 1}, 0.0
    for number, (kind, *arguments) in enumerate(operations):
        now += 0.5
        keys = sorted(there)
        if kind == "submit" and is_open:
            width, caller, priority = arguments
            one = sequence(number, 3, now, priority, width, share=shares[caller], deadline=now + 6 if number % 3 == 0 else None)
            try:
                pushed_out = policy.submit(one)
            except QueueIsFull:
                pass
            else:
                there[number] = one, None
                for other in pushed_out:
                    assert there.pop(other.request.id)[1] is None, "only what waits is pushed out"
        elif kind == "end" and keys:
            del there[keys[arguments[0] % len(keys)]]
            assert policy.remove((b"front", keys[arguments[0] % len(keys)])) is not None
        elif kind == "shrink" and (running := [one for one, place in there.values() if place is not None]):
            one = running[arguments[0] % len(running)]
            policy.shrink(one, max(one.num_slots - 1, 1))
        elif kind == "close" and arguments[0] in is_open:
            is_open.remove(arguments[0])
            lost = {one.request.id for one in policy.close(arguments[0])}
            assert lost == {number for number, (_, place) in there.items() if place == arguments[0]}
            there = {number: entry for number, entry in there.items() if number not in lost}
        elif kind == "open" and arguments[0] not in is_open:
            is_open.add(arguments[0])
            policy.open(arguments[0], slots, now)
        elif kind == "step" and arguments[0] in is_open:
            policy.heard(arguments[0], now, 3)
        elif kind == "expire":
            for one in policy.expire(now):
                assert there.pop(one.request.id)[1] is None and (one.request.deadline or now) <= now
        if number % 2:
            for index, one in policy.hand_over(now):
                assert index in is_open and there[one.request.id][1] is None
                there[one.request.id] = one, index
        check(policy, there, is_open, slots)


def check(policy: Dispatcher, there: dict[int, tuple[Sequence, int | None]], is_open: set[int], slots: int) -> None:
    assert policy.num_waiting == sum(place is None for _, place in there.values())
    assert policy.num_running == sum(place is not None for _, place in there.values())
    assert policy.limits.max_slots == slots * len(is_open)
    for index in is_open:
        held = [one.num_slots for one, place in there.values() if place == index]
        assert sum(held) < slots + num_ahead(slots) + 4, "the last may be a wide one"
    own = [one.num_slots for one, place in there.values() if place is not None and one.request.share.caller == "b"]
    assert sum(own) <= 5
