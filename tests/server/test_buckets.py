"""Buckets, with a clock of the tests' own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.buckets import Bucket


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_it_is_full_at_first_and_fills_at_its_rate() -> None:
    clock = Clock()
    bucket = Bucket(2.0, 10.0, clock)
    bucket.take(10)
    assert bucket.level == 0
    clock.now += 1.5
    assert bucket.level == pytest.approx(3)
    clock.now += 1000
    assert bucket.level == 10


def test_a_debt_is_paid_before_there_is_anything() -> None:
    clock = Clock()
    bucket = Bucket(2.0, 10.0, clock)
    bucket.take(30)
    assert bucket.seconds_until(1) == pytest.approx(10.5)
    clock.now += 10.5
    assert bucket.seconds_until(1) == 0


def test_what_it_never_holds_is_not_waited_for() -> None:
    bucket = Bucket(1.0, 5.0, Clock())
    assert bucket.seconds_until(100) == 0


def test_what_is_given_back_does_not_overflow() -> None:
    bucket = Bucket(1.0, 5.0, Clock())
    bucket.take(-100)
    assert bucket.level == 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 50)), max_size=60), st.floats(0.1, 100), st.floats(1, 100))
def test_nothing_lets_more_through_than_burst_and_rate(steps: list[tuple[float, float]], rate: float, burst: float) -> None:
    """Taking only while something is there, the sum taken is at most the burst, the rate times the time, and one last debt."""
    clock, taken, last = Clock(), 0.0, 0.0
    bucket = Bucket(rate, burst, clock)
    for pause, amount in steps:
        clock.now += pause
        if bucket.level > 0:
            bucket.take(amount)
            taken, last = taken + amount, amount
    assert taken <= burst + rate * (clock.now - 5.0) + last + 1e-6 * (1 + taken)
