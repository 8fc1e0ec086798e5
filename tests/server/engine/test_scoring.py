"""Score requests of an engine, with a scorer that computes nothing."""

import math
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
from dragoman.server.engine.messages import Scored, ScoreRequest
from dragoman.server.engine.scoring import Scoring


class FakeScorer:
    """Answers with what it was asked: source ids as log-probabilities, target ids times the layer as attention."""

    def __init__(self, is_loaded: bool = True, is_on_device: bool = False) -> None:
        self.is_loaded, self.is_on_device = is_loaded, is_on_device
        self.faults: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.asked: list[int] = []
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
        self.asked.append(source_ids[0])
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
        ((future, job),) = self._jobs
        self._jobs.clear()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not wait, "nothing may wait for a pair"
        self.is_shut_down = True


class AtOnce(Executor):
    """Does everything when it is submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Pairs:
    """The scoring, its clock, and how its requests ended; a step's work is done at once, or by `thread` when a test wants it."""

    def __init__(
        self,
        budget: int = 1000,
        *,
        scorer: FakeScorer | None = None,
        thread: Later | None = None,
        pair_seconds: float = 0.0,
    ) -> None:
        self.now = 100.0
        self.scorer = scorer or FakeScorer()
        self.scorer.on_score = lambda: self.wait(pair_seconds)
        self.scoring = Scoring(self.scorer, budget, lambda: self.now, thread or AtOnce())
        self.ended: dict[int, Scored] = {}
        self.order: list[int] = []

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, *numbers: int, num_source: int = 2, num_target: int = 3, **fields: Any) -> None:
        for number in numbers:
            fields = {"arrival": self.now} | fields
            self.scoring.submit(ScoreRequest(number, [number] * num_source, [7] * num_target, **fields))
            self.collect()

    def cancel(self, number: int) -> None:
        self.scoring.cancel(number)
        self.collect()

    def step(self, is_generating: bool = False) -> list[int]:
        """Do a step; return which pairs have ended since the last one."""
        before = len(self.order)
        self.scoring.step(is_generating)
        self.collect()
        return self.order[before:]

    def collect(self) -> None:
        for end in self.scoring.take_scored():
            assert end.id not in self.ended, "a pair ended twice"
            self.ended[end.id] = end
            self.order.append(end.id)

    def run(self) -> None:
        while self.scoring.has_work:
            self.step()
        assert (self.scoring.num_waiting, self.scoring.num_waiting_tokens) == (0, 0)
        assert self.scoring.seconds_until_work() == math.inf

    @property
    def reasons(self) -> dict[int, str]:
        return {number: end.reason for number, end in self.ended.items()}


def test_a_pair_is_answered_with_what_was_computed_for_it() -> None:
    pairs = Pairs()
    pairs.submit(5)
    pairs.submit(6, is_aligned=True, decoder_start_id=0)
    pairs.submit(8, is_aligned=True, alignment_layer=3, decoder_start_id=9)
    pairs.run()
    assert pairs.ended[5] == Scored(5, "eos", [5.0] * 3, b"", 100.0)
    assert np.frombuffer(pairs.ended[6].alignment, np.float32).reshape(3, 2).tolist() == [[-42, -42]] * 3
    assert np.frombuffer(pairs.ended[8].alignment, np.float32).reshape(3, 2).tolist() == [[168, 168]] * 3
    assert pairs.scorer.starts == [None, 0, 9]


@pytest.mark.parametrize(
    ("sizes", "turns"), [([5] * 5, [[0, 1], [2, 3], [4]]), ([100, 5], [[0], [1]]), ([4, 50, 4], [[0], [1], [2]])]
)
def test_a_step_scores_what_the_budget_holds_and_passes_over_nothing(sizes: list[int], turns: list[list[int]]) -> None:
    pairs = Pairs(budget=10)
    for number, size in enumerate(sizes):
        pairs.submit(number, num_source=size - 3)
    assert pairs.scoring.num_waiting_tokens == sum(sizes)
    assert [pairs.step() for _ in turns] == turns


def test_a_pair_that_fails_fails_alone_and_is_logged_without_its_text() -> None:
    pairs = Pairs()
    pairs.scorer.failing = {2}
    pairs.submit(1, 2, 3)
    with structlog.testing.capture_logs() as logs:
        pairs.run()
    assert pairs.reasons == {1: "eos", 2: "step_failed", 3: "eos"}
    (entry,) = logs
    assert entry["incident"] == pairs.ended[2].incident != ""
    assert not {"source_ids", "target_ids", "request"} & entry.keys()
    assert (pairs.ended[2].log_probs, pairs.ended[2].alignment) == ([], b"")


def test_pairs_end_by_deadlines_cancellation_and_the_end_before_and_while_they_are_scored() -> None:
    thread = Later()
    pairs = Pairs(thread=thread)
    pairs.submit(1, 2, 3, 4, 6)
    pairs.submit(5, deadline=101.0)
    pairs.cancel(4)
    pairs.cancel(99)
    woken = []
    pairs.scoring.on_done = lambda: woken.append(pairs.scoring.seconds_until_work() == 0)
    pairs.step()
    pairs.cancel(1)
    assert pairs.scoring.seconds_until_work() == 1.0, "a deadline passes then"
    assert woken == []
    pairs.now = 101.0
    pairs.step()
    assert pairs.reasons == {4: "cancelled", 1: "cancelled", 5: "deadline"} and pairs.scorer.asked == []
    thread.work()
    assert woken == [True]
    pairs.step()
    assert pairs.scorer.asked == [2, 3, 6], "what has ended is not computed"
    assert pairs.reasons[2] == "eos"
    pairs.submit(7, 8)
    pairs.step()
    pairs.scoring.end_all("draining")
    pairs.scoring.close()
    pairs.collect()
    assert pairs.reasons[7] == pairs.reasons[8] == "draining"
    assert pairs.scoring.is_computing and thread.is_shut_down and pairs.scorer.calls == ["interrupt"]
    thread.work()
    assert pairs.scorer.asked == [2, 3, 6] and not pairs.scoring.is_computing


def test_scoring_rests_as_long_as_its_turn_took_beside_generation() -> None:
    thread = Later()
    pairs = Pairs(budget=1, thread=thread)
    pairs.submit(1, 2, 3)
    pairs.step(is_generating=True)
    for _ in range(6):  # decode steps of 50 ms, during which the pair is scored
        pairs.wait(0.05)
        assert pairs.step(is_generating=True) == []
    thread.work()
    pairs.wait(0.05)
    assert pairs.step(is_generating=True) == [1] and pairs.scoring.seconds_until_work() == pytest.approx(0.35)
    for _ in range(6):
        pairs.wait(0.05)
        pairs.step(is_generating=True)
        assert not pairs.scoring.is_computing
    pairs.wait(0.051)
    pairs.step(is_generating=True)
    assert pairs.scoring.is_computing
    for number in (2, 3):  # nothing rests where nothing is generated
        pairs.wait(5)
        thread.work()
        assert pairs.step() == [number]


def test_the_scorer_is_loaded_before_any_pair_comes_and_pairs_wait_for_it() -> None:
    thread = Later()
    pairs = Pairs(scorer=FakeScorer(is_loaded=False), thread=thread)
    assert pairs.scoring.has_work and pairs.scoring.seconds_until_work() == 0
    for calls, ended in (([], []), (["check"], []), (["check", "open"], []), (["check", "open"], [1])):
        assert (pairs.scorer.calls, pairs.order) == (calls, ended)
        if not ended:
            if not calls:
                pairs.step()
                pairs.submit(1)
            thread.work()
            pairs.step()
    assert not pairs.scoring.has_work


@pytest.mark.parametrize("stage", ["check", "open"])
def test_a_scorer_that_cannot_be_loaded_is_tried_again_until_it_can(stage: str) -> None:
    pairs = Pairs(scorer=FakeScorer(is_loaded=False))
    pairs.scorer.faults = {stage: BundleError("the bundle is away")}
    pairs.submit(1)
    with structlog.testing.capture_logs() as logs:
        for _ in range(4):
            pairs.step()
        assert (pairs.ended[1].reason, pairs.ended[1].retry_after_seconds) == ("not_loaded", 1.0)
        assert pairs.scoring.seconds_until_work() == 1.0
        pairs.wait(0.25)
        pairs.submit(2)
        assert (pairs.ended[2].reason, pairs.ended[2].retry_after_seconds) == ("not_loaded", 0.75), "at once"
        waits = []
        for _ in range(9):
            pairs.wait(pairs.scoring.seconds_until_work())
            for _ in range(4):
                pairs.step()
            waits.append(pairs.scoring.seconds_until_work())
        assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60]
        pairs.scorer.faults.clear()
        pairs.wait(60)
        for _ in range(4):
            pairs.step()
        pairs.submit(3)
        pairs.run()
    assert pairs.reasons[3] == "eos"
    assert [entry["event"] for entry in logs] == ["the scorer cannot be loaded", "scorer loaded"]
    assert logs[0]["reason"] == "the bundle is away"


def test_a_scorer_on_the_engines_device_works_between_its_steps() -> None:
    thread = Later()
    pairs = Pairs(budget=1, scorer=FakeScorer(is_loaded=False, is_on_device=True), thread=thread, pair_seconds=0.5)
    pairs.step()
    thread.work()
    pairs.step()
    assert pairs.scorer.calls == ["check", "open"]
    pairs.submit(1, 2)
    assert [pairs.step(is_generating=True) for _ in range(3)] == [[1], [], []]
    assert pairs.scoring.seconds_until_work() == 0.5, "after their time they rest as well"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(-10, 10), st.none() | st.integers(0, 20)),
        st.tuples(st.sampled_from(["cancel", "fail"]), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_every_pair_ends_exactly_once_in_any_history(operations: list[tuple[Any, ...]]) -> None:
    pairs = Pairs(20)
    num_submitted = 0
    with structlog.testing.capture_logs():
        for name, *arguments in operations:
            if name == "submit":
                size, priority, patience = arguments
                deadline = None if patience is None else pairs.now + patience
                pairs.submit(num_submitted, num_source=size, priority=priority, deadline=deadline)
                num_submitted += 1
            elif name == "cancel":
                pairs.cancel(arguments[0])
            elif name == "fail":
                pairs.scorer.failing.add(arguments[0])
            else:
                pairs.wait(arguments[0])
                pairs.step()
            assert pairs.scoring.num_waiting == num_submitted - len(pairs.ended)
        pairs.run()
    assert sorted(pairs.ended) == list(range(num_submitted))
