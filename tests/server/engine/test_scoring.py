"""The queue of pairs, with a scorer that computes nothing."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dragoman.export.bundle import BundleError
from dragoman.server.engine.executors import Here
from dragoman.server.engine.messages import Scored, ScoreRequest, Share
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.scoring import Scoring

ORIGIN = b"front"


class FakeScorer:
    """Answers with what it was asked: source ids as log-probabilities, target ids times the layer as attention."""

    is_on_device = False

    def __init__(self, is_loaded: bool = True) -> None:
        self.is_loaded = is_loaded
        self.faults: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.asked: list[list[int]] = []
        self.starts: list[int | None] = []
        self.failing: set[int] = set()
        self.on_score: Callable[[], None] = lambda: None

    def check(self) -> None:
        self._do("check")

    def open(self) -> None:
        self._do("open")
        self.is_loaded = True

    def interrupt(self) -> None:
        self._do("interrupt")

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults[name]

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None, decoder_start_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.asked.append(list(source_ids))
        self.starts.append(decoder_start_id)
        self.on_score()
        if source_ids[0] in self.failing:
            raise RuntimeError("made to fail")
        attention = np.outer(target_ids, source_ids).astype(np.float32) * (-1 if layer is None else layer)
        return np.full(len(target_ids), source_ids[0], np.float32), attention


class Later(Executor):
    """A thread that does nothing until it is told to."""

    def __init__(self) -> None:
        self.is_shut_down = False
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not self._jobs, "one job at a time"
        self._jobs.append((Future(), lambda: function(*args, **kwargs)))
        return self._jobs[0][0]

    def work(self) -> None:
        """Do the job there is."""
        ((future, job),) = self._jobs
        self._jobs.clear()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not wait, "nobody may wait for a pair"
        self.is_shut_down = True


class Bench:
    """The queue, its clock, and how its pairs ended; by default what a step begins is done at once."""

    def __init__(
        self,
        max_waiting_requests: int = 1000,
        max_waiting_tokens: int = 10_000,
        budget: int = 1000,
        *,
        scorer: FakeScorer | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.now = 100.0
        self.scorer = scorer or FakeScorer()
        limits = Limits(4, max_waiting_requests, max_waiting_tokens, budget)
        self.scoring = Scoring(self.scorer, limits, lambda: self.now, executor or Here())
        self.ended: dict[int, Scored] = {}
        self.order: list[int] = []

    def submit(self, number: int, num_source: int = 2, num_target: int = 3, **fields: Any) -> None:
        fields = {"arrival": self.now} | fields
        self.scoring.submit(ORIGIN, ScoreRequest(number, [number] * num_source, [7] * num_target, **fields))
        self.collect()

    def step(self, is_generating: bool = False) -> None:
        self.scoring.step(is_generating)
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


def test_a_pair_is_scored_after_its_own_start_token(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(2, decoder_start_id=0)
    bench.submit(3, decoder_start_id=9)
    bench.run()
    assert bench.scorer.starts == [None, 0, 9]


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


def test_deadlines_of_cancelled_pairs_do_not_pile_up(bench: Bench) -> None:
    bench.submit(0, priority=10)
    for number in range(1, 1000):
        bench.submit(number, deadline=1e9 - number)
        bench.scoring.cancel(ORIGIN, number)
    assert len(bench.scoring._pairs._expiry) < 200
    bench.run()
    assert bench.reasons[0] == "eos"


def beside(budget: int = 1000, **fields: Any) -> tuple[Bench, Later]:
    """A queue whose jobs are done when the test says so."""
    thread = Later()
    return Bench(budget=budget, executor=thread, **fields), thread


def test_a_step_does_not_wait_for_a_pair() -> None:
    bench, thread = beside(budget=1)
    for number in (1, 2):
        bench.submit(number)
    for _ in range(3):
        bench.step(is_generating=True)
    assert bench.order == [] and bench.scorer.asked == [] and bench.scoring.num_waiting == 2
    thread.work()
    bench.step()
    assert bench.order == [1] and bench.scorer.asked == [[1, 1]]


def test_the_engine_is_woken_when_a_pair_is_scored() -> None:
    bench, thread = beside()
    woken: list[bool] = []
    bench.scoring.on_done = lambda: woken.append(bench.scoring.seconds_until_work() == 0)
    bench.submit(1)
    bench.step()
    assert woken == [] and bench.scoring.seconds_until_work() == float("inf")
    thread.work()
    assert woken == [True]
    bench.step()
    assert bench.reasons == {1: "eos"} and not bench.scoring.has_work and bench.scoring.seconds_until_work() == float("inf")


def test_scoring_rests_as_long_as_its_turn_took_beside_generation() -> None:
    bench, thread = beside(budget=1)
    for number in (1, 2, 3):
        bench.submit(number)
    bench.step(is_generating=True)
    for _ in range(6):  # decode steps of 50 ms, during which the pair is scored
        bench.now += 0.05
        bench.step(is_generating=True)
    thread.work()
    bench.now += 0.05
    bench.step(is_generating=True)
    assert bench.order == [1] and bench.scoring.seconds_until_work() == pytest.approx(0.35)
    for _ in range(6):
        bench.now += 0.05
        bench.step(is_generating=True)
        assert not bench.scoring.is_computing
    bench.now += 0.051
    bench.step(is_generating=True)
    assert bench.scoring.is_computing


def test_nobody_rests_where_nothing_is_generated() -> None:
    bench, thread = beside(budget=1)
    for number in (1, 2, 3):
        bench.submit(number)
    bench.step()
    for _ in range(3):
        bench.now += 5
        thread.work()
        bench.step(is_generating=False)
    assert bench.order == [1, 2, 3]


def test_half_of_the_time_is_generations_alone_whatever_the_pairs_take() -> None:
    """Where priorities have no effect at all: no step is done while a pair is scored."""
    bench, thread = beside(budget=1)
    alone = 0.0
    for number, seconds in enumerate((0.01, 3.0, 0.5, 0.02, 1.0, 0.3, 0.001, 2.0) * 3):
        bench.submit(number)
        while not bench.scoring.is_computing:
            bench.now += 0.002
            alone += 0.002
            bench.step(is_generating=True)
        bench.now += seconds
        thread.work()
        bench.step(is_generating=True)
    bench.run()
    assert alone >= 0.9 * (bench.now - 100.0 - 2.0) / 2


def test_what_ends_while_it_is_scored_ends_at_once_and_only_so() -> None:
    bench, thread = beside()
    bench.submit(1)
    bench.submit(2, deadline=101.0)
    bench.submit(3)
    bench.step()
    bench.scoring.cancel(ORIGIN, 1)
    assert bench.scoring.seconds_until_work() == 1.0, "somebody is to be told then"
    bench.now = 101.0
    bench.step()
    assert bench.reasons == {1: "cancelled", 2: "deadline"}
    thread.work()
    bench.step()
    assert bench.reasons == {1: "cancelled", 2: "deadline", 3: "eos"}
    assert bench.scorer.asked == [[3, 3]], "nobody waits for the others any more"
    assert (bench.scoring.num_waiting, bench.scoring.num_waiting_tokens) == (0, 0)


def test_a_closed_queue_lets_what_is_scored_fail() -> None:
    bench, thread = beside()
    bench.submit(1)
    bench.submit(2)
    bench.step()
    bench.scorer.on_score = lambda: bench.scoring.close()
    bench.scoring.remove_all("draining")
    bench.scoring.close()
    assert bench.scoring.is_computing and thread.is_shut_down and bench.scorer.calls == ["interrupt"]
    thread.work()
    assert bench.scorer.asked == [] and not bench.scoring.is_computing


def test_a_turn_that_is_under_way_takes_no_place_in_the_queue() -> None:
    bench, _ = beside(budget=1, max_waiting_requests=2)
    bench.submit(0)
    bench.step()
    for number in range(1, 5):
        bench.submit(number)
    assert bench.reasons == {3: "queue_full", 4: "queue_full"}


LOUD, QUIET = Share("loud"), Share("quiet")


def test_callers_take_turns_by_tokens() -> None:
    bench = Bench(budget=1)
    for number in range(100):
        bench.submit(number, share=LOUD)
    bench.step()
    for number in range(100, 104):
        bench.submit(number, num_source=7, share=QUIET)  # twice the tokens of the others
    bench.run()
    places = [bench.order.index(number) for number in range(100, 104)]
    assert places == sorted(places) and places[0] <= 2 and places[-1] <= 12


def test_weights_divide_the_work() -> None:
    bench = Bench(budget=1)
    for number in range(60):
        bench.submit(number, share=Share("light", weight=1.0))
        bench.submit(100 + number, share=Share("heavy", weight=3.0))
    for _ in range(40):
        bench.step()
    assert sum(number >= 100 for number in bench.order) == pytest.approx(30, abs=2)


def test_a_caller_has_no_more_than_its_pairs_waiting() -> None:
    bench = Bench()
    for number in range(5):
        bench.submit(number, share=Share("loud", max_waiting=2))
    bench.submit(9, share=QUIET)
    assert {number: (end.reason, end.limit) for number, end in bench.ended.items()} == {
        3: ("queue_full", "max_waiting"),
        4: ("queue_full", "max_waiting"),
    }
    assert bench.ended[3].retry_after_seconds > 0


def test_who_has_most_makes_room_in_a_full_queue() -> None:
    bench = Bench(max_waiting_requests=4)
    for number in range(5):
        bench.submit(number, share=LOUD)
    bench.submit(10, share=QUIET)
    assert {number: (end.reason, end.limit) for number, end in bench.ended.items()} == {4: ("queue_full", "")}, "its newest"
    for number in (5, 6):
        bench.submit(number, share=LOUD)
    assert bench.reasons == dict.fromkeys((4, 5, 6), "queue_full")
    bench.run()
    assert [bench.ended[number].reason for number in (0, 1, 2, 3, 10)] == ["eos"] * 5


def unloaded(**faults: Exception) -> Bench:
    scorer = FakeScorer(is_loaded=False)
    scorer.faults = faults
    return Bench(scorer=scorer)


def test_the_scorer_is_loaded_before_anybody_asks() -> None:
    bench, thread = beside(scorer=FakeScorer(is_loaded=False))
    assert bench.scoring.has_work and bench.scoring.seconds_until_work() == 0
    bench.step()
    bench.submit(1)
    thread.work()
    bench.step()
    assert bench.scorer.calls == ["check"] and bench.order == [], "a pair that comes meanwhile waits"
    thread.work()
    bench.step()
    assert bench.scorer.calls == ["check", "open"]
    thread.work()
    bench.step()
    assert bench.reasons == {1: "eos"} and not bench.scoring.has_work


@pytest.mark.parametrize("stage", ["check", "open"])
def test_a_scorer_that_cannot_be_loaded_is_tried_again_and_again(stage: str) -> None:
    bench = unloaded(**{stage: BundleError("the bundle is away")})
    bench.submit(1)
    with structlog.testing.capture_logs() as logs:
        for _ in range(4):
            bench.step()
        assert (bench.ended[1].reason, bench.ended[1].retry_after_seconds) == ("not_loaded", 1.0)
        assert bench.scoring.seconds_until_work() == 1.0
        bench.now += 0.25
        bench.submit(2)
        assert (bench.ended[2].reason, bench.ended[2].retry_after_seconds) == ("not_loaded", 0.75), "at once"
        waits = []
        for _ in range(9):
            bench.now += bench.scoring.seconds_until_work()
            for _ in range(4):
                bench.step()
            waits.append(bench.scoring.seconds_until_work())
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("the scorer cannot be loaded", "the bundle is away")]


def test_a_bundle_that_comes_back_is_scored_with() -> None:
    bench = unloaded(check=BundleError("the bundle is away"))
    with structlog.testing.capture_logs() as logs:
        bench.step()
        bench.step()
        bench.scorer.faults.clear()
        bench.now += 1
        for _ in range(4):
            bench.step()
        bench.submit(1)
        bench.run()
    assert bench.reasons == {1: "eos"}
    assert [entry["event"] for entry in logs] == ["the scorer cannot be loaded", "scorer loaded"]


def test_a_scorer_on_the_engines_device_works_between_its_steps() -> None:
    """Files are still read in the background: that takes long."""
    scorer = FakeScorer(is_loaded=False)
    scorer.is_on_device = True
    bench, thread = beside(budget=1, scorer=scorer)
    bench.step()
    thread.work()
    bench.step()
    assert scorer.calls == ["check", "open"]
    bench.submit(1)
    bench.submit(2)
    scorer.on_score = lambda: setattr(bench, "now", bench.now + 0.5)
    for _ in range(3):
        bench.step(is_generating=True)
    assert bench.order == [1] and bench.scoring.seconds_until_work() == 0.5, "for its time they rest as well"


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
        assert bench.scoring.num_waiting_tokens == sum(pair.num_tokens for pair in bench.scoring._pairs.all())
    bench.run()
    bench.collect()
    assert sorted(bench.ended) == list(range(num_submitted))
