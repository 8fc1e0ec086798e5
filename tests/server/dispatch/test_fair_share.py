"""Weighted fair queuing: what each caller is served, and that it does not depend on how much waits."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.server.dispatch.fair_queue import TOKENS_PER_PRIORITY, Entry
from dragoman.server.dispatch.queue import Load, RequestQueue
from dragoman.server.engine.messages import Share, Step
from tests.examples import num_examples
from tests.server.dispatch.queues import caller_of, entry, numbers, queue

NAMES = "abcd"
MAX_SOURCE, MAX_STEPS = 30, 12
A, B = Share("a"), Share("b")


class Service:
    """Time in steps around a scheduler: who is admitted, and what each caller has been served."""

    def __init__(self, slots: int) -> None:
        self.policy: RequestQueue = queue(engines=0)
        self._slots = slots
        self.served: Counter[str] = Counter()
        self.admitted: list[Entry] = []
        self._numbers = count()
        self._steps_left: dict[Entry, int] = {}

    def submit(self, share: Share, times: int = 1, num_steps: int = 1, **fields: int) -> Entry:
        """Submit requests that run for so many steps; return the last one."""
        for number in (next(self._numbers) for _ in range(times)):
            one = entry(number, share, arrival=float(number) / 10**6, **fields)
            self._steps_left[one] = num_steps
            assert self.policy.submit(one, 0.0) == []
        return one

    def step(self, times: int = 1) -> list[Entry]:
        """Admit, decode a token for every slot, and end what has all of its tokens; return what was admitted last."""
        admitted: list[Entry] = []
        if not self.policy.capacity:
            self.policy.open(Load(0, self._slots, 0, 0.0))
        for _ in range(times):
            admitted = self.policy.assign(0.0)
            self.policy.note_report(0, 0.0, [Step(1, 0.1)])
            self.admitted += admitted
            for one in admitted:
                self.served[caller_of(one)] += one.num_tokens
            for one in list(self.policy.running()):
                self.served[caller_of(one)] += one.num_slots
                self._steps_left[one] -= 1
                if not self._steps_left[one]:
                    self.policy.remove(one)
        return admitted

    def admissions_before(self, one: Entry) -> Counter[str]:
        """Step until one is admitted; return how many of each caller are before it."""
        self.admitted.clear()
        while one not in self.admitted:
            self.step()
        return Counter(map(caller_of, self.admitted[: self.admitted.index(one)]))


WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])
KINDS = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, MAX_SOURCE),
        "num_steps": st.integers(1, MAX_STEPS),
        "width": st.integers(1, 4),
        "priority": st.sampled_from([0, 0, 0, -10, 3, 10]),
    }
)
CUSTOMERS = st.lists(st.tuples(WEIGHTS, st.lists(KINDS, min_size=1, max_size=5), st.integers(10, 40)), min_size=2, max_size=4)
ONE_STEP = {"num_tokens": 1, "num_steps": 1, "priority": 0}
WIDE_AND_LONG = {"num_tokens": 1, "num_steps": 10, "width": 4, "priority": 0}


@settings(max_examples=num_examples(12, of=400), deadline=None)
@given(CUSTOMERS, st.integers(4, 9))
# Slots that were given back just now have been charged for, too.
@example([(0.25, [ONE_STEP | {"width": 1}, ONE_STEP | {"width": 2}], 10), (0.25, [WIDE_AND_LONG], 10)], 4)
def test_callers_that_always_wait_are_served_by_weight(
    customers: list[tuple[float, list[dict[str, int]], int]], slots: int
) -> None:
    """Service by weight of any two callers differs by at most an admission, full slots and the leads of priorities."""
    service = Service(slots)
    shares = [Share(name, weight) for name, (weight, _, _) in zip(NAMES, customers, strict=False)]
    order = count()
    bound = (MAX_SOURCE + slots * MAX_STEPS) / min(share.weight for share in shares)
    if any(kind["priority"] for _, kinds, _ in customers for kind in kinds):
        bound += 20 * TOKENS_PER_PRIORITY
    waiting: Counter[str] = Counter()
    for _ in range(80):
        for share, (_, kinds, num_waiting) in zip(shares, customers, strict=True):
            while waiting[share.caller] < num_waiting:
                service.submit(share, **kinds[next(order) % len(kinds)])
                waiting[share.caller] += 1
        waiting.subtract(map(caller_of, service.step()))
        parts = [service.served[share.caller] / share.weight for share in shares]
        assert max(parts) - min(parts) <= bound + 1e-6


@settings(max_examples=num_examples(12, of=300), deadline=None)
@given(st.lists(st.tuples(WEIGHTS, KINDS), min_size=1, max_size=3), st.integers(0, 25), KINDS, st.integers(4, 9))
def test_a_new_caller_is_behind_at_most_one_request_of_each_other(
    crowd: list[tuple[float, dict[str, int]]], num_steps: int, kind: dict[str, int], slots: int
) -> None:
    service = Service(slots)
    for name, (weight, other) in zip(NAMES, crowd, strict=False):
        service.submit(Share(name, weight), 40 * slots, **{**other, "priority": 0})
    service.step(num_steps)
    before = service.admissions_before(service.submit(Share("d"), **{**kind, "priority": 0}))
    assert not before or max(before.values()) == 1


@pytest.mark.parametrize("weight", [1e-9, 5e8])
def test_extreme_weights_lose_no_count(weight: float) -> None:
    service = Service(1)
    for share in (Share("a", weight), Share("b", 2 * weight), Share("z")):
        service.submit(share, 1200, num_tokens=9)
    service.step(900)
    if weight > 1:
        assert service.served in ({"z": 10, "a": 2990, "b": 6000}, {"z": 10, "a": 3000, "b": 5990})
    else:
        assert service.served["z"] >= 8970, "the others had one each"
    service.step(3000)
    assert not service.policy.has_work and service.served == {"a": 12000, "b": 12000, "z": 12000}


def test_idleness_earns_nothing() -> None:
    service = Service(1)
    service.submit(A, 300)
    service.submit(B)
    service.step(100)
    service.submit(B, 300)
    service.admitted.clear()
    service.step(100)
    assert abs(Counter(map(caller_of, service.admitted))["b"] - 50) <= 1


def test_a_caller_that_leaves_the_queue_and_comes_back_is_still_charged() -> None:
    service = Service(5)
    service.submit(Share("long"), num_steps=50, width=4)
    for _ in range(200):
        service.submit(A, num_tokens=1)
        service.submit(B, num_tokens=1)
    service.step(50)
    before = service.admissions_before(service.submit(Share("long"), num_tokens=1))
    assert before.total() > 100, "the 200 tokens that it has had while others waited count"


def test_priority_is_a_lead_that_is_used_up() -> None:
    service = Service(1)
    for _ in range(3000):
        service.submit(A, num_tokens=9, priority=10)
        service.submit(B, num_tokens=9)
    service.step(400)
    assert service.served["b"] == 0 or service.served["a"] >= 4000
    service.step(2000)
    assert abs(service.served["a"] - service.served["b"] - 10 * TOKENS_PER_PRIORITY) <= 10


def test_a_limit_that_was_lowered_does_not_leave_a_wide_request_for_ever() -> None:
    policy = queue(8)
    for i, share in enumerate((Share("a", max_slots=8), Share("a", max_slots=8), Share("a", max_slots=2))):
        policy.submit(entry(i, share, width=1 if i == 2 else 6, arrival=float(i)), 0.0)
    order = []
    for _ in range(3):
        order.append(numbers(policy.assign(0.0)))
        for each in list(policy.running()):
            policy.remove(each)
    assert order == [[0], [1], [2]] and not policy.has_work, "each alone, as it does not fit"
