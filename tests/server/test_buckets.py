"""Token buckets, with a clock of the test, and durations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.buckets import Bucket
from dragoman.server.durations import parse_duration


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


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


DURATIONS = {"90s": 90, "10m": 600, "1.5h": 5400, "250ms": 0.25, "2d": 172800, "0s": 0, "007s": 7}
NO_DURATIONS = ["", "10", 10, "m", "-1s", "1 s", "1S", "1e3s", "1s ", "1s\n", "٣s", "1.s", ".5s", "inf", "9" * 400 + "s", None]


@pytest.mark.parametrize("text", [*DURATIONS, *NO_DURATIONS])
def test_durations_have_a_unit(text: str) -> None:
    if text in DURATIONS:
        assert parse_duration(text) == pytest.approx(DURATIONS[text])
        return
    with pytest.raises(ValueError, match=r"is not a time such as 90s, 10m or 1\.5h, in quotes") as refusal:
        parse_duration(text)
    assert len(str(refusal.value)) < 200
