import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from dragoman.server.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    ServiceError,
    StepFailed,
    Unauthenticated,
    Unavailable,
    UnexpectedFault,
    UnknownModel,
)
from dragoman.server.faces.grpc import errors
from dragoman.server.faces.v1.status import MAX_MESSAGE_BYTES, to_message
from dragoman.v1.generation_pb2 import Error


def details(status: grpc.Status) -> Status:
    [(_, value)] = status.trailing_metadata
    return Status.FromString(value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("text", "is blank"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownModel("a", ["b"]), grpc.StatusCode.NOT_FOUND),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (Cancelled("gone"), grpc.StatusCode.CANCELLED),
        (QueueFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("down"), grpc.StatusCode.UNAVAILABLE),
        (StepFailed("broken"), grpc.StatusCode.INTERNAL),
        (UnexpectedFault("cafe"), grpc.StatusCode.INTERNAL),
        (Unauthenticated("who"), grpc.StatusCode.UNAUTHENTICATED),
        (ServiceError("what"), grpc.StatusCode.UNKNOWN),
    ],
)
def test_each_error_has_its_status(error: ServiceError, code: grpc.StatusCode) -> None:
    status = errors.to_status(error)
    assert status.code is code
    assert status.details == error.message


def test_the_name_of_a_file_may_be_no_text() -> None:
    assert errors.to_status(Unavailable("mod\udcff é: cannot be read")).details == r"mod\udcff é: cannot be read"


def test_only_errors_worth_retrying_have_retry_info() -> None:
    [detail] = details(errors.to_status(Unavailable("down", retry_after_seconds=2.5))).details
    retry = RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert not details(errors.to_status(Unavailable("down"))).details


def test_an_error_is_read_as_googles_status_and_back() -> None:
    error = to_message(QueueFull("full", retry_after_seconds=0.0125), "r-1")
    status = Status.FromString(error.SerializeToString())
    assert (status.code, status.message) == (8, "full") == (error.code, error.message)
    retry, request = RetryInfo(), RequestInfo()
    assert status.details[0].Unpack(retry) and status.details[1].Unpack(request)
    assert (retry.retry_delay.ToMilliseconds(), request.request_id) == (13, "r-1")
    assert Error.FromString(status.SerializeToString()) == error, "a proxy that reads a Status hands on what it does not know"
    clean = Status(code=status.code, message=status.message, details=status.details)
    error.ClearField("retry_after_seconds")
    assert Error.FromString(clean.SerializeToString()) == error, "an older server's error"


def test_time_to_retry_is_said_in_plain_seconds_where_there_is_one() -> None:
    error = Error.FromString(errors.to_status(Unavailable("down", retry_after_seconds=2.5)).trailing_metadata[0][1])
    assert (error.code, error.message, error.retry_after_seconds) == (14, "down", 2.5)
    assert not to_message(Unavailable("down")).HasField("retry_after_seconds")


@pytest.mark.parametrize("character", ["a", "é", "語", "🐕"])
def test_long_message_is_shortened_to_what_headers_carry(character: str) -> None:
    message = "x" + character * 5000
    shortened = errors.to_status(InvalidRequest("text", message)).details
    assert shortened.endswith("...")
    assert f"text: {message}".startswith(shortened.removesuffix("..."))
    assert MAX_MESSAGE_BYTES - 4 < len(shortened.removesuffix("...").encode()) <= MAX_MESSAGE_BYTES
