import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.client.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from dragoman.client.retry import Attempts, RetryPolicy

PLAIN = RetryPolicy(jitter=0.0)


@pytest.mark.parametrize(("num_attempts", "wait"), [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8)])
def test_waits_grow_by_the_multiplier(num_attempts: int, wait: float) -> None:
    assert PLAIN.wait_seconds(num_attempts, Unavailable("gone"), 0.9) == pytest.approx(wait)


def test_waits_stop_growing_at_the_maximum() -> None:
    policy = RetryPolicy(max_attempts=5000, max_backoff_seconds=0.3, jitter=0.0)
    assert [policy.wait_seconds(n, Overloaded("full"), 0.5) for n in (2, 3, 4999)] == [0.2, 0.3, 0.3]


def test_first_wait_obeys_the_maximum_too() -> None:
    assert RetryPolicy(initial_backoff_seconds=9, max_backoff_seconds=2, jitter=0).wait_seconds(1, Unavailable("gone"), 0) == 2


def test_last_attempt_is_final() -> None:
    assert PLAIN.wait_seconds(5, Unavailable("gone"), 0.0) is None
    assert RetryPolicy(max_attempts=1).wait_seconds(1, Unavailable("gone"), 0.0) is None


@pytest.mark.parametrize("kind", [InvalidArgument, ModelNotFound, DeadlineExceeded, Cancelled, InternalError, Unauthenticated])
def test_other_errors_are_final_even_if_the_server_names_a_time(kind: type) -> None:
    assert PLAIN.wait_seconds(1, kind("no", retry_after_seconds=0.1), 0.0) is None


def test_servers_wish_prolongs_the_wait_beyond_the_maximum() -> None:
    assert PLAIN.wait_seconds(1, Overloaded("full", retry_after_seconds=30.0), 0.0) == 30.0


def test_servers_wish_never_shortens_the_wait() -> None:
    assert PLAIN.wait_seconds(3, Overloaded("full", retry_after_seconds=0.001), 0.0) == pytest.approx(0.4)


@given(
    num_attempts=st.integers(1, 4),
    asked=st.one_of(st.none(), st.floats(0, 1e6)),
    draw=st.floats(0, 1, exclude_max=True),
    jitter=st.floats(0, 3),
)
def test_wait_is_never_earlier_than_asked_and_never_longer_than_its_jitter(
    num_attempts: int, asked: float | None, draw: float, jitter: float
) -> None:
    wait = RetryPolicy(jitter=jitter).wait_seconds(num_attempts, Overloaded("full", retry_after_seconds=asked), draw)
    least = RetryPolicy(jitter=0).wait_seconds(num_attempts, Overloaded("full", retry_after_seconds=asked), draw)
    assert wait is not None and least is not None
    assert wait >= least >= (asked or 0.0)
    assert wait <= least * (1 + jitter)


def test_clients_that_failed_together_come_back_apart() -> None:
    waits = {RetryPolicy().wait_seconds(1, Overloaded("full", retry_after_seconds=1.0), draw) for draw in (0.0, 0.5, 0.9)}
    assert len(waits) == 3


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_attempts", 0),
        ("initial_backoff_seconds", -1),
        ("max_backoff_seconds", math.nan),
        ("jitter", math.inf),
        ("multiplier", 0.5),
    ],
)
def test_impossible_setting_is_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{setting}: "):
        RetryPolicy(**{setting: value})


def test_attempts_and_waits_share_one_deadline(clock) -> None:
    attempts = Attempts(PLAIN, 10.0, clock=clock)
    assert attempts.start() == 10.0
    clock.now += 4.0
    assert attempts.wait_seconds(Unavailable("gone")) == pytest.approx(0.1)
    clock.now += 0.1
    assert attempts.start() == pytest.approx(5.9)


def test_wait_that_would_reach_the_deadline_is_not_begun(clock) -> None:
    attempts = Attempts(PLAIN, 10.0, clock=clock)
    attempts.start()
    assert attempts.wait_seconds(Overloaded("full", retry_after_seconds=10.0)) is None
    assert attempts.wait_seconds(Overloaded("full", retry_after_seconds=9.5)) == 9.5


def test_attempt_without_time_left_is_refused(clock) -> None:
    attempts = Attempts(PLAIN, 2.5, "r-1", clock=clock)
    clock.now += 2.5
    with pytest.raises(DeadlineExceeded, match=r"2\.5 s") as caught:
        attempts.start()
    assert caught.value.request_id == "r-1"


def test_attempts_run_out(clock) -> None:
    attempts = Attempts(RetryPolicy(max_attempts=3, jitter=0), 60.0, clock=clock)
    waits = []
    for _ in range(3):
        attempts.start()
        waits.append(attempts.wait_seconds(Unavailable("gone")))
    assert waits == [pytest.approx(0.1), pytest.approx(0.2), None]


def test_jitter_is_drawn_anew_for_each_wait(clock) -> None:
    draws = iter([0.0, 1.0])
    attempts = Attempts(RetryPolicy(multiplier=1, jitter=1.0), 60.0, clock=clock, draw=lambda: next(draws))
    attempts.start()
    assert attempts.wait_seconds(Unavailable("gone")) == pytest.approx(0.1)
    assert attempts.wait_seconds(Unavailable("gone")) == pytest.approx(0.2)
