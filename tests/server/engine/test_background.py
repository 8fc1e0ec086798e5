"""Work beside decode steps: threads that give way, shares of time, what wakes the loop; slots of a request."""

import os
import select
import threading

import pytest
from dragoman.server.engine.allowance import MAX_DEBT_SECONDS, Allowance
from dragoman.server.engine.bell import Bell
from dragoman.server.engine.executors import background
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.settings import EngineSettings
from tests.examples import num_examples


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_background_gives_way() -> None:
    before, found = niceness(), list[int]()

    def look() -> None:
        found.append(niceness())
        inner = threading.Thread(target=lambda: found.append(niceness()))
        inner.start()
        inner.join()

    with background() as executor:
        executor.submit(look).result(10)
    assert found == [min(before + 10, 19)] * 2, "and so does what it starts"
    assert niceness() == before, "and no other thread"


def has_rung(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_a_bell_is_heard_until_it_is_silenced_and_touches_nothing_once_it_is_closed() -> None:
    """A pair may be scored after the engine has ended, and descriptors' numbers are given out again."""
    bell = Bell()
    assert not has_rung(bell)
    bell.ring()
    bell.ring()
    assert has_rung(bell)
    for _ in range(2):
        bell.silence()
        assert not has_rung(bell)
    number = bell.fileno()
    bell.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert other == number
        bell.close()
        bell.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)


SECONDS = st.floats(0.0001, 0.02)


@settings(max_examples=num_examples(60, of=300), deadline=None, derandomize=True)
@given(st.sampled_from([0.1, 1 / 3, 0.5, 0.9]), st.lists(st.tuples(SECONDS, st.lists(SECONDS, max_size=5)), max_size=60))
def test_work_takes_its_share_of_time_and_one_piece_at_the_most(share: float, steps: list[tuple[float, list[float]]]) -> None:
    allowance, others, work, longest = Allowance(share), 0.0, 0.0, 0.0
    for step_seconds, pieces in steps:
        allowance.earn(step_seconds)
        others += step_seconds
        in_this_step = 0.0
        for piece in pieces:
            if not allowance.is_open:
                break
            allowance.spend(piece)
            work, in_this_step, longest = work + piece, in_this_step + piece, max(longest, piece)
        assert in_this_step <= step_seconds * share / (1 - share) + longest + 1e-9
        assert work <= others * share / (1 - share) + longest + 1e-9


def test_an_allowance_is_not_saved_up_and_a_debt_is_paid_off() -> None:
    allowance = Allowance(0.5)
    for _ in range(1000):
        allowance.earn(0.01)
    allowance.spend(0.011)
    assert not allowance.is_open
    allowance.clear()
    assert allowance.is_open
    allowance.spend(3600.0)
    allowance.earn(MAX_DEBT_SECONDS)
    assert allowance.is_open, "a stall does not close it for long"
    allowance = Allowance(1 / 3)
    allowance.spend(0.1)
    num_steps = 0
    while not allowance.is_open:
        allowance.earn(0.01)
        num_steps += 1
    assert num_steps == 20, "half a step's time each"
    for _ in range(3):
        allowance.earn(0.0)
        allowance.spend(0.0)
        assert allowance.is_open, "also where time stands still"


@pytest.mark.parametrize(
    ("max_slots", "chosen", "allowed"),
    [(64, 0, 16), (256, 0, 64), (32, 0, 16), (8, 0, 8), (1, 0, 1), (64, 64, 64), (64, 1, 1), (8, 5, 5), (8, 9, 8)],
)
def test_a_request_may_take_a_quarter_of_the_slots_or_sixteen_unless_set_otherwise(
    max_slots: int, chosen: int, allowed: int
) -> None:
    settings = EngineSettings("x", "bundle", 1, max_slots, 10, 1000, 1000, False, "error", "json", max_slots_per_request=chosen)
    assert settings.slots_per_request == allowed
