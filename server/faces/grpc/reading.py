"""How requests are read: what cannot be is refused in its place, and of a large one only what a model could use is kept.

gRPC puts a message together before it gives it to us, and for as long as a call runs it keeps what it was given.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from google.protobuf.message import DecodeError, Message

from dragoman.server.core.frames import check_language
from dragoman.server.core.ids import check_request_id
from dragoman.server.core.search_options import check_num_suppressed
from dragoman.server.core.validation import check_model_name, check_model_version
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.faces.large_requests import both_ends
from dragoman.server.service.in_flight import LARGE_BYTES

CANNOT_BE_PARSED = "cannot be parsed; is every string UTF-8?"
# Bytes of the last large message that came in the task at hand; 0 for none.
large_bytes_read: ContextVar[int] = ContextVar("large_bytes_read", default=0)
# What is checked of a field before its value is kept, the id first; every other text is cut to what a model could use.
CHECKS: dict[str, Callable[[Any], object]] = {
    "request_id": lambda value: check_request_id("request_id", value),
    "model": check_model_name,
    "model_version": check_model_version,
    "suppressed_tokens": lambda values: check_num_suppressed(len(values)),
    "source_language": lambda value: check_language("source_language", value),
    "target_language": lambda value: check_language("target_language", value),
}


class Refused:
    """Stands for a request message that is refused as it is read.

    Attributes:
        error: Why.
        request_id: Its id, if it has one that is fit; else empty.
    """

    def __init__(self, error: ServiceError, request_id: str = "") -> None:
        self.error = error
        self.request_id = request_id

    def ByteSize(self) -> int:
        """Return the bytes of it that are kept."""
        return 0


def reader(deserialise: Callable[[bytes], Any], max_characters: Callable[[], int]) -> Callable[[bytes], Any]:
    """Return what reads a message: as `deserialise` does, but `Refused` for one that is to be answered with an error.

    gRPC itself would answer `UNKNOWN`, without a reason, to one that cannot be parsed.

    Args:
        deserialise: Makes a message of bytes.
        max_characters: Says how many characters of a text a model could use.
    """

    def read(data: bytes) -> Any:
        is_large = note_large(data)
        try:
            message = deserialise(data)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        return _slimmed(message, max_characters()) if is_large else message

    return read


def note_large(data: bytes) -> bool:
    """Return whether a message is large; one that is, the task at hand will know of."""
    is_large = len(data) > LARGE_BYTES
    if is_large:
        large_bytes_read.set(len(data))
    return is_large


def _slimmed(message: Message, max_characters: int) -> Message | Refused:
    """Return a message with what a model could use of it, and without fields that we do not know, or why it is refused."""
    values = {field.name: value for field, value in message.ListFields()}
    request_id = ""
    try:
        for name, check in CHECKS.items():
            if name in values:
                check(values[name])
                request_id = values.get("request_id", "")
    except InvalidRequest as error:
        return Refused(error.with_traceback(None), request_id)  # whose frames have all of the message
    cut = {name: both_ends(value, max_characters) if isinstance(value, str) else value for name, value in values.items()}
    return type(message)(**cut)
