"""Messages of several requests, and of several answers: taken apart and put together as bytes.

A bulk message is not parsed as a whole: that would refuse all of it for one request that cannot be read, and keep all of it for as
long as one of them is served.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.counted import BulkEnvelope
from dragoman.server.faces.grpc.reading import CANNOT_BE_PARSED, Refused, note_large

MAX_REQUESTS = 1024
# Bytes of a message of several requests: those that have not begun are kept as they came.
MAX_BYTES = 256 * 2**10
# Tag and length before a message of so many bytes together, at most.
HEAD_BYTES = 6
# `GenerateBulkRequest` and `GenerateBulkResponse` on the wire: messages in field 1, of which this one knows only the bytes.
_FIELD = FieldDescriptorProto(
    name="messages", number=1, label=FieldDescriptorProto.LABEL_REPEATED, type=FieldDescriptorProto.TYPE_BYTES
)
_FILE = FileDescriptorProto(name="dragoman/bulk.proto", message_type=[DescriptorProto(name="Bulk", field=[_FIELD])])
_Bulk: Any = message_factory.GetMessages([_FILE])["Bulk"]


class BulkRequest(BulkEnvelope):
    """The requests of one message, each parsed when it is taken."""

    __slots__ = ("_num_bytes", "_parse", "_parts")

    def __init__(self, parts: Iterable[bytes], parse: Callable[[bytes], Any]) -> None:
        """Hold requests as bytes; `parse` makes a message of one, or `Refused`."""
        self._parts = deque(parts)
        self._parse = parse
        self._num_bytes = sum(map(len, self._parts))

    def __len__(self) -> int:
        """Return the number of requests that are left."""
        return len(self._parts)

    def ByteSize(self) -> int:
        """Return the bytes of those that are left."""
        return self._num_bytes

    def take(self) -> Any:
        """Return the next one."""
        part = self._parts.popleft()
        self._num_bytes -= len(part)
        return self._parse(part)


def bulk_parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], BulkRequest | Refused]:
    """Return the parser of `GenerateBulkRequest`: `Refused` for one that is answered with an error as a whole.

    Args:
        parse: Parser of one request.
    """

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
    """Return the bytes of each message that a message has in field 1; other fields are left out.

    Raises:
        DecodeError: If it is no message.
        InvalidRequest: If there are more than `MAX_REQUESTS`, or several in more than `MAX_BYTES`.
    """
    too_large = InvalidRequest("requests", f"several in one message of more than {MAX_BYTES} bytes")
    is_large = len(data) > MAX_BYTES
    # Millions of empty messages would take long to parse: of large ones the first request must be almost all of it.
    if is_large and _first_length(data) < len(data) - MAX_BYTES:
        raise too_large
    parts: Sequence[bytes] = _Bulk.FromString(data).messages
    if len(parts) > MAX_REQUESTS:
        raise InvalidRequest("requests", f"more than {MAX_REQUESTS} in one message")
    if len(parts) > 1 and is_large:
        raise too_large
    return parts


def join(parts: Iterable[bytes]) -> bytes:
    """Return a message that has messages in field 1: a `GenerateBulkResponse` of serialised answers."""
    message: bytes = _Bulk(messages=parts).SerializeToString()
    return message


def _first_length(data: bytes) -> int:
    """Return the length of the message that comes first in field 1; 0 where something else does."""
    length = 0
    for shift, byte in enumerate(data[1:HEAD_BYTES] if data[0] == 0x0A else b""):
        length |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return length
    return 0
