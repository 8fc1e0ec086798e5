"""Work beside decode steps: threads that give way, shares of time, what wakes the loop; slots of a request."""

import os
import select
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.process import WakeUp
from dragoman.server.engine.scoring import Scoring
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.topk_refetch import MAX_DEBT_SECONDS, TimeBudget
from tests.examples import num_examples
from tests.server.engine.test_scoring import FakeScorer


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_background_gives_way() -> None:
    before, found = niceness(), list[int]()

    def load() -> None:
        found.append(niceness())
        inner = threading.Thread(target=lambda: found.append(niceness()))
        inner.start()
        inner.join()

    scorer = FakeScorer(is_loaded=False)
    scorer.check = load  # type: ignore[method-assign]
    scoring = Scoring(scorer, 1)
    done = threading.Event()
    scoring.on_done = done.set
    scoring.step()
    assert done.wait(10)
    scoring.close()
    assert found == [min(before + 10, 19)] * 2, "and so does what it starts"
    assert niceness() == before, "and no other thread"


def is_set(wake_up: WakeUp) -> bool:
    return bool(select.select([wake_up], [], [], 0)[0])


def test_a_wake_up_lasts_until_it_is_cleared_and_touches_nothing_once_it_is_closed() -> None:
    """A pair may be scored after the engine has ended, and descriptors' numbers are given out again."""
    wake_up = WakeUp()
    assert not is_set(wake_up)
    wake_up.set()
    wake_up.set()
    assert is_set(wake_up)
    for _ in range(2):
        wake_up.clear()
        assert not is_set(wake_up)
    number = wake_up.fileno()
    wake_up.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert other == number
        wake_up.close()
        wake_up.set()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)


SECONDS = st.floats(0.0001, 0.02)


@settings(max_examples=num_examples(60, of=300), deadline=None, derandomize=True)
@given(st.sampled_from([0.1, 1 / 3, 0.5, 0.9]), st.lists(st.tuples(SECONDS, st.lists(SECONDS, max_size=5)), max_size=60))
def test_work_takes_its_share_of_time_and_one_piece_at_the_most(share: float, steps: list[tuple[float, list[float]]]) -> None:
    budget, others, work, longest = TimeBudget(share), 0.0, 0.0, 0.0
    for step_seconds, pieces in steps:
        budget.earn(step_seconds)
        others += step_seconds
        in_this_step = 0.0
        for piece in pieces:
            if not budget.is_open:
                break
            budget.spend(piece)
            work, in_this_step, longest = work + piece, in_this_step + piece, max(longest, piece)
        assert in_this_step <= step_seconds * share / (1 - share) + longest + 1e-9
        assert work <= others * share / (1 - share) + longest + 1e-9


def test_a_time_budget_is_not_saved_up_and_a_debt_is_paid_off() -> None:
    budget = TimeBudget(0.5)
    for _ in range(1000):
        budget.earn(0.01)
    budget.spend(0.011)
    assert not budget.is_open
    budget.clear()
    assert budget.is_open
    budget.spend(3600.0)
    budget.earn(MAX_DEBT_SECONDS)
    assert budget.is_open, "a stall does not close it for long"
    budget = TimeBudget(1 / 3)
    budget.spend(0.1)
    num_steps = 0
    while not budget.is_open:
        budget.earn(0.01)
        num_steps += 1
    assert num_steps == 20, "half a step's time each"
    for _ in range(3):
        budget.earn(0.0)
        budget.spend(0.0)
        assert budget.is_open, "also where time stands still"


@pytest.mark.parametrize(
    ("max_slots", "chosen", "allowed"),
    [(64, 0, 16), (256, 0, 64), (32, 0, 16), (8, 0, 8), (1, 0, 1), (64, 64, 64), (64, 1, 1), (8, 5, 5), (8, 9, 8)],
)
def test_a_request_may_take_a_quarter_of_the_slots_or_sixteen_unless_set_otherwise(
    max_slots: int, chosen: int, allowed: int
) -> None:
    settings = EngineSettings("x", "bundle", 1, max_slots, 10, 1000, "error", "json", max_slots_per_request=chosen)
    assert settings.slots_per_request == allowed
