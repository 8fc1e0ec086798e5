"""Request parsers: unreadable messages become `Refused`, and large ones keep only the text that a model could use.

gRPC assembles a message before parsing, and keeps its bytes as long as the call runs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError, Message

from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.protocols.bulk import BulkEnvelope, both_ends
from dragoman.server.service.context import check_request_id
from dragoman.server.service.in_flight import LARGE_BYTES
from dragoman.server.service.requests import check_length, check_num_suppressed
from dragoman.server.service.terms import check_counts

CANNOT_BE_PARSED = "cannot be parsed; is every string UTF-8?"
# Size of the last large message read in the current task; 0 for none.
large_bytes_read: ContextVar[int] = ContextVar("large_bytes_read", default=0)
MAX_REQUESTS = 1024
# Limit of a message of several requests, which are kept serialised until they begin.
MAX_BYTES = 256 * 2**10
# Tag and length of an embedded message, at most.
HEAD_BYTES = 6
# `GenerateBulkRequest` and `GenerateBulkResponse` with the messages in field 1 as bytes: if parsed at once, one unreadable request
# would refuse all, and one in progress would keep all.
_FIELD = FieldDescriptorProto(
    name="messages", number=1, label=FieldDescriptorProto.LABEL_REPEATED, type=FieldDescriptorProto.TYPE_BYTES
)
_FILE = FileDescriptorProto(name="dragoman/bulk.proto", message_type=[DescriptorProto(name="Bulk", field=[_FIELD])])
_Bulk: Any = message_factory.GetMessages([_FILE])["Bulk"]
# Checks of fields that are kept whole, the id first; other texts are cut.
CHECKS: dict[str, Callable[[Any], object]] = {
    "request_id": partial(check_request_id, "request_id"),
    **{name: partial(check_length, name) for name in ("model", "model_version", "source_language", "target_language")},
    "suppressed_tokens": lambda values: check_num_suppressed(len(values)),
    "terms": check_counts,
}


class Refused:
    """Replaces a message refused while it is read; `request_id` is empty if missing or invalid."""

    def __init__(self, error: ServiceError, request_id: str = "") -> None:
        self.error = error
        self.request_id = request_id

    def ByteSize(self) -> int:
        """Return 0: nothing of the message is kept."""
        return 0


def parser(parse: Callable[[bytes], Any], max_characters: Callable[[], int]) -> Callable[[bytes], Any]:
    """Return a parser that returns `Refused` if `parse` fails; gRPC itself would answer `UNKNOWN` without a reason."""

    def parse_or_refuse(data: bytes) -> Any:
        is_large = note_large(data)
        try:
            message = parse(data)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        return _cut(message, max_characters()) if is_large else message

    return parse_or_refuse


def note_large(data: bytes) -> bool:
    """Return whether a message is large; if so, set `large_bytes_read`."""
    is_large = len(data) > LARGE_BYTES
    if is_large:
        large_bytes_read.set(len(data))
    return is_large


def _cut(message: Message, max_characters: int) -> Message | Refused:
    """Return a message with texts cut to what a model could use, without unknown fields."""
    values = {field.name: value for field, value in message.ListFields()}
    request_id = ""
    try:
        for name, check in CHECKS.items():
            if name in values:
                check(values[name])
                request_id = values.get("request_id", "")
    except InvalidRequest as error:
        return Refused(error.with_traceback(None), request_id)  # its frames would keep the message
    cut = {name: both_ends(value, max_characters) if isinstance(value, str) else value for name, value in values.items()}
    return type(message)(**cut)


class BulkRequest(BulkEnvelope):
    """The requests of one message, kept as bytes; `parse` converts each when it is taken."""

    __slots__ = ("_num_bytes", "_parse", "_parts")

    def __init__(self, parts: Iterable[bytes], parse: Callable[[bytes], Any]) -> None:
        self._parts = deque(parts)
        self._parse = parse
        self._num_bytes = sum(map(len, self._parts))

    def __len__(self) -> int:
        """Return the number of remaining requests."""
        return len(self._parts)

    def ByteSize(self) -> int:
        """Return the size of the remaining requests."""
        return self._num_bytes

    def take(self) -> Any:
        """Remove, parse and return the next request."""
        part = self._parts.popleft()
        self._num_bytes -= len(part)
        return self._parse(part)


def bulk_parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], BulkRequest | Refused]:
    """Return a parser of `GenerateBulkRequest`, `Refused` if it is invalid as a whole; `parse` parses one request."""

    def parse_bulk(data: bytes) -> BulkRequest | Refused:
        note_large(data)
        try:
            return BulkRequest(split(data), parse)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        except InvalidRequest as error:
            return Refused(error.with_traceback(None))

    return parse_bulk


def split(data: bytes) -> Sequence[bytes]:
    """Return the messages in field 1 of a message as bytes.

    Raises:
        DecodeError: If it is malformed.
        InvalidRequest: If there are more than `MAX_REQUESTS`, or several in more than `MAX_BYTES`.
    """
    too_large = InvalidRequest("requests", f"several in one message of more than {MAX_BYTES} bytes")
    is_large = len(data) > MAX_BYTES
    # Parsing millions of empty messages takes long, so a large message must consist mostly of its first request.
    if is_large and _first_length(data) < len(data) - MAX_BYTES:
        raise too_large
    parts: Sequence[bytes] = _Bulk.FromString(data).messages
    if len(parts) > MAX_REQUESTS:
        raise InvalidRequest("requests", f"more than {MAX_REQUESTS} in one message")
    if len(parts) > 1 and is_large:
        raise too_large
    return parts


def join(parts: Iterable[bytes]) -> bytes:
    """Return a `GenerateBulkResponse` of serialised answers."""
    message: bytes = _Bulk(messages=parts).SerializeToString()
    return message


def _first_length(data: bytes) -> int:
    """Return the length of the first message in field 1; 0 if other data comes first."""
    length = 0
    for shift, byte in enumerate(data[1:HEAD_BYTES] if data[0] == 0x0A else b""):
        length |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return length
    return 0
