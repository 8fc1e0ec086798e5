"""A crowded queue: requests that leave a full one, callers that would be refused, and slots that come before a new request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.dispatch.fair_queue import TOKENS_PER_PRIORITY, Entry
from dragoman.server.dispatch.queue import MAX_CALLERS, SECONDS_PER_PRIORITY, QueueIsFull, RequestQueue
from dragoman.server.engine.messages import ANYBODY, Request, Share
from tests.examples import num_examples
from tests.server.dispatch.queues import entry, numbers, queue

A, B, C = Share("a"), Share("b"), Share("c")
HEAVY, HEAVIEST = Share("heavy", 5.0), Share("a", 100.0)


def submitted(policy: RequestQueue, number: int, share: Share, num_tokens: int = 5, priority: int = 0) -> list[int] | None:
    """Submit a request that came as its number says; return what it pushes out, None if it is refused."""
    try:
        return numbers(policy.submit(entry(number, share, num_tokens, priority=priority, arrival=float(number)), 0.0))
    except QueueIsFull as full:
        assert full.limit == ""
        return None


# The queue: caller and tokens of request 0, 1, …; then the arrival: number, caller, tokens, and the requests that it evicts.
PUSHED_OUT: dict[str, tuple[list[tuple[Share, int]], list[tuple[int, Share, int, list[int] | None]]]] = {
    "one caller alone pushes nothing out": ([(A, 5)] * 6, [(6, A, 5, None)]),
    "fewer take the places of the last of most": (
        [(A, 5)] * 6,
        [(10, B, 5, [5]), (11, B, 5, [4]), (12, B, 5, [3]), (13, B, 5, None), (20, C, 5, [2]), (6, A, 5, None)],
    ),
    "the only one that waits is not lost": (
        [(HEAVY, 5)] * 6,
        [*((20 - i, HEAVIEST, 5, [i]) for i in range(5, 0, -1)), (21, HEAVIEST, 5, None)],
    ),
    "as few leave as make room by tokens": ([(A, 12)] * 5, [(10, B, 13, [4, 3]), (11, B, 24, None), (12, B, 11, [])]),
    "a large one that would take more than it leaves is refused": ([(A, 9)] * 6, [(10, B, 40, None), (11, B, 25, [5, 4, 3])]),
    "a single large one stays": ([(A, 500)], [(1, B, 1, None)]),
    "not all of a caller leave": ([(A, 30)] * 2, [(10, HEAVIEST, 45, None), (11, Share("z", 100.0), 25, [1])]),
}


@pytest.mark.parametrize("name", PUSHED_OUT)
def test_a_full_queue_takes_from_the_caller_that_has_most(name: str) -> None:
    waiting, coming = PUSHED_OUT[name]
    policy = queue(1, 6, 60)
    submitted(policy, 1000, Share("holds the slot"))
    policy.assign(0.0)
    for i, (share, num_tokens) in enumerate(waiting):
        assert submitted(policy, i, share, num_tokens) == []
    for number, share, num_tokens, expected in coming:
        before = policy.num_waiting
        assert submitted(policy, number, share, num_tokens) == expected
        assert policy.num_waiting == before + (0 if expected is None else 1 - len(expected))


@settings(max_examples=num_examples(60, of=1000), deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=20, max_size=20), st.lists(st.sampled_from([0.5, 1.0, 1.0, 4.0]), min_size=5, max_size=5)
)
def test_callers_without_a_claim_are_just_those_that_would_be_refused(callers: list[int], weights: list[float]) -> None:
    shares = [Share(f"caller {i}", weight) for i, weight in enumerate(weights)]
    for share in shares:
        policy = queue(1, 20)
        submitted(policy, 1000, Share("z"))
        policy.assign(0.0)
        for i, caller in enumerate(callers):
            submitted(policy, i, shares[caller])
        without_claim = policy.without_claim()
        assert without_claim is not None
        is_refused = submitted(policy, 99, share) is None
        if any(share is shares[caller] for caller in callers):
            assert is_refused == (share.caller in without_claim)


def test_claims_are_told_only_where_that_is_cheap() -> None:
    policy = queue(1, MAX_CALLERS + 1)
    submitted(policy, 2000, Share("holds the slot"))
    for i in range(MAX_CALLERS):
        submitted(policy, i, Share(f"caller {i}"))
    assert len(policy.without_claim() or ()) == MAX_CALLERS
    submitted(policy, 1000, A)
    assert policy.without_claim() is None
    policy = queue(1, 12)
    submitted(policy, 2000, Share("holds the slot"))
    assert policy.without_claim() == {}
    submitted(policy, 0, A)
    assert list(policy.without_claim() or ()) == ["a"], "of one alone it costs nothing"
    for i in range(1, 5):
        submitted(policy, i, (A, B)[i % 2])
        assert policy.without_claim() is None
    submitted(policy, 5, A)
    assert list(policy.without_claim() or ()) == ["a"], "half of the places are taken"


def crowd(policy: RequestQueue, share: Share) -> tuple[int, float]:
    """Return how many requests of a caller wait, and its part of the admissions while all wait."""
    line = policy._fair.of(share.caller)
    return 0 if line is None else len(line), policy._fair.part_of(share)


def test_a_callers_part_is_its_weight_among_those_that_wait() -> None:
    policy = queue(1)
    submitted(policy, 1000, Share("holds the slot"))
    assert crowd(policy, A) == (0, 1.0)
    submitted(policy, 0, A)
    assert crowd(policy, A) == (1, 1.0)
    for i in range(1, 4):
        submitted(policy, i, Share("b", 3.0))
    assert crowd(policy, A) == (1, 0.25) and crowd(policy, Share("b", 3.0)) == (3, 0.75)
    assert crowd(policy, C) == (0, 0.2)
    submitted(policy, 4, B)
    assert crowd(policy, A) == (1, 0.5), "the other one has another weight now"


def slots_ahead(policy: RequestQueue, new: Entry) -> int:
    assert isinstance(new.request, Request)
    return policy.num_slots_ahead(new.request)


def busy(*callers: tuple[Share, int], num_tokens: int = 10) -> RequestQueue:
    policy = queue(1)
    submitted(policy, 10**6, Share("z"))
    for i, (share, num_waiting) in enumerate(callers):
        for j in range(num_waiting):
            submitted(policy, 10000 * i + j, share, num_tokens)
    return policy


MANY_AND_FEW = (A, 500), (B, 4)


@pytest.mark.parametrize(
    ("waiting", "new", "num_slots"),
    [
        (MANY_AND_FEW, (C, 0), 0),
        (MANY_AND_FEW, (B, 0), 4 + 4),  # its own, and as many of the other's
        (MANY_AND_FEW, (A, 0), 500 + 4),
        (MANY_AND_FEW, (Share("b", 0.5), 0), 4 + 8),
        (((Share("a", max_slots=1), 500), (B, 4)), (B, 0), 4),  # what a limit holds back is not sure to be ahead
        (((A, 2000), (B, 4)), (B, -1), 4 + 4 + TOKENS_PER_PRIORITY // 10),
        (((A, 2000), (B, 4)), (B, 100_000), 0),
    ],
)
def test_slots_ahead_are_its_callers_own_and_what_others_are_due(
    waiting: tuple[tuple[Share, int], ...], new: tuple[Share, int], num_slots: int
) -> None:
    share, priority = new
    assert slots_ahead(busy(*waiting), entry(99999, share, priority=priority, arrival=99999.0)) == num_slots


@pytest.mark.parametrize(
    ("priority", "arrival", "num_slots"),
    [
        (0, 100.0, 3),  # before what has the lowest priority, but behind an old one
        (-10, 100.0, 63),
        (4, 100.0, 3),
        (6, 100.0, 0),
        (0, 98 + 10 * SECONDS_PER_PRIORITY - 0.1, 3),
        (0, 98 + 10 * SECONDS_PER_PRIORITY, 63),  # of equals the first that came
    ],
)
def test_priority_passes_what_it_is_admitted_before(priority: int, arrival: float, num_slots: int) -> None:
    policy = queue(3)
    policy.submit(entry(0, width=3), 0.0)
    policy.assign(0.0)
    for i in range(1, 21):
        policy.submit(entry(i, width=3, priority=-10, arrival=98.0), 0.0)
    policy.submit(entry(50, width=3, arrival=95.0), 0.0)
    assert slots_ahead(policy, entry(99, ANYBODY, priority=priority, arrival=arrival)) == num_slots


SIZES = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 30)), min_size=2, max_size=4)


@settings(max_examples=num_examples(60, of=1000), deadline=None)
@given(SIZES, st.integers(0, 3), st.integers(0, 20))
def test_no_more_is_ahead_than_is_then_admitted_before(sizes: list[tuple[float, int]], pick: int, num_before: int) -> None:
    """Of requests that cost the same, a new one is not taken to be behind more than it will be."""
    shares = [Share(f"caller {i}", weight) for i, (weight, _) in enumerate(sizes)]
    policy = busy(*((share, num) for share, (_, num) in zip(shares, sizes, strict=True)))
    (first,) = policy.assign(0.0)
    policy.remove(first)

    def serve() -> list[int]:
        admitted = policy.assign(0.0)
        for one in admitted:
            policy.remove(one)
        return numbers(admitted)

    for _ in range(num_before):
        serve()
    new = entry(99999, [*shares, Share("idle")][pick % (len(shares) + 1)], 10, arrival=99999.0)
    ahead = slots_ahead(policy, new)
    policy.submit(new, 0.0)
    num_admitted = 0
    while serve() != [99999]:
        num_admitted += 1
    assert ahead <= num_admitted
