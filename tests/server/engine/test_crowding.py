"""A crowded queue: who has to leave a full one, who is told so beforehand, and who is before a request that has just come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.crowding import MAX_LINES
from dragoman.server.engine.line import TOKENS_PER_PRIORITY
from dragoman.server.engine.messages import Request, SearchOptions, Share
from dragoman.server.engine.scheduler import Limits, QueueIsFull, Scheduler
from dragoman.server.engine.sequence import Sequence
from tests.examples import num_examples

A, B, C = Share("a"), Share("b"), Share("c")


def sequence(number: int, share: Share, num_tokens: int = 5, priority: int = 0, width: int = 1) -> Sequence:
    search = SearchOptions(num_beams=width)
    return Sequence(b"", Request(number, [7] * num_tokens, 10, float(number), priority=priority, search=search, share=share))


def numbers(sequences: list[Sequence]) -> list[int]:
    return [one.request.id for one in sequences]


@pytest.fixture
def policy() -> Scheduler:
    """One slot, taken; places for six requests and 60 tokens."""
    policy = Scheduler(Limits(1, 6, 60, 1000))
    policy.submit(sequence(1000, Share("z")))
    policy.admit()
    return policy


def test_one_caller_alone_pushes_nothing_out(policy: Scheduler) -> None:
    for i in range(6):
        assert policy.submit(sequence(i, A)) == []
    with pytest.raises(QueueIsFull) as refusal:
        policy.submit(sequence(6, A, priority=10))
    assert refusal.value.limit == "" and policy.num_waiting == 6


def test_who_has_less_than_another_takes_the_places_of_its_last(policy: Scheduler) -> None:
    for i in range(6):
        policy.submit(sequence(i, A))
    assert [numbers(policy.submit(sequence(i, B))) for i in (10, 11, 12)] == [[5], [4], [3]]
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(13, B))
    assert numbers(policy.submit(sequence(20, C))) == [2]
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(6, A))
    assert policy.num_waiting == 6


def test_places_are_divided_by_weight(policy: Scheduler) -> None:
    heavy = Share("heavy", 5.0)
    for i in range(6):
        policy.submit(sequence(i, heavy))
    assert numbers(policy.submit(sequence(10, A))) == [5]
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(11, A))
    policy.remove((b"", 10))
    policy.submit(sequence(5, heavy))
    assert numbers(policy.submit(sequence(12, Share("a", 100.0)))) == [5]
    assert [numbers(policy.submit(sequence(i, Share("a", 100.0)))) for i in range(13, 17)] == [[4], [3], [2], [1]]
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(17, Share("a", 100.0)))
    assert policy.num_waiting == 6, "nobody loses the only one that waits"


def test_the_last_in_line_goes_not_the_last_that_came(policy: Scheduler) -> None:
    for i in range(5):
        policy.submit(sequence(i, A, priority=-10 if i == 2 else 0))
    policy.submit(sequence(5, A, priority=10))
    assert numbers(policy.submit(sequence(10, B))) == [2]
    assert numbers(policy.submit(sequence(11, B))) == [4]


def test_by_tokens_as_few_leave_as_make_room(policy: Scheduler) -> None:
    for i in range(5):
        policy.submit(sequence(i, A, 12))
    assert numbers(policy.submit(sequence(10, B, 13))) == [4, 3]
    assert policy.num_waiting_tokens == 3 * 12 + 13
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(11, B, 24))
    assert policy.num_waiting == 4, "who is refused has pushed nobody out"
    assert policy.submit(sequence(12, B, 11)) == []


def test_a_large_request_that_would_take_more_than_it_leaves_is_refused(policy: Scheduler) -> None:
    for i in range(6):
        policy.submit(sequence(i, A, 9))
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(10, B, 40))
    assert policy.num_waiting == 6
    assert numbers(policy.submit(sequence(11, B, 25))) == [5, 4, 3]


def test_the_only_request_of_a_caller_stays_however_large_it_is(policy: Scheduler) -> None:
    policy.submit(sequence(0, A, 500))
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(1, B, 1))
    assert policy.num_waiting == 1


def test_not_all_requests_of_a_caller_leave_for_one_whatever_the_weights(policy: Scheduler) -> None:
    for i in range(2):
        policy.submit(sequence(i, A, 30))
    with pytest.raises(QueueIsFull):
        policy.submit(sequence(10, Share("heavy", 100.0), 45))
    assert numbers(policy.submit(sequence(11, Share("heavy", 100.0), 25))) == [1]


def test_one_leaves_for_one_where_a_wide_request_has_taken_several_slots() -> None:
    policy = Scheduler(Limits(4, 2, 1000, 1000))
    for i in range(6):
        policy.submit(sequence(i, A, width=4 if i == 0 else 1))
    policy.admit()
    assert policy.num_places == -3
    assert numbers(policy.submit(sequence(10, B))) == [5]


def test_what_was_pushed_out_is_gone(policy: Scheduler) -> None:
    for i in range(6):
        policy.submit(sequence(i, A))
    (gone,) = policy.submit(sequence(10, B))
    assert policy.remove(gone.key) is None
    policy.submit(sequence(5, C))
    policy.remove((b"", 1000))
    order = []
    while admitted := policy.admit():
        order += numbers(admitted)
        policy.remove(admitted[0].key)
    assert sorted(order) == [0, 1, 2, 3, 5, 10]


@settings(max_examples=num_examples(60, of=1000), deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=20, max_size=20), st.lists(st.sampled_from([0.5, 1.0, 1.0, 4.0]), min_size=5, max_size=5)
)
def test_those_without_a_claim_are_just_those_who_would_be_refused(callers: list[int], weights: list[float]) -> None:
    shares = [Share(f"caller {i}", weight) for i, weight in enumerate(weights)]
    for share in shares:
        policy = Scheduler(Limits(1, 20, 1000, 1000))
        policy.submit(sequence(1000, Share("z")))
        policy.admit()
        for i, caller in enumerate(callers):
            policy.submit(sequence(i, shares[caller]))
        without_claim = policy.without_claim()
        assert without_claim is not None
        try:
            policy.submit(sequence(99, share))
            is_refused = False
        except QueueIsFull:
            is_refused = True
        if any(share is shares[caller] for caller in callers):
            assert is_refused == (share in without_claim)


def test_of_many_callers_nobody_is_said_to_have_no_claim() -> None:
    policy = Scheduler(Limits(1, MAX_LINES, 10**6, 1000))
    for i in range(MAX_LINES):
        policy.submit(sequence(i, Share(f"caller {i}")))
    without_claim = policy.without_claim()
    assert without_claim is not None and len(without_claim) == MAX_LINES
    policy.submit(sequence(1000, A))
    assert policy.without_claim() is None


def test_who_has_no_claim_is_not_told_of_several_callers_while_there_are_plenty_of_places() -> None:
    policy = Scheduler(Limits(1, 10, 10**6, 1000))
    assert policy.without_claim() == []
    policy.submit(sequence(0, A))
    assert policy.without_claim() == [A], "of one alone it costs nothing"
    for i in range(1, 5):
        policy.submit(sequence(i, (A, B)[i % 2]))
        assert policy.without_claim() is None
    policy.submit(sequence(5, A))
    assert policy.without_claim() == [A], "half of the places are taken"


def test_a_callers_part_is_its_weight_among_those_who_wait() -> None:
    policy = Scheduler(Limits(1, 1000, 10**6, 1000))
    assert policy.crowd_of(A) == (0, 1.0)
    policy.submit(sequence(0, A))
    assert policy.crowd_of(A) == (1, 1.0)
    for i in range(1, 4):
        policy.submit(sequence(i, Share("b", 3.0)))
    assert policy.crowd_of(A) == (1, 0.25) and policy.crowd_of(Share("b", 3.0)) == (3, 0.75)
    assert policy.crowd_of(C) == (0, 0.2)
    policy.submit(sequence(4, Share("b", 1.0)))
    assert policy.crowd_of(A) == (1, 0.5), "it has another weight now"


def busy(*callers: tuple[Share, int], num_tokens: int = 10, slots: int = 1) -> Scheduler:
    policy = Scheduler(Limits(slots, 10**6, 10**6, 10**6))
    policy.submit(sequence(10**6, Share("z"), width=slots))
    policy.admit()
    for i, (share, num_waiting) in enumerate(callers):
        for j in range(num_waiting):
            policy.submit(sequence(10000 * i + j, share, num_tokens))
    return policy


def test_of_others_only_their_share_is_ahead() -> None:
    policy = busy((A, 500), (B, 4))
    assert policy.num_slots_ahead(sequence(99999, C).request) == 0
    assert policy.num_slots_ahead(sequence(99999, B).request) == 4 + 4
    assert policy.num_slots_ahead(sequence(99999, A).request) == 500 + 4
    assert policy.num_slots_ahead(sequence(99999, Share("b", 0.5)).request) == 4 + 8


def test_of_others_that_a_limit_holds_back_nothing_is_sure_to_be_ahead() -> None:
    policy = busy((Share("a", max_slots=1), 500), (B, 4))
    assert policy.num_slots_ahead(sequence(99999, B).request) == 4


def test_the_lead_of_priority_counts_for_who_is_ahead() -> None:
    policy = busy((A, 2000), (B, 4))
    assert policy.num_slots_ahead(sequence(99999, B, priority=-1).request) == 4 + 4 + TOKENS_PER_PRIORITY // 10
    assert policy.num_slots_ahead(sequence(0, B, priority=10).request) == 0


SIZES = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 30)), min_size=2, max_size=4)


@settings(max_examples=num_examples(60, of=1000), deadline=None)
@given(SIZES, st.integers(0, 3), st.integers(0, 20))
def test_no_more_is_ahead_than_is_then_admitted_before(sizes: list[tuple[float, int]], pick: int, num_before: int) -> None:
    """Of requests that cost the same, a new one is not said to be behind more than it will be."""
    shares = [Share(f"caller {i}", weight) for i, (weight, _) in enumerate(sizes)]
    policy = busy(*((share, num) for share, (_, num) in zip(shares, sizes, strict=True)))
    policy.remove((b"", 10**6))

    def serve() -> Sequence | None:
        admitted = policy.admit()
        for one in admitted:
            policy.remove(one.key)
        return admitted[0] if admitted else None

    for _ in range(num_before):
        serve()
    new = sequence(99999, [*shares, Share("idle")][pick % (len(shares) + 1)], 10)
    ahead = policy.num_slots_ahead(new.request)
    policy.submit(new)
    num_admitted = 0
    while serve() is not new:
        num_admitted += 1
    assert ahead <= num_admitted
