"""Errors as the contract's `Error`: the one place where they become messages. Internal text stays in the log."""

import math

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo

from dragoman.server.errors import ServiceError
from dragoman.v1.generation_pb2 import Error

# A status travels in HTTP/2 headers, twice, and long ones are refused on the way; a caller's own text may be quoted in it.
MAX_MESSAGE_BYTES = 1024


def number_of(code: str) -> int:
    """Return the number of a status, one of `google.rpc.Code`, by its name."""
    number: int = Code.Value(code)
    return number


def to_message(error: ServiceError, request_id: str = "") -> Error:
    """Return an error as the contract's `Error`, which is read as `google.rpc.Status` too.

    Its details hold `google.rpc.RetryInfo`, rounded up to milliseconds, where trying again makes sense, and
    `google.rpc.RequestInfo` where the request has an id; `retry_after_seconds` says what RetryInfo does.
    """
    status = Error(code=number_of(error.code), message=_shorten(error.message))
    if error.retry_after_seconds is not None:
        milliseconds = max(1, math.ceil(round(error.retry_after_seconds * 1000, 6)))
        delay = Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        status.details.append(_pack(RetryInfo(retry_delay=delay)))
        status.retry_after_seconds = milliseconds / 1000
    if request_id:
        status.details.append(_pack(RequestInfo(request_id=request_id)))
    return status


def _pack(message: RetryInfo | RequestInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _shorten(message: str) -> str:
    encoded = message.encode(errors="backslashreplace")  # the name of a file may be no text
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
