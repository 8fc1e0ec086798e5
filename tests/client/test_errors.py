"""Errors of calls: the exception of each status, its attributes, and messages that are larger than they may be."""

import pickle
import re

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from dragoman.client import errors
from dragoman.client.errors import CallError, Overloaded, TooLarge, Unavailable, from_rpc_error, from_status
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.sizes import DEFAULT_MAX_REQUEST_BYTES, SEND_OPTION
from dragoman.server.config import ServerConfig
from dragoman.v1.generation_pb2 import Error, ScoreRequest
from tests.client.fake_server import failing

KEY = "grpc-status-details-bin"
ONCE = {"retry": RetryPolicy(max_attempts=1)}
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


@pytest.mark.parametrize(("code", "kind_of_error"), CLASSES.items())
def test_each_status_has_its_error(call, service, code: str, kind_of_error: type) -> None:
    for method, arguments in {"generate": "x", "stream": "x", "score": "xy"}.items():
        service.script.append(failing(code, "text: ist länger"))
        with pytest.raises(CallError) as caught:
            call(method, *arguments, request_id="r-9", options=ONCE)
        error = caught.value
        assert type(error) is kind_of_error
        assert (str(error), error.message, error.code) == ("text: ist länger", "text: ist länger", code)
        assert (error.request_id, error.retry_after_seconds) == ("r-9", None)
        assert f"StatusCode.{code}" in repr(error.__cause__)


def test_an_error_has_the_servers_delay_or_says_that_no_reason_was_given(call, service) -> None:
    service.script.append(failing("RESOURCE_EXHAUSTED", "queue: full", retry_after=(1, 250_000_000)))
    with pytest.raises(Overloaded) as caught:
        call("generate", "x", options=ONCE)
    assert caught.value.retry_after_seconds == 1.25
    service.script.append(failing("INTERNAL", ""))
    with pytest.raises(errors.InternalError, match=r"gave no reason \(INTERNAL\)"):
        call("generate", "x")


def status_with(*details: object, code: int = 14, message: str = "gone") -> bytes:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status.SerializeToString()


def retry_info(seconds: int, nanos: int = 0) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = seconds, nanos
    return info


GARBAGE = status_pb2.Status(code=14, message="gone")
GARBAGE.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")


@pytest.mark.parametrize(
    ("trailers", "seconds"),
    [
        ([("other", b"x"), (KEY, status_with(error_details_pb2.DebugInfo(detail="x"), retry_info(2, 50_000_000)))], 2.05),
        ([(KEY, status_with(retry_info(-3)))], 0.0),
        ([(KEY, status_with(retry_info(3), code=8))], None),
        ([(KEY, status_with(retry_info(3), message="something else"))], None),
        ([(KEY, status_with())], None),
        ([(KEY, b"\xff\xff not protobuf")], None),
        ([(KEY, GARBAGE.SerializeToString())], None),
        ([], None),
    ],
)
def test_a_delay_is_read_from_details_that_agree_with_the_status(trailers: list, seconds: float | None) -> None:
    failure = aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(*trailers), "gone")
    error = from_rpc_error(failure, "r-1")
    assert type(error) is Unavailable
    assert (error.message, error.request_id, error.retry_after_seconds) == ("gone", "r-1", seconds)


def test_a_status_of_a_batch_is_the_error_of_a_call() -> None:
    for code, kind, name in ((8, Overloaded, "RESOURCE_EXHAUSTED"), (15, CallError, "DATA_LOSS"), (99, CallError, "UNKNOWN")):
        error = from_status(Error.FromString(status_with(retry_info(2), code=code, message="full")), "r-1")
        assert (type(error), error.code, error.message) == (kind, name, "full")
        assert (error.retry_after_seconds, error.request_id) == (2.0, "r-1")
    assert from_status(Error(code=13)).message == "the server gave no reason (INTERNAL)"


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(Overloaded("full", "r-1", 0.5)))
    assert type(error) is Overloaded
    assert (str(error), error.request_id, error.retry_after_seconds, error.code) == ("full", "r-1", 0.5, "RESOURCE_EXHAUSTED")


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


def test_the_limit_on_requests_is_exact(call, service) -> None:
    size = ScoreRequest(text="a" * 98, target="b", request_id="r").ByteSize()
    options = {"options": {SEND_OPTION: size}}
    call("score", "a" * 98, "b", request_id="r", options=options)
    with pytest.raises(TooLarge, match=rf"^text: 99 bytes make the request one of {size + 1}; at most {size} are sent"):
        call("score", "a" * 99, "b", request_id="r", options=options)
    assert len(service.requests) == 1


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_an_answer_over_the_limit_is_not_asked_for_again(call, service, clock, method: str) -> None:
    reason = r"^request: its answer has \d+ bytes; this client takes 1000 at the most\. Ask for fewer"
    with pytest.raises(TooLarge, match=reason) as caught:
        call(method, "x" * 2000, options=SMALL_ANSWERS)
    assert caught.value.is_answer
    assert len(service.requests) == 1 and clock.waits == []


@pytest.mark.parametrize(
    ("message", "is_of_size"),
    [
        ("rate limit exceeded", False),
        ("", False),
        ("message queue is full", False),
        ("grpc: received message larger than max (5 vs. 4)", True),
        ("gRPC message exceeds maximum size 4: 5", True),
        ("message too large", True),
    ],
)
def test_exhaustion_is_final_only_if_it_is_of_a_size(call, service, clock, message: str, is_of_size: bool) -> None:
    service.script.append(lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
    if is_of_size:
        with pytest.raises(TooLarge, match=r"^request: "):
            call("generate", "a")
    else:
        assert call("generate", "a").text == "A"
    assert len(clock.waits) == (not is_of_size)


def kinds(outcomes: list) -> list[str]:
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    return ["OK" if outcome.error is None else type(outcome.error).__name__ for outcome in ordered]


@pytest.mark.parametrize("has_bulk", [True, False])
@pytest.mark.parametrize("options", [{}, UNLIMITED], ids=["refused here", "refused by the server"])
def test_a_request_over_the_limit_fails_alone_in_a_batch(call, service, clock, options: dict, has_bulk: bool) -> None:
    service.has_bulk = has_bulk
    texts = ["a", "b", LARGE, "d", LARGE + "x", "f", "g"]
    outcomes = call("generate_batch", [Request(text, request_id=f"r-{i}") for i, text in enumerate(texts)], options=options)
    assert kinds(outcomes) == ["OK", "OK", "TooLarge", "OK", "TooLarge", "OK", "OK"]
    refused = {outcome.error.request_id: outcome.error.message for outcome in outcomes if outcome.error is not None}
    reason = r"request: " if options else r"text: 450000. bytes .*at most 4194240 are sent"  # an id may become longer
    assert refused.keys() == {"r-2", "r-4"} and all(re.match(reason, message) for message in refused.values())
    assert not any(clock.waits)


@pytest.mark.parametrize("has_bulk", [True, False])
def test_an_answer_over_the_limit_fails_alone_in_a_batch(call, service, clock, has_bulk: bool) -> None:
    service.has_bulk = has_bulk
    requests = [Request(text) for text in ("a", "b", "x" * 2000, "d", "e")]
    assert kinds(call("generate_batch", requests, concurrency=1, options=SMALL_ANSWERS)) == ["OK", "OK", "TooLarge", "OK", "OK"]
    assert not any(clock.waits)
