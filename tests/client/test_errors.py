"""Failed calls: the exception of each status, retries within one deadline, and messages over the size limits."""

import math
import pickle
import re

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.client import errors
from dragoman.client.errors import CallError, DeadlineExceeded, Overloaded, TooLarge, Unavailable, from_rpc_error, from_status
from dragoman.client.request import DEFAULT_MAX_REQUEST_BYTES, SEND_OPTION, Request
from dragoman.client.retry import Attempts, RetryPolicy
from dragoman.server.config import ServerConfig
from dragoman.v1.generation_pb2 import Error, ScoreRequest
from tests.client.fake_server import Held, failing, make_status

ONCE = {"retry": RetryPolicy(max_attempts=1)}
PLAIN = RetryPolicy(jitter=0.0)
CALLS = {"generate": "x", "stream": "x", "models": ""}
CLASSES = {
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "NOT_FOUND": errors.ModelNotFound,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "UNIMPLEMENTED": errors.Unimplemented,
    "INTERNAL": errors.InternalError,
    "UNKNOWN": errors.CallError,
    "DATA_LOSS": errors.CallError,
}
LARGE = "x" * 4_500_000
UNLIMITED = {"options": {SEND_OPTION: -1}}
SMALL_ANSWERS = {"options": {"grpc.max_receive_message_length": 1000}}


def test_each_status_has_its_error(call, service) -> None:
    for code, kind_of_error in CLASSES.items():
        for method, arguments in {"generate": "x", "stream": "x", "score": "xy"}.items():
            service.script.append(failing(code, "text: ist länger"))
            with pytest.raises(CallError) as caught:
                call(method, *arguments, request_id="r-9", options=ONCE)
            error = caught.value
            assert type(error) is kind_of_error
            assert (str(error), error.message, error.code) == ("text: ist länger", "text: ist länger", code)
            assert (error.request_id, error.retry_after_seconds) == ("r-9", None)
            assert f"StatusCode.{code}" in repr(error.__cause__)
    service.script.append(failing("INTERNAL", ""))
    with pytest.raises(errors.InternalError, match=r"gave no reason \(INTERNAL\)"):
        call("generate", "x")
    copy = pickle.loads(pickle.dumps(Overloaded("full", "r-1", 0.5)))
    assert type(copy) is Overloaded
    assert (str(copy), copy.request_id, copy.retry_after_seconds, copy.code) == ("full", "r-1", 0.5, "RESOURCE_EXHAUSTED")


def test_a_delay_is_read_from_details_that_agree_with_the_status() -> None:
    garbage = status_pb2.Status(code=14, message="gone")
    garbage.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    first = make_status("UNAVAILABLE", "gone")
    first.details.add().Pack(error_details_pb2.DebugInfo(detail="x"))
    first.MergeFrom(make_status("UNAVAILABLE", "gone", (2, 50_000_000)))
    for status, seconds in (
        (first, 2.05),
        (make_status("UNAVAILABLE", "gone", (-3, 0)), 0.0),
        (make_status("RESOURCE_EXHAUSTED", "gone", (3, 0)), None),
        (make_status("UNAVAILABLE", "something else", (3, 0)), None),
        (make_status("UNAVAILABLE", "gone"), None),
        (b"\xff\xff not protobuf", None),
        (garbage, None),
        (None, None),
    ):
        content = status if isinstance(status, bytes) else status and status.SerializeToString()
        trailers = aio.Metadata(("other", b"x"), *([("grpc-status-details-bin", content)] if status else []))
        error = from_rpc_error(aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), trailers, "gone"), "r-1")
        assert type(error) is Unavailable
        assert (error.message, error.request_id, error.retry_after_seconds) == ("gone", "r-1", seconds)


def test_a_status_of_a_batch_is_the_error_of_a_call() -> None:
    for code, kind, name in ((8, Overloaded, "RESOURCE_EXHAUSTED"), (15, CallError, "DATA_LOSS"), (99, CallError, "UNKNOWN")):
        status = make_status("OK", "full", (2, 0))
        status.code = code
        error = from_status(status, "r-1")
        assert (type(error), error.code, error.message) == (kind, name, "full")
        assert (error.retry_after_seconds, error.request_id) == (2.0, "r-1")
    assert from_status(Error(code=13)).message == "the server gave no reason (INTERNAL)"


def test_waits_grow_to_the_maximum_and_respect_the_servers_delay() -> None:
    for changes, num_attempts, retry_after, wait in (
        *(({}, number, None, wait) for number, wait in enumerate([0.1, 0.2, 0.4, 0.8, None], start=1)),
        ({"max_attempts": 1}, 1, None, None),
        ({"max_attempts": 5000, "max_backoff_seconds": 0.3}, 2, None, 0.2),
        ({"max_attempts": 5000, "max_backoff_seconds": 0.3}, 4999, None, 0.3),
        ({"initial_backoff_seconds": 9, "max_backoff_seconds": 2}, 1, None, 2),
        ({}, 1, 30.0, 30.0),
        ({}, 3, 0.001, 0.4),
    ):
        policy = RetryPolicy(**{"jitter": 0.0, **changes})
        for error in (Overloaded("no", retry_after_seconds=retry_after), Unavailable("no", retry_after_seconds=retry_after)):
            assert policy.wait_seconds(num_attempts, error, 0.9) == (wait and pytest.approx(wait))


@settings(max_examples=30)
@given(st.integers(1, 4), st.none() | st.floats(0, 1e6), st.floats(0, 1, exclude_max=True), st.floats(0, 3))
def test_jitter_only_lengthens_a_wait(num_attempts: int, asked: float | None, draw: float, jitter: float) -> None:
    error = Overloaded("full", retry_after_seconds=asked)
    least = RetryPolicy(jitter=0).wait_seconds(num_attempts, error, draw)
    wait = RetryPolicy(jitter=jitter).wait_seconds(num_attempts, error, draw)
    assert least >= (asked or 0.0) and wait == pytest.approx(least * (1 + jitter * draw)) and wait >= least


def test_an_impossible_policy_is_named() -> None:
    for setting, wrong, least in (
        ("max_attempts", [0], 1),
        ("initial_backoff_seconds", [-1, math.nan, math.inf], 0),
        ("max_backoff_seconds", [-1, math.nan, math.inf], 0),
        ("jitter", [-1, math.nan, math.inf], 0),
        ("multiplier", [0.5, math.nan, math.inf], 1),
    ):
        RetryPolicy(**{setting: least})
        for value in wrong:
            with pytest.raises(ValueError, match=f"^{setting}: "):
                RetryPolicy(**{setting: value})


def test_attempts_and_waits_share_one_deadline_and_each_wait_has_its_jitter(clock) -> None:
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
    draws, waits = iter([0.0, 1.0, 1.0]), []
    attempts = Attempts(RetryPolicy(max_attempts=3, multiplier=1, jitter=1.0), 60.0, clock=clock, draw=lambda: next(draws))
    for _ in range(3):
        attempts.start()
        waits.append(attempts.wait_seconds(Unavailable("gone")))
    assert waits == [pytest.approx(0.1), pytest.approx(0.2), None]


@pytest.mark.parametrize("method", CALLS)
def test_only_a_passing_failure_is_tried_again_and_with_the_same_id(call, service, clock, method: str) -> None:
    for code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        service.script.extend([failing(code), failing(code, retry_after=(7, 500_000_000)), failing(code, retry_after=(0, 1))])
        assert call(method, *CALLS[method], options={"retry": PLAIN})
        assert clock.waits == [pytest.approx(0.1), 7.5, pytest.approx(0.4)]
        assert len(service.requests) == 4
        assert len({getattr(request, "request_id", "") for request in service.requests}) == 1
        service.requests.clear()
        clock.waits.clear()
    service.script.extend([failing("UNAVAILABLE", f"draining {n}") for n in range(5)])
    with pytest.raises(Unavailable, match="draining 4"):
        call(method, *CALLS[method])
    assert len(service.requests) == 5
    assert all(wait <= actual <= 1.5 * wait for wait, actual in zip([0.1, 0.2, 0.4, 0.8], clock.waits, strict=True))
    for number, code in enumerate(("INTERNAL", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"), start=1):
        service.script.append(failing(code, retry_after=(1, 0)))
        with pytest.raises(CallError) as caught:
            call(method, *CALLS[method])
        assert (caught.value.code, len(service.requests), len(clock.waits)) == (code, 5 + number, 4)


@pytest.mark.parametrize("method", CALLS)
def test_waits_shorten_the_time_of_later_attempts(call, service, clock, method: str) -> None:
    service.script.extend([failing("UNAVAILABLE", retry_after=(100, 0)), failing("UNAVAILABLE", retry_after=(250, 0))])
    assert call(method, *CALLS[method], timeout_seconds=1000.0, options={"retry": PLAIN})
    assert service.seconds_left == [pytest.approx(seconds, abs=40) for seconds in (1000, 900, 650)]
    service.script.append(failing("RESOURCE_EXHAUSTED", "queue: full", retry_after=(60, 0)))
    with pytest.raises(Overloaded, match="queue: full"):
        call(method, *CALLS[method], options={"retry": PLAIN})  # of 60 s
    assert clock.waits == [100, 250]
    if method != "models":
        service.script.append(Held())
        with pytest.raises(DeadlineExceeded) as caught:
            call(method, "x", timeout_seconds=0.2, request_id="r-3")
        assert caught.value.request_id == "r-3"


def test_a_request_over_the_limit_is_not_sent(call, service, clock) -> None:
    assert ServerConfig.model_fields["max_message_bytes"].default == DEFAULT_MAX_REQUEST_BYTES == 4 << 20
    reason = r"^text: 4500000 bytes make the request one of 45\d+; at most 4194304 are sent \(grpc.max_send_message_length\)$"
    for method, arguments in {"generate": (LARGE,), "stream": (LARGE,), "score": (LARGE, "b")}.items():
        with pytest.raises(TooLarge, match=reason) as caught:
            call(method, *arguments, request_id="mine")
        assert isinstance(caught.value, errors.InvalidArgument)
        assert (caught.value.code, caught.value.request_id) == ("INVALID_ARGUMENT", "mine")
        with pytest.raises(TooLarge, match=r"^request: 45\d+ bytes; the server takes 4194304 at the most$") as caught:
            call(method, *arguments, options=UNLIMITED)
        assert (caught.value.code, caught.value.is_answer) == ("RESOURCE_EXHAUSTED", False)
    with pytest.raises(TooLarge, match=r"^target: 6000000 bytes make the request one of 60"):
        call("score", "a", "é" * 3_000_000)
    assert service.requests == [] and clock.waits == []
    size = ScoreRequest(text="a" * 98, target="b", request_id="r").ByteSize()
    options = {"options": {SEND_OPTION: size}}
    call("score", "a" * 98, "b", request_id="r", options=options)
    with pytest.raises(TooLarge, match=rf"^text: 99 bytes make the request one of {size + 1}; at most {size} are sent"):
        call("score", "a" * 99, "b", request_id="r", options=options)
    assert len(service.requests) == 1


def test_exhaustion_is_final_only_if_it_is_of_a_size(call, service, clock) -> None:
    reason = r"^request: its answer has \d+ bytes; this client takes 1000 at the most\. Ask for fewer"
    for method in ("generate", "stream"):
        with pytest.raises(TooLarge, match=reason) as caught:
            call(method, "x" * 2000, options=SMALL_ANSWERS)
        assert caught.value.is_answer
    assert len(service.requests) == 2
    words = ("grpc: received message larger than max (5 vs. 4)", "gRPC message exceeds maximum size 4: 5", "message too large")
    for message in words:
        service.script.append(lambda context, message=message: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
        with pytest.raises(TooLarge, match=r"^request: "):
            call("generate", "a")
    assert clock.waits == []
    for message in ("rate limit exceeded", "", "message queue is full"):
        service.script.append(lambda context, message=message: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
        assert call("generate", "a").text == "A"
    assert len(clock.waits) == 3


def kinds(outcomes: list) -> list[str]:
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    return ["OK" if outcome.error is None else type(outcome.error).__name__ for outcome in ordered]


@pytest.mark.parametrize("has_bulk", [True, False])
def test_a_message_over_the_limit_fails_alone_in_a_batch(call, service, clock, has_bulk: bool) -> None:
    service.has_bulk = has_bulk
    requests = [Request(text, request_id=f"r-{i}") for i, text in enumerate(["a", "b", LARGE, "d", LARGE + "x", "f", "g"])]
    for options in ({}, UNLIMITED):  # refused by the client or by the server
        outcomes = call("generate_batch", requests, options=options)
        assert kinds(outcomes) == ["OK", "OK", "TooLarge", "OK", "TooLarge", "OK", "OK"]
        refused = {outcome.error.request_id: outcome.error.message for outcome in outcomes if outcome.error is not None}
        reason = r"request: " if options else r"text: 450000. bytes .*at most 4194240 are sent"  # an id may become longer
        assert refused.keys() == {"r-2", "r-4"} and all(re.match(reason, message) for message in refused.values())
    requests = [Request(text) for text in ("a", "b", "x" * 2000, "d", "e")]
    assert kinds(call("generate_batch", requests, concurrency=1, options=SMALL_ANSWERS)) == ["OK", "OK", "TooLarge", "OK", "OK"]
    assert not any(clock.waits)
