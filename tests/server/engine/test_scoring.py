"""The queue of pairs, with a scorer that computes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dragoman.server.engine.messages import Scored, ScoreRequest
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.scoring import Scoring

ORIGIN = b"front"


class FakeScorer:
    """Answers with what it was asked: source ids as log-probabilities, target ids times the layer as attention."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.failing: set[int] = set()
        self.on_score: Callable[[], None] = lambda: None

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.asked.append(list(source_ids))
        self.on_score()
        if source_ids[0] in self.failing:
            raise RuntimeError("made to fail")
        attention = np.outer(target_ids, source_ids).astype(np.float32) * (-1 if layer is None else layer)
        return np.full(len(target_ids), source_ids[0], np.float32), attention


class Bench:
    """The queue, its clock, and how its pairs ended."""

    def __init__(self, max_waiting_requests: int = 1000, max_waiting_tokens: int = 10_000, budget: int = 1000) -> None:
        self.now = 100.0
        self.scorer = FakeScorer()
        self.scoring = Scoring(self.scorer, Limits(4, max_waiting_requests, max_waiting_tokens, budget), lambda: self.now)
        self.ended: dict[int, Scored] = {}
        self.order: list[int] = []

    def submit(self, number: int, num_source: int = 2, num_target: int = 3, **fields: Any) -> None:
        fields = {"arrival": self.now} | fields
        self.scoring.submit(ORIGIN, ScoreRequest(number, [number] * num_source, [7] * num_target, **fields))
        self.collect()

    def step(self) -> None:
        self.scoring.step()
        self.collect()

    def collect(self) -> None:
        for origin, scored in self.scoring.take_scored().items():
            assert origin == ORIGIN
            for end in scored:
                assert end.id not in self.ended, "a pair ended twice"
                self.ended[end.id] = end
                self.order.append(end.id)

    def run(self) -> None:
        while self.scoring.has_work:
            self.step()
        assert (self.scoring.num_waiting, self.scoring.num_waiting_tokens) == (0, 0)

    @property
    def reasons(self) -> dict[int, str]:
        return {number: end.reason for number, end in self.ended.items()}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_pair_is_answered_with_what_was_computed_for_it(bench: Bench) -> None:
    bench.submit(5)
    bench.submit(6, is_aligned=True)
    bench.submit(8, is_aligned=True, alignment_layer=3)
    bench.run()
    assert bench.ended[5] == Scored(5, "eos", [5.0] * 3, b"", 100.0)
    assert np.frombuffer(bench.ended[6].alignment, np.float32).reshape(3, 2).tolist() == [[-42, -42]] * 3
    assert np.frombuffer(bench.ended[8].alignment, np.float32).reshape(3, 2).tolist() == [[168, 168]] * 3


def test_a_step_scores_what_the_budget_holds(bench: Bench) -> None:
    bench = Bench(budget=10)
    for number in range(5):
        bench.submit(number)
    bench.step()
    assert bench.order == [0, 1]
    assert bench.scoring.num_waiting_tokens == 15
    bench.step()
    bench.step()
    assert bench.order == [0, 1, 2, 3, 4]


def test_a_pair_larger_than_the_budget_is_scored_alone() -> None:
    bench = Bench(budget=10)
    bench.submit(1, 50, 50)
    bench.submit(2)
    bench.step()
    assert bench.order == [1]
    bench.step()
    assert bench.order == [1, 2]


def test_a_large_pair_is_not_passed_over_by_small_ones() -> None:
    bench = Bench(budget=10)
    for number, size in ((1, 2), (2, 50), (3, 2)):
        bench.submit(number, size)
    for expected in ([1], [1, 2], [1, 2, 3]):
        bench.step()
        assert bench.order == expected


def test_a_priority_counts_as_so_many_seconds_of_waiting() -> None:
    bench = Bench(budget=1)
    bench.submit(1, arrival=10.0)
    bench.submit(2, arrival=11.9, priority=2)
    bench.submit(3, arrival=12.1, priority=2)
    bench.submit(4, arrival=5.0, priority=-4)
    bench.run()
    assert bench.order == [4, 2, 1, 3]


def test_equals_are_scored_in_order_of_arrival(bench: Bench) -> None:
    for number in (9, 3, 7, 1):
        bench.submit(number)
    bench.run()
    assert bench.order == [9, 3, 7, 1]


def test_too_many_requests_are_refused_at_once() -> None:
    bench = Bench(max_waiting_requests=2)
    for number in range(5):
        bench.submit(number)
    assert bench.reasons == {3: "queue_full", 4: "queue_full"}, "one that is next and two that wait"
    bench.run()
    assert bench.reasons == {0: "eos", 1: "eos", 2: "eos", 3: "queue_full", 4: "queue_full"}
    assert bench.scorer.asked == [[0, 0], [1, 1], [2, 2]]


def test_too_many_tokens_of_both_sides_are_refused_at_once() -> None:
    bench = Bench(max_waiting_tokens=20)
    bench.submit(1, 8, 8)
    bench.submit(2, 1, 4)
    bench.submit(3, 1, 3)
    assert bench.reasons == {2: "queue_full"}


def test_an_empty_queue_takes_a_pair_of_any_size() -> None:
    bench = Bench(max_waiting_requests=1, max_waiting_tokens=5)
    bench.submit(1, 50, 50)
    bench.run()
    assert bench.reasons == {1: "eos"}


def test_a_refusal_says_when_a_tenth_of_the_queue_will_be_done() -> None:
    bench = Bench(max_waiting_requests=30, budget=1)

    def pass_time() -> None:
        bench.now += 0.5

    bench.scorer.on_score = pass_time
    for number in range(32):
        bench.submit(number)
    assert bench.ended[31].retry_after_seconds == 1.0, "nothing is known yet"
    bench.step()
    bench.submit(100)
    bench.submit(101)
    assert bench.ended[101].retry_after_seconds == pytest.approx(3.1 * 0.5)


def test_an_idle_hour_says_nothing_about_the_pace() -> None:
    bench = Bench(max_waiting_requests=1, budget=1)

    def pass_time() -> None:
        bench.now += 0.5

    bench.scorer.on_score = pass_time
    for number in range(3):
        bench.now += 3600
        bench.submit(number)
        bench.run()
    for number in range(10, 13):
        bench.submit(number)
    assert bench.ended[12].retry_after_seconds == pytest.approx(0.5)


def test_a_deadline_that_passes_ends_a_pair_unscored(bench: Bench) -> None:
    bench.submit(1, deadline=101.0)
    bench.submit(2, deadline=102.0)
    bench.submit(3)
    bench.now = 101.0
    bench.run()
    assert bench.reasons == {1: "deadline", 2: "eos", 3: "eos"}
    assert bench.scorer.asked == [[2, 2], [3, 3]]


def test_a_cancelled_pair_is_not_scored(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(2)
    bench.scoring.cancel(ORIGIN, 1)
    bench.scoring.cancel(ORIGIN, 99)
    bench.scoring.cancel(b"another", 2)
    bench.run()
    assert bench.reasons == {1: "cancelled", 2: "eos"}
    bench.scoring.cancel(ORIGIN, 2)
    assert bench.scoring.take_scored() == {}


def test_a_pair_that_fails_fails_alone_and_is_logged_without_its_text(bench: Bench) -> None:
    bench.scorer.failing = {2}
    for number in (1, 2, 3):
        bench.submit(number)
    with structlog.testing.capture_logs() as logs:
        bench.run()
    assert bench.reasons == {1: "eos", 2: "step_failed", 3: "eos"}
    (entry,) = logs
    assert entry["incident"] == bench.ended[2].incident != ""
    assert not {"source_ids", "target_ids", "request"} & entry.keys()
    assert (bench.ended[2].log_probs, bench.ended[2].alignment) == ([], b"")


def test_everything_ends_when_the_engine_does(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(2)
    bench.scoring.remove_all("draining")
    bench.collect()
    assert bench.reasons == {1: "draining", 2: "draining"}
    assert not bench.scoring.has_work


def test_front_ends_hear_of_their_own_pairs_only(bench: Bench) -> None:
    for origin in (b"one", b"two"):
        bench.scoring.submit(origin, ScoreRequest(1, [1], [1], 0.0))
    bench.scoring.cancel(b"two", 1)
    bench.scoring.step()
    reports = bench.scoring.take_scored()
    assert {origin: [end.reason for end in ends] for origin, ends in reports.items()} == {b"one": ["eos"], b"two": ["cancelled"]}


def test_places_of_cancelled_pairs_do_not_pile_up(bench: Bench) -> None:
    bench.submit(0, priority=10)
    for number in range(1, 1000):
        bench.submit(number)
        bench.scoring.cancel(ORIGIN, number)
    assert len(bench.scoring._queue) < 200
    bench.run()
    assert bench.reasons[0] == "eos"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(-10, 10), st.none() | st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.integers(0, 40)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_every_pair_ends_exactly_once_whatever_happens(operations: list[tuple[Any, ...]]) -> None:
    with structlog.testing.capture_logs():
        play(operations)


def play(operations: list[tuple[Any, ...]]) -> None:
    bench = Bench(max_waiting_requests=5, max_waiting_tokens=60, budget=20)
    num_submitted = 0
    for name, *arguments in operations:
        if name == "submit":
            size, priority, patience = arguments
            deadline = None if patience is None else bench.now + patience
            bench.submit(num_submitted, size, priority=priority, deadline=deadline)
            num_submitted += 1
        elif name == "cancel":
            bench.scoring.cancel(ORIGIN, arguments[0])
        elif name == "fail":
            bench.scorer.failing.add(arguments[0])
        else:
            bench.now += arguments[0]
            before = len(bench.scorer.asked)
            bench.step()
            tokens = [len(source) + 3 for source in bench.scorer.asked[before:]]
            assert sum(tokens) <= 20 or len(tokens) == 1
        waiting = bench.scoring._waiting.values()
        assert bench.scoring.num_waiting_tokens == sum(pair.num_tokens for pair in waiting)
    bench.run()
    bench.collect()
    assert sorted(bench.ended) == list(range(num_submitted))
