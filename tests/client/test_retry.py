"""Retries: the policy's waits, the deadline that all attempts share, and the attempts of both clients."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.client import errors
from dragoman.client.errors import DeadlineExceeded, Overloaded, Unavailable
from dragoman.client.retry import Attempts, RetryPolicy
from tests.client.fake_server import Held, failing

PLAIN = RetryPolicy(jitter=0.0)
METHODS = ["generate", "stream", "models"]


def ask(call, method: str, **arguments):
    return call(method, *([] if method == "models" else ["x"]), **arguments)


@pytest.mark.parametrize(
    ("changes", "num_attempts", "retry_after", "wait"),
    [
        *(({}, number, None, wait) for number, wait in enumerate([0.1, 0.2, 0.4, 0.8, None], start=1)),
        ({"max_attempts": 1}, 1, None, None),
        ({"max_attempts": 5000, "max_backoff_seconds": 0.3}, 2, None, 0.2),
        ({"max_attempts": 5000, "max_backoff_seconds": 0.3}, 4999, None, 0.3),
        ({"initial_backoff_seconds": 9, "max_backoff_seconds": 2}, 1, None, 2),
        ({}, 1, 30.0, 30.0),
        ({}, 3, 0.001, 0.4),
    ],
)
def test_waits_grow_to_the_maximum_and_respect_the_servers_delay(changes, num_attempts, retry_after, wait) -> None:
    policy = RetryPolicy(**{"jitter": 0.0, **changes})
    for kind in (Overloaded, Unavailable):
        assert policy.wait_seconds(num_attempts, kind("no", retry_after_seconds=retry_after), 0.9) == (wait and pytest.approx(wait))


@settings(max_examples=50)
@given(st.integers(1, 4), st.none() | st.floats(0, 1e6), st.floats(0, 1, exclude_max=True), st.floats(0, 3))
def test_jitter_only_lengthens_a_wait(num_attempts: int, asked: float | None, draw: float, jitter: float) -> None:
    error = Overloaded("full", retry_after_seconds=asked)
    least = RetryPolicy(jitter=0).wait_seconds(num_attempts, error, draw)
    wait = RetryPolicy(jitter=jitter).wait_seconds(num_attempts, error, draw)
    assert least >= (asked or 0.0) and wait == pytest.approx(least * (1 + jitter * draw)) and wait >= least


@pytest.mark.parametrize(
    ("setting", "wrong", "least"),
    [
        ("max_attempts", [0], 1),
        ("initial_backoff_seconds", [-1, math.nan, math.inf], 0),
        ("max_backoff_seconds", [-1, math.nan, math.inf], 0),
        ("jitter", [-1, math.nan, math.inf], 0),
        ("multiplier", [0.5, math.nan, math.inf], 1),
    ],
)
def test_an_impossible_policy_is_named(setting: str, wrong: list[float], least: float) -> None:
    RetryPolicy(**{setting: least})
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{setting}: "):
            RetryPolicy(**{setting: value})


def test_attempts_and_waits_share_one_deadline(clock) -> None:
    attempts = Attempts(PLAIN, 10.0, "r-1", clock=clock)
    assert attempts.start() == 10.0
    clock.now += 4.0
    assert attempts.wait_seconds(Unavailable("gone")) == pytest.approx(0.1)
    assert attempts.wait_seconds(Overloaded("full", retry_after_seconds=6.0)) is None, "the wait would reach the deadline"
    assert attempts.wait_seconds(Overloaded("full", retry_after_seconds=5.5)) == 5.5
    assert attempts.start() == pytest.approx(6.0)
    clock.now += 6.0
    with pytest.raises(DeadlineExceeded, match=r"10 s have passed") as caught:
        attempts.start()
    assert caught.value.request_id == "r-1"


def test_jitter_is_drawn_for_each_wait(clock) -> None:
    draws = iter([0.0, 1.0, 1.0])
    policy = RetryPolicy(max_attempts=3, multiplier=1, jitter=1.0)
    attempts, waits = Attempts(policy, 60.0, clock=clock, draw=lambda: next(draws)), []
    for _ in range(3):
        attempts.start()
        waits.append(attempts.wait_seconds(Unavailable("gone")))
    assert waits == [pytest.approx(0.1), pytest.approx(0.2), None]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
@pytest.mark.parametrize("method", METHODS)
def test_a_passing_failure_is_tried_again_with_the_same_id(call, service, clock, method: str, code: str) -> None:
    service.script.extend([failing(code), failing(code, retry_after=(7, 500_000_000)), failing(code, retry_after=(0, 1))])
    assert ask(call, method, options={"retry": PLAIN})
    assert clock.waits == [pytest.approx(0.1), 7.5, pytest.approx(0.4)]
    assert len(service.requests) == 4
    assert len({getattr(request, "request_id", "") for request in service.requests}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_attempts_run_out(call, service, clock, method: str) -> None:
    service.script.extend([failing("UNAVAILABLE", f"draining {n}") for n in range(9)])
    with pytest.raises(Unavailable, match="draining 4"):
        ask(call, method)
    assert len(service.requests) == 5
    assert all(wait <= actual <= 1.5 * wait for wait, actual in zip([0.1, 0.2, 0.4, 0.8], clock.waits, strict=True))


@pytest.mark.parametrize("code", ["INTERNAL", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED", "NOT_FOUND", "UNKNOWN"])
@pytest.mark.parametrize("method", METHODS)
def test_other_failures_are_final(call, service, clock, method: str, code: str) -> None:
    service.script.append(failing(code, retry_after=(1, 0)))
    with pytest.raises(errors.CallError) as caught:
        ask(call, method)
    assert caught.value.code == code
    assert (len(service.requests), clock.waits) == (1, [])


@pytest.mark.parametrize("method", METHODS)
def test_waits_shorten_the_time_of_later_attempts(call, service, clock, method: str) -> None:
    service.script.extend([failing("UNAVAILABLE", retry_after=(100, 0)), failing("UNAVAILABLE", retry_after=(250, 0))])
    assert ask(call, method, timeout_seconds=1000.0, options={"retry": PLAIN})
    assert service.seconds_left == [pytest.approx(seconds, abs=40) for seconds in (1000, 900, 650)]
    service.script.append(failing("RESOURCE_EXHAUSTED", "queue: full", retry_after=(60, 0)))
    with pytest.raises(Overloaded, match="queue: full"):
        ask(call, method, options={"retry": PLAIN})  # of 60 s
    assert clock.waits == [100, 250]


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_call_ends_at_its_deadline(call, service, method: str) -> None:
    service.script.append(Held())
    with pytest.raises(DeadlineExceeded) as caught:
        call(method, "x", timeout_seconds=0.2, request_id="r-3")
    assert caught.value.request_id == "r-3"


def test_a_stream_is_not_tried_again_after_its_first_piece(call, service, clock) -> None:
    service.script.append(failing("UNAVAILABLE", "engine died", place="middle"))
    with pytest.raises(Unavailable, match="engine died"):
        call("stream", "abcd")
    assert (len(service.requests), clock.waits) == (1, [])
