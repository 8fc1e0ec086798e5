"""Token buckets, with a clock of the test."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.buckets import Bucket
from tests.clock import Clock


def test_bucket_is_full_at_first_fills_at_its_rate_and_may_be_in_debt() -> None:
    clock = Clock()
    bucket = Bucket(2.0, 10.0, clock)
    bucket.take(10)
    assert bucket.level == 0
    clock.now += 1.5
    assert bucket.level == pytest.approx(3)
    clock.now += 1000
    assert bucket.level == 10
    bucket.take(30)
    assert bucket.seconds_until(1) == pytest.approx(10.5)
    clock.now += 10.5
    assert bucket.seconds_until(1) == 0
    bucket.take(-100)
    assert bucket.level == 10 and bucket.seconds_until(100) == 0, "it never holds more, and is not waited for in vain"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 50)), max_size=60), st.floats(0.1, 100), st.floats(1, 100))
def test_bucket_lets_no_more_through_than_burst_and_rate(steps: list[tuple[float, float]], rate: float, burst: float) -> None:
    """Taking only while something is there, the sum taken is at most the burst, the rate times the time, and one last debt."""
    clock, taken, last = Clock(), 0.0, 0.0
    bucket = Bucket(rate, burst, clock)
    for pause, amount in steps:
        clock.now += pause
        if bucket.level > 0:
            bucket.take(amount)
            taken, last = taken + amount, amount
    assert taken <= burst + rate * (clock.now - 5.0) + last + 1e-6 * (1 + taken)
