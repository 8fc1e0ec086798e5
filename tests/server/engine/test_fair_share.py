"""Several callers in the scheduler: what each is served, what it may hold, and that none of it depends on how much waits."""

import math
from collections import Counter
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.server.engine.line import NUM_KEPT, TOKENS_PER_PRIORITY
from dragoman.server.engine.messages import Request, SearchOptions, Share
from dragoman.server.engine.scheduler import Limits, QueueIsFull, Scheduler, place_in_line
from dragoman.server.engine.sequence import Sequence
from tests.examples import num_examples

NAMES = "abcd"
MAX_SOURCE, MAX_STEPS = 30, 12


def sequence(number: int, share: Share, num_tokens: int = 5, width: int = 1, priority: int = 0, arrival: float = 0.0) -> Sequence:
    search = SearchOptions(num_beams=width)
    return Sequence(b"", Request(number, [7] * num_tokens, 10, arrival, priority=priority, search=search, share=share))


def caller_of(one: Sequence) -> str:
    return one.request.share.caller


def scheduler(slots: int = 4, requests: int = 10**6, tokens: int = 10**9, budget: int = 10**9) -> Scheduler:
    return Scheduler(Limits(slots, requests, tokens, budget))


class Service:
    """Time in steps around a scheduler: who is admitted, what each caller has been served, and who has left when."""

    def __init__(self, policy: Scheduler) -> None:
        self.policy = policy
        self.served: Counter[str] = Counter()
        self.admitted: list[Sequence] = []
        self._numbers = count()
        self._steps_left: dict[Sequence, int] = {}

    def submit(self, share: Share, num_steps: int = 1, **fields: int) -> Sequence:
        number = next(self._numbers)
        one = sequence(number, share, arrival=float(number) / 10**6, **fields)
        self._steps_left[one] = num_steps
        assert self.policy.submit(one) == []
        return one

    def step(self) -> list[Sequence]:
        """Admit, decode a token for every slot, and let those go that have all of theirs."""
        admitted = self.policy.admit()
        self.admitted += admitted
        for one in admitted:
            self.served[caller_of(one)] += one.num_source_tokens
        for one in list(self.policy.running()):
            self.served[caller_of(one)] += one.num_slots
            self._steps_left[one] -= 1
            if not self._steps_left[one]:
                self.policy.remove(one.key)
        return admitted


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


@settings(max_examples=num_examples(15, of=400), deadline=None)
@given(CUSTOMERS, st.integers(4, 9), st.sampled_from([10**9, 20]))
# Whoever has just given all slots back has been charged for them, too.
@example([(0.25, [ONE_STEP | {"width": 1}, ONE_STEP | {"width": 2}], 10), (0.25, [WIDE_AND_LONG], 10)], 4, 10**9)
def test_who_always_waits_is_served_by_weight_whatever_it_asks_for(
    customers: list[tuple[float, list[dict[str, int]], int]], slots: int, budget: int
) -> None:
    """What two are served by their weights never differs by more than an admission, full slots and the leads of priorities."""
    service = Service(scheduler(slots, budget=budget))
    shares = [Share(name, weight) for name, (weight, _, _) in zip(NAMES, customers, strict=False)]
    numbers = count()
    bound = (MAX_SOURCE + slots * MAX_STEPS) / min(share.weight for share in shares)
    if any(kind["priority"] for _, kinds, _ in customers for kind in kinds):
        bound += 20 * TOKENS_PER_PRIORITY
    waiting: Counter[str] = Counter()
    for _ in range(80):
        for share, (_, kinds, num_waiting) in zip(shares, customers, strict=True):
            while waiting[share.caller] < num_waiting:
                service.submit(share, **kinds[next(numbers) % len(kinds)])
                waiting[share.caller] += 1
        waiting.subtract(caller_of(one) for one in service.step())
        parts = [service.served[share.caller] / share.weight for share in shares]
        assert max(parts) - min(parts) <= bound + 1e-6


@settings(max_examples=num_examples(15, of=300), deadline=None)
@given(st.lists(st.tuples(WEIGHTS, KINDS), min_size=1, max_size=3), st.integers(0, 25), KINDS, st.integers(4, 9))
def test_who_comes_with_one_request_is_behind_one_of_each_who_wait_already(
    crowd: list[tuple[float, dict[str, int]]], num_steps: int, kind: dict[str, int], slots: int
) -> None:
    service = Service(scheduler(slots))
    for name, (weight, other) in zip(NAMES, crowd, strict=False):
        for _ in range(40 * slots):
            service.submit(Share(name, weight), **{**other, "priority": 0})
    for _ in range(num_steps):
        service.step()
    single = service.submit(Share("d"), **{**kind, "priority": 0})
    service.admitted.clear()
    while single not in service.admitted:
        service.step()
    before = Counter(caller_of(one) for one in service.admitted[: service.admitted.index(single)])
    assert not before or max(before.values()) == 1


def test_weights_are_the_parts_in_which_service_is_divided() -> None:
    service = Service(scheduler(1))
    shares = [Share("a", 1.0), Share("b", 2.0), Share("c", 5.0)]
    for share in shares:
        for _ in range(1000):
            service.submit(share, num_tokens=9)
    for _ in range(800):
        service.step()
    assert service.served == {"a": 1000, "b": 2000, "c": 5000}


@pytest.mark.parametrize("weight", [1e-9, 5e8])
def test_extreme_weights_lose_no_count(weight: float) -> None:
    """Counted in floating point, a large count would swallow what a large weight leaves of a request."""
    service = Service(scheduler(1))
    for share in (Share("a", weight), Share("b", 2 * weight), Share("z", 1.0)):
        for _ in range(1200):
            service.submit(share, num_tokens=9)
    for _ in range(900):
        service.step()
    if weight > 1:
        assert service.served == {"z": 10, "a": 2990, "b": 6000} or service.served == {"z": 10, "a": 3000, "b": 5990}
    else:
        assert service.served["z"] >= 8970, "the others had their one"
    for _ in range(3000):
        service.step()
    assert not service.policy.has_work and service.served == {"a": 12000, "b": 12000, "z": 12000}


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e-10, 1e10, math.inf, math.nan])
def test_what_is_no_weight_is_nobodys(weight: float) -> None:
    with pytest.raises(AssertionError):
        scheduler().submit(sequence(0, Share("a", weight)))


def test_beams_and_steps_are_charged_as_slots_are_held() -> None:
    """Of the same sources, who decodes four rows for three times as long is admitted as much less often."""
    service = Service(scheduler(4))
    for _ in range(500):
        service.submit(Share("wide"), num_steps=9, width=4, num_tokens=2)
        service.submit(Share("narrow"), num_steps=3, num_tokens=2)
    for _ in range(400):
        service.step()
    difference = abs(service.served["wide"] - service.served["narrow"])
    assert difference <= 2 + 4 * 9 < service.served["wide"] / 10


def test_idleness_earns_nothing() -> None:
    service = Service(scheduler(1))
    for _ in range(300):
        service.submit(Share("busy"))
    service.submit(Share("idle"))
    for _ in range(100):
        service.step()
    for _ in range(300):
        service.submit(Share("idle"))
    service.admitted.clear()
    for _ in range(100):
        service.step()
    assert abs(Counter(map(caller_of, service.admitted))["idle"] - 50) <= 1


def test_who_leaves_the_queue_and_comes_back_has_not_paid_what_it_owes() -> None:
    service = Service(scheduler(5))
    service.submit(Share("long"), num_steps=50, width=4)
    for _ in range(200):
        service.submit(Share("a"), num_tokens=1)
        service.submit(Share("b"), num_tokens=1)
    for _ in range(50):
        service.step()
    service.submit(Share("long"), num_tokens=1)
    service.admitted.clear()
    while "long" not in map(caller_of, service.admitted):
        service.step()
    assert len(service.admitted) > 100, "the 200 tokens that it has had while others waited count"


def test_priority_is_a_lead_that_is_used_up() -> None:
    """Whoever always asks for the highest priority gets the same share in the end as who never does."""
    service = Service(scheduler(1))
    for _ in range(3000):
        service.submit(Share("loud"), num_tokens=9, priority=10)
        service.submit(Share("quiet"), num_tokens=9)
    for _ in range(400):
        service.step()
    assert service.served["quiet"] == 0 or service.served["loud"] >= 4000
    for _ in range(2000):
        service.step()
    lead = service.served["loud"] - service.served["quiet"]
    assert abs(lead - 10 * TOKENS_PER_PRIORITY) <= 10


def test_a_wide_request_does_not_starve_beside_narrow_ones() -> None:
    service = Service(scheduler(4))
    wide = service.submit(Share("wide"), width=4, num_steps=5)
    for _ in range(8):
        service.submit(Share("narrow"), num_steps=3)
    for i in range(40):
        service.step()
        service.submit(Share("narrow"), num_steps=3)
        service.submit(Share(f"new {i}"), num_steps=3)
        if i == 7:
            wide = service.submit(Share("wide"), width=4, num_steps=5)
    assert wide in service.admitted


def test_who_is_at_its_slots_is_passed_over_and_goes_on_in_order_later() -> None:
    policy = scheduler(4)
    few, many = Share("few", max_slots=2), Share("many")
    for i in range(4):
        policy.submit(sequence(i, few, arrival=i))
    for i in range(4, 6):
        policy.submit(sequence(i, many, arrival=i))
    assert sorted(one.request.id for one in policy.admit()) == [0, 1, 4, 5]
    assert policy.num_held_back_slots == 2
    policy.remove((b"", 4))
    assert policy.admit() == [], "a slot is free, but not for who waits"
    policy.remove((b"", 0))
    assert [one.request.id for one in policy.admit()] == [2]
    policy.remove((b"", 1))
    assert [one.request.id for one in policy.admit()] == [3]
    assert policy.num_held_back_slots == 0


def test_slots_that_are_given_back_early_count_for_the_callers_limit() -> None:
    policy, few = scheduler(8), Share("few", max_slots=4)
    wide = sequence(0, few, width=4)
    policy.submit(wide)
    policy.admit()
    policy.submit(sequence(1, few, width=2))
    assert policy.admit() == []
    policy.shrink(wide, 2)
    assert [one.request.id for one in policy.admit()] == [1]


def test_a_request_wider_than_its_callers_limit_is_refused_by_its_name() -> None:
    policy = scheduler(8)
    with pytest.raises(QueueIsFull) as refusal:
        policy.submit(sequence(0, Share("few", max_slots=2), width=3))
    assert refusal.value.limit == "max_slots" and not policy.has_work


def test_a_limit_that_was_lowered_does_not_leave_a_wide_request_for_ever() -> None:
    policy = scheduler(8)
    for i in range(2):
        policy.submit(sequence(i, Share("a", max_slots=8), width=6, arrival=i))
    policy.submit(sequence(2, Share("a", max_slots=2), arrival=2))
    order = []
    while policy.has_work:
        order.append([one.request.id for one in policy.admit()])
        assert order[-1]
        for one in list(policy.running()):
            policy.remove(one.key)
    assert order == [[0], [1], [2]], "each alone, as it does not fit"


def test_a_limit_that_was_raised_lets_at_once_more_go() -> None:
    policy = scheduler(8)
    for i in range(4):
        policy.submit(sequence(i, Share("a", max_slots=1), arrival=i))
    policy.admit()
    policy.submit(sequence(4, Share("a", max_slots=4), arrival=4))
    assert [one.request.id for one in policy.admit()] == [1, 2, 3]


def test_more_may_not_wait_than_the_callers_limit_says() -> None:
    policy = scheduler(2)
    few = Share("few", max_waiting=3)
    for i in range(5):
        policy.submit(sequence(i, few))
    with pytest.raises(QueueIsFull) as refusal:
        policy.submit(sequence(5, few))
    assert refusal.value.limit == "max_waiting"
    assert policy.at_their_limit() == [few]
    policy.submit(sequence(6, Share("other")))
    policy.admit()
    assert policy.at_their_limit() == [few], "the other one has taken a slot"
    policy.remove((b"", 3))
    policy.remove((b"", 2))
    assert policy.at_their_limit() == []
    policy.submit(sequence(7, few))
    assert policy.at_their_limit() == [few]


SHARES = st.builds(
    Share,
    st.sampled_from(NAMES),
    st.sampled_from([1e-9, 0.5, 1.0, 1.0, 3.0, 1e9]),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0, 0, 1, 6]),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(-2, 3), SHARES),
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(-2, 3), SHARES),
    st.tuples(st.sampled_from(["admit", "admit", "remove", "finish", "shrink"]), st.integers(0, 80), st.just(0), st.none()),
)


class Book:
    """What must be true of a scheduler: everything that was submitted is in one place, or has ended once."""

    def __init__(self, slots: int, budget: int) -> None:
        self.limits = Limits(slots, 12, 150, budget)
        self.policy = Scheduler(self.limits)
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.shares: dict[str, Share] = {}

    def held(self, caller: str) -> int:
        return sum(one.num_slots for one in self.running.values() if caller_of(one) == caller)

    def line(self, caller: str) -> list[Sequence]:
        """Return what a caller waits for, in the order in which it must be admitted."""
        own = [one for one in self.waiting.values() if caller_of(one) == caller]
        return sorted(own, key=lambda one: (place_in_line(one.request), one.request.id))

    def submit(self, one: Sequence) -> None:
        share, limits = one.request.share, self.limits
        num_free = limits.max_slots - sum(map(self.held, NAMES))
        tokens = sum(other.num_source_tokens for other in self.waiting.values()) + one.num_source_tokens
        has_no_place = len(self.waiting) >= limits.max_waiting_requests + num_free
        is_full = has_no_place or (bool(self.waiting) and tokens > limits.max_waiting_tokens)
        try:
            pushed_out = self.policy.submit(one)
        except QueueIsFull as full:
            if full.limit == "max_slots":
                assert one.num_slots > share.max_slots > 0
            elif full.limit:
                assert len(self.line(share.caller)) >= share.max_waiting > 0
            else:
                assert is_full
            return
        assert not share.max_slots or one.num_slots <= share.max_slots
        assert is_full == bool(pushed_out)
        if pushed_out:
            self.push_out(one, pushed_out, has_no_place=has_no_place, is_by_tokens=tokens > limits.max_waiting_tokens)
        self.shares[share.caller] = share
        self.waiting[one.request.id] = one

    def push_out(self, one: Sequence, pushed_out: list[Sequence], *, has_no_place: bool, is_by_tokens: bool) -> None:
        """See that those leave who are last in the line of the caller who has most, and no more than have to."""
        (caller,) = {caller_of(other) for other in pushed_out}
        assert caller != caller_of(one)
        line = self.line(caller)
        assert line[-len(pushed_out) :] == pushed_out[::-1] and len(line) > len(pushed_out)

        def part(caller: str, share: Share, more: Sequence | None = None) -> float:
            own = [*self.line(caller), *([more] if more else [])]
            return (sum(other.num_source_tokens for other in own) if is_by_tokens else len(own)) / share.weight

        mine = part(caller_of(one), one.request.share, one)
        assert mine < part(caller, self.shares[caller])
        assert all(
            part(name, self.shares[name]) <= part(caller, self.shares[caller]) or len(self.line(name)) == 1
            for name in NAMES
            if self.line(name) and name != caller_of(one)
        )
        assert is_by_tokens or (has_no_place and len(pushed_out) == 1)
        for other in pushed_out:
            assert self.waiting.pop(other.request.id) is other
            assert self.policy.remove(other.key) is None, "it has ended"

    def admit(self) -> None:
        before = {name: self.line(name) for name in NAMES}
        admitted = self.policy.admit()
        assert len(admitted) <= 1 or sum(one.num_source_tokens for one in admitted[1:]) <= self.limits.prefill_tokens_per_step
        for one in admitted:
            assert before[caller_of(one)].pop(0) is one, "a caller's own order"
            held, limit = self.held(caller_of(one)), self.shares[caller_of(one)].max_slots
            assert not limit or not held or held + one.num_slots <= limit
            self.running[one.request.id] = self.waiting.pop(one.request.id)
        num_free = self.limits.max_slots - sum(map(self.held, NAMES))
        assert num_free >= 0
        if not admitted and num_free:
            self.check_nobody_could_go(num_free)

    def check_nobody_could_go(self, num_free: int) -> None:
        """See that no slot is idle but for a wide request whose turn it is, or for callers' limits."""
        first = [self.line(name)[0] for name in NAMES if self.line(name)]
        held_back = [
            one
            for one in first
            if (limit := self.shares[caller_of(one)].max_slots)
            and self.held(caller_of(one))
            and self.held(caller_of(one)) + one.num_slots > limit
        ]
        free = [one for one in first if one not in held_back]
        assert not free or max(one.num_slots for one in free) > num_free

    def check(self) -> None:
        policy, waiting = self.policy, self.waiting.values()
        queue = policy._queue
        assert {key[1]: one for key, one in policy._waiting.items()} == self.waiting
        assert {one.request.id: one for one in policy.running()} == self.running
        assert policy.num_used_slots == sum(map(self.held, NAMES)) <= self.limits.max_slots
        assert len(queue) == policy.num_waiting == len(waiting) <= self.limits.max_waiting_requests + self.limits.max_slots
        assert policy.num_waiting_tokens == sum(one.num_source_tokens for one in waiting)
        assert policy.num_waiting_slots == sum(one.num_slots for one in waiting)
        assert queue.parts_of_weight == sum(line.parts_of_weight for line in queue.crowd)
        assert {line.share.caller for line in queue.crowd} == {caller_of(one) for one in waiting}
        excess = 0
        for name in NAMES:
            limit, wanted = self.shares[name].max_slots if name in self.shares else 0, sum(one.num_slots for one in self.line(name))
            excess += max(wanted - max(limit - self.held(name), 0), 0) if limit else 0
        assert policy.num_held_back_slots == excess
        assert policy.has_work or not queue._lines


@settings(max_examples=num_examples(100, of=2000), deadline=None)
@given(st.lists(OPERATIONS, max_size=100), st.integers(3, 6), st.sampled_from([60, 10]))
def test_limits_hold_and_everything_ends_once_whoever_asks(
    operations: list[tuple[str, int, int, Share | None]], slots: int, budget: int
) -> None:
    book = Book(slots, budget)
    for number, (kind, value, priority, share) in enumerate(operations):
        running = sorted(book.running)
        if share is not None:
            book.submit(sequence(number, share, value, 1 + value % 3, priority, float(number)))
        elif kind == "admit":
            book.admit()
        elif kind == "remove" and value < number:
            expected = book.waiting.pop(value, None) or book.running.pop(value, None)
            assert book.policy.remove((b"", value)) is expected
        elif kind == "shrink" and running:
            one = book.running[running[value % len(running)]]
            book.policy.shrink(one, max(one.num_slots - value, 1))
        elif kind == "finish" and running:
            number = running[value % len(running)]
            assert book.policy.remove((b"", number)) is book.running.pop(number)
        book.check()
    ended = {one.request.id for one in book.policy.remove_all()}
    assert ended == book.waiting.keys() | book.running.keys()
    assert not book.policy.has_work and not book.policy._queue._lines


def test_callers_who_come_once_are_forgotten_while_others_work_on() -> None:
    """However many names there are, what is remembered follows from who waits and who has something to catch up with."""
    service = Service(scheduler(3))
    service.submit(Share("always"), num_steps=10**6)
    for i in range(5000):
        service.submit(Share(f"caller {i}"))
        service.step()
    queue = service.policy._queue
    assert len(queue._lines) <= 2 * NUM_KEPT and len(queue._turns) <= 2 * NUM_KEPT


def test_what_comes_and_goes_in_a_line_leaves_nothing() -> None:
    policy, share = scheduler(1), Share("a")
    policy.submit(sequence(0, share))
    policy.admit()
    policy.submit(sequence(1, share))
    for i in range(2, 2000):
        policy.submit(sequence(i, share, arrival=i))
        if i > 2:
            policy.remove((b"", i - 1))
    line = policy._queue.line("a")
    assert line is not None and len(line._places) < 3 * NUM_KEPT and len(policy._queue._turns) < 3 * NUM_KEPT


REQUESTS = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.sampled_from([1.0, 0.5, 4.0]), st.integers(0, 3), st.integers(1, 40), st.integers(0, 2)
)


@settings(deadline=None)
@given(st.lists(REQUESTS, max_size=24), st.integers(0, 24))
def test_who_is_told_to_follow_is_who_is_admitted_then(requests: list[tuple[str, float, int, int, int]], num_asked: int) -> None:
    """Exactly, where nothing comes or ends meanwhile and nobody is charged for slots."""
    policy = scheduler(slots=100, requests=100, tokens=10**6, budget=10**6)
    for i, (caller, weight, priority, size, late) in enumerate(requests):
        request = Request(i, [5] * size, 8, float(late), priority=priority, share=Share(caller, weight))
        policy.submit(Sequence(b"", request))
    foreseen = policy.next_in_line(num_asked)
    assert len(foreseen) == min(num_asked, len(requests))
    assert foreseen == policy.admit()[:num_asked]


def test_weights_that_change_again_and_again_hide_nobody_who_follows() -> None:
    policy = scheduler(slots=100, requests=100, tokens=10**6, budget=10**6)
    policy.submit(Sequence(b"", Request(0, [5], 8, 0.0, priority=1, share=Share("b"))))
    for i in range(1, 40):
        policy.submit(Sequence(b"", Request(i, [5], 8, 0.0, share=Share("a", 1.0 if i % 2 else 0.5))))
    for num_asked in range(1, 8):
        assert [sequence.request.id for sequence in policy.next_in_line(num_asked)] == list(range(num_asked))


def test_who_may_not_go_by_its_own_limit_is_not_told_to_follow() -> None:
    policy = scheduler(slots=8, requests=100, tokens=10**6, budget=10**6)
    for i in range(4):
        policy.submit(Sequence(b"", Request(i, [5], 8, float(i), share=Share("a", max_slots=2))))
        policy.submit(Sequence(b"", Request(10 + i, [5], 8, float(i), share=Share("b"))))
    assert [sequence.request.id for sequence in policy.next_in_line(9)] == [0, 10, 1, 11, 12, 13]
    assert policy.num_waiting == 8, "looking takes nobody out"
