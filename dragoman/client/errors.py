"""Errors of calls, one class for each gRPC status that callers treat differently, and their conversion from gRPC's."""

import re
from typing import Any, ClassVar, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo

from dragoman.client.connection_failures import explain
from dragoman.v1.generation_pb2 import Error

# Trailing metadata with `google.rpc.Status`: https://grpc.io/docs/guides/error/#richer-error-model
_DETAILS_KEY = "grpc-status-details-bin"
# gRPC's own words; those of its core, which Python, C++ and others share, say who refused what.
_SIZE = re.compile(
    r"(?P<side>CLIENT|SERVER): (?P<what>Received|Sent) message larger than max \((?P<size>\d+) vs\. (?P<limit>\d+)\)"
)
_LIKE_SIZE = re.compile(r"message (?:after decompression )?(?:is )?(?:larger than max|exceeds maximum|too large)", re.IGNORECASE)


class CallError(Exception):
    """A call failed; the string is the server's own message.

    Attributes:
        code: Name of the gRPC status.
        message: Description of the failure.
        request_id: Id of the request, as in the server's log; empty where the call had none.
        retry_after_seconds: When the server says that trying again makes sense; None where it does not say.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, request_id: str = "", retry_after_seconds: float | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds


class InvalidArgument(CallError):
    """A field of the request is missing, malformed or over its limit; the message names it."""

    default_code = "INVALID_ARGUMENT"


class TooLarge(InvalidArgument):
    """A request or its answer is larger than a message may be; trying again cannot help.

    Attributes:
        is_answer: Whether it is the answer.
        max_bytes: Largest message that is sent or taken; None where it is not known.
    """

    def __init__(
        self,
        message: str,
        request_id: str = "",
        code: str | None = None,
        *,
        is_answer: bool = False,
        max_bytes: float | None = None,
    ) -> None:
        super().__init__(message, request_id, code=code)
        self.is_answer = is_answer
        self.max_bytes = max_bytes


class ModelNotFound(CallError):
    """The server has no such model."""

    default_code = "NOT_FOUND"


class Overloaded(CallError):
    """The server's queue is full, or a limit of the caller's is used up; nothing was done."""

    default_code = "RESOURCE_EXHAUSTED"


class Unavailable(CallError):
    """The server cannot be reached, is draining, or the model's engine is starting; trying again is safe."""

    default_code = "UNAVAILABLE"


class DeadlineExceeded(CallError):
    """The call's time ran out before the answer was complete."""

    default_code = "DEADLINE_EXCEEDED"


class Cancelled(CallError):
    """The call was cancelled, here or by the server."""

    default_code = "CANCELLED"


class Unauthenticated(CallError):
    """The token is missing or wrong."""

    default_code = "UNAUTHENTICATED"


class PermissionDenied(CallError):
    """The token does not allow this."""

    default_code = "PERMISSION_DENIED"


class Unimplemented(CallError):
    """The server does not have this method: it is older than this client, or not Dragoman."""

    default_code = "UNIMPLEMENTED"


class InternalError(CallError):
    """The server failed, or broke its own rules; the message quotes an id that its log has too."""

    default_code = "INTERNAL"


_CLASSES: dict[str, type[CallError]] = {
    kind.default_code: kind
    for kind in (
        InvalidArgument,
        ModelNotFound,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Unauthenticated,
        PermissionDenied,
        Unimplemented,
        InternalError,
    )
}
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class FailedCall(Protocol):
    """Interface common to the errors of grpc and grpc.aio."""

    def code(self) -> grpc.StatusCode:
        """Return the status."""

    def details(self) -> str | None:
        """Return the server's message."""

    def trailing_metadata(self) -> Any:
        """Return what came with the status: pairs of a name and a value, or None."""


def from_rpc_error(error: FailedCall, request_id: str = "", target: str = "") -> CallError:
    """Return the error for a failed call of grpc or grpc.aio, by its status; a plain `CallError` for an unknown one."""
    code, message = error.code(), error.details()
    status = _status_of(error)
    if code is grpc.StatusCode.UNAVAILABLE and message and status is None:
        message = explain(message, target) or message
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and message and status is None and (too_large := _too_large(message, request_id)):
        return too_large
    return _make(code.name, message, request_id, status)


def _too_large(details: str, request_id: str) -> TooLarge | None:
    """Return the error for what gRPC, here or there, says of a message's size; None for anything else.

    gRPC has one status for this, for quotas and for full queues, and a proxy between may send it without any detail: what does not
    speak of a size may go away, and is tried again.
    """
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.name
    if (found := _SIZE.search(details)) is None:
        return TooLarge(f"request: {details}", request_id, code) if _LIKE_SIZE.search(details) else None
    size, limit = int(found["size"]), int(found["limit"])
    is_here = found["side"] == "CLIENT"
    is_answer = is_here == (found["what"] == "Received")
    who = "this client" if is_here else "the server"
    verb = "takes" if found["what"] == "Received" else "sends"
    what = f"its answer has {size} bytes" if is_answer else f"{size} bytes"
    hint = ". Ask for fewer answers, tokens or details" if is_answer else ""
    message = f"request: {what}; {who} {verb} {limit} at the most{hint}"
    return TooLarge(message, request_id, code, is_answer=is_answer, max_bytes=limit)


def _status_of(error: FailedCall) -> Error | None:
    """Read the status that came behind an answer; one that is malformed or contradicts what the call ended with counts as none."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                status = Error.FromString(value)
            except DecodeError:
                return None
            return status if (status.code, status.message) == (error.code().value[0], error.details()) else None
    return None


def from_status(status: Error, request_id: str = "") -> CallError:
    """Turn the contract's `Error` into the error that a call which failed with it would raise."""
    return _make(_NAMES.get(status.code, "UNKNOWN"), status.message, request_id, status)


def _make(name: str, message: str | None, request_id: str, status: Error | None) -> CallError:
    message = message or f"the server gave no reason ({name})"
    return _CLASSES.get(name, CallError)(message, request_id, _retry_after_seconds(status), name)


def _retry_after_seconds(status: Error | None) -> float | None:
    """Read google.rpc.RetryInfo; one that is malformed counts as none."""
    try:
        for detail in status.details if status is not None else ():
            info = RetryInfo()
            if detail.Unpack(info):
                seconds: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                return max(0.0, seconds)
    except (ValueError, DecodeError):
        return None
    return None
