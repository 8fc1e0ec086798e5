"""One queue before several engines, by itself: order, limits, where requests go, and that nothing is ever lost."""

from collections import Counter
from typing import Any

import pytest
from dragoman.server.engine.scheduler import Limits

from dragoman.server.dispatch.dispatcher import SUSPICIOUS_SECONDS, Dispatcher, num_ahead
from dragoman.server.engine.messages import Request, SearchOptions, Share
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


def test_a_replica_that_says_nothing_is_given_nothing_while_another_speaks() -> None:
    policy = dispatcher(slots=2)
    now = 2 * SUSPICIOUS_SECONDS
    policy.heard(1, now, 0)
    for i in range(2 + num_ahead(2) + 1):
        policy.submit(sequence(i, arrival=i))
    assert [index for index, _ in policy.hand_over(now)] == [1] * (2 + num_ahead(2))
    now += 2 * SUSPICIOUS_SECONDS
    assert [index for index, _ in policy.hand_over(now)] == [0], "nobody was heard: who knows why"


def test_a_callers_slots_are_counted_over_all_replicas() -> None:
    policy = dispatcher(slots=4)
    for i in range(6):
        policy.submit(sequence(i, arrival=i, share=Share("a", max_slots=3)))
    policy.submit(sequence(6, arrival=6, share=Share("b")))
    assert ids(policy.hand_over(0.0)) == [(0, 0), (1, 6), (0, 1), (1, 2)]
    policy.remove((b"front", 1))
    assert ids(policy.hand_over(0.0)) == [(0, 3)]


def test_callers_have_what_their_weights_say_over_all_replicas() -> None:
    """Two callers who always wait, one with long answers; slots and steps are charged, so it has fewer of them."""
    policy = dispatcher(slots=8, requests=1000)
    shares, steps = {"a": Share("a"), "b": Share("b", 3.0)}, {"a": 40, "b": 10}
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
    assert served["b"] / served["a"] == pytest.approx(3.0, rel=0.05)
