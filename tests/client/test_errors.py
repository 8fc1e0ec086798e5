import pickle

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from dragoman.client.errors import CallError, Overloaded, Unavailable, from_rpc_error, from_status
from dragoman.v1.generation_pb2 import Error

KEY = "grpc-status-details-bin"


def failed(code: grpc.StatusCode, details: str, *trailers: tuple[str, bytes]) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers), details)


def status_with(*details: object, code: int = 14, message: str = "gone") -> bytes:
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status.SerializeToString()


def test_retry_info_is_found_among_other_details() -> None:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.nanos = 50_000_000
    trailer = (KEY, status_with(error_details_pb2.DebugInfo(detail="x"), info))
    error = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", ("other", b"x"), trailer), "r-1")
    assert type(error) is Unavailable
    assert (error.retry_after_seconds, error.request_id) == (0.05, "r-1")


def test_negative_delay_is_no_delay() -> None:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds = -3
    error = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", (KEY, status_with(info))))
    assert error.retry_after_seconds == 0.0


@pytest.mark.parametrize(
    "trailer",
    [b"\xff\xff not protobuf", status_with(code=8), status_with(message="something else"), status_with()],
    ids=["garbage", "other code", "other message", "no details"],
)
def test_details_that_cannot_be_trusted_count_as_none(trailer: bytes) -> None:
    error = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", (KEY, trailer)))
    assert type(error) is Unavailable
    assert (error.message, error.retry_after_seconds) == ("gone", None)


def test_retry_info_that_is_garbage_counts_as_none() -> None:
    status = status_pb2.Status(code=14, message="gone")
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    error = from_rpc_error(failed(grpc.StatusCode.UNAVAILABLE, "gone", (KEY, status.SerializeToString())))
    assert error.retry_after_seconds is None


def test_errors_survive_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(Overloaded("full", "r-1", 0.5)))
    assert type(error) is Overloaded
    assert (str(error), error.request_id, error.retry_after_seconds, error.code) == ("full", "r-1", 0.5, "RESOURCE_EXHAUSTED")


def test_status_without_a_class_of_its_own_keeps_its_name() -> None:
    error = from_rpc_error(failed(grpc.StatusCode.DATA_LOSS, "lost"))
    assert type(error) is CallError
    assert error.code == "DATA_LOSS"


@pytest.mark.parametrize(("code", "name"), [(8, "RESOURCE_EXHAUSTED"), (15, "DATA_LOSS"), (99, "UNKNOWN")])
def test_status_message_becomes_the_error_that_a_call_would_raise(code: int, name: str) -> None:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds = 2
    error = from_status(Error.FromString(status_with(info, code=code, message="full")), "r-1")
    assert (type(error) is Overloaded, error.code) == (name == "RESOURCE_EXHAUSTED", name)
    assert (error.message, error.retry_after_seconds, error.request_id) == ("full", 2.0, "r-1")


def test_status_message_without_a_reason_says_so() -> None:
    assert from_status(Error(code=13)).message == "the server gave no reason (INTERNAL)"
