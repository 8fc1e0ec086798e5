import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
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


def test_only_errors_worth_retrying_have_retry_info() -> None:
    [detail] = details(errors.to_status(Unavailable("down", retry_after_seconds=2.5))).details
    retry = RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert not details(errors.to_status(Unavailable("down"))).details


@pytest.mark.parametrize("character", ["a", "é", "語", "🐕"])
def test_long_message_is_shortened_to_what_headers_carry(character: str) -> None:
    message = "x" + character * 5000
    shortened = errors.to_status(InvalidRequest("text", message)).details
    assert shortened.endswith("...")
    assert f"text: {message}".startswith(shortened.removesuffix("..."))
    assert errors.MAX_MESSAGE_BYTES - 4 < len(shortened.removesuffix("...").encode()) <= errors.MAX_MESSAGE_BYTES
