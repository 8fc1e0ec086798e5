"""Several requests in a message, and several answers: taken apart and put together as bytes.

A message of several is not parsed as a whole: that would refuse all of it for one request that cannot be read, and keep all of it
for as long as one of them is served.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import DecodeError

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.counted import Counted
from dragoman.server.faces.grpc.reading import CANNOT_BE_PARSED, Refused, note_large

MAX_REQUESTS = 1024
# Fields of a message, those that we do not know among them: each is looked at while everybody waits.
MAX_FIELDS = 2 * MAX_REQUESTS
# Bytes of a message of several: those that wait for their turn in it are kept as they came.
MAX_BYTES = 256 * 2**10
# Field 1 of `GenerateBulkRequest` and of `GenerateBulkResponse`: a message, with its length before it.
_TAG = 0x0A
# Tag and length before a message, at most.
HEAD_BYTES = 6
# What the other types of the wire format take, where it is always the same: https://protobuf.dev/programming-guides/encoding/
_FIXED_BYTES = {1: 8, 5: 4}


class Several(Counted):
    """The requests of one message, each read when it is taken."""

    __slots__ = ("_num_bytes", "_parts", "_read")

    def __init__(self, parts: Iterable[bytes], read: Callable[[bytes], Any]) -> None:
        """Hold requests.

        Args:
            parts: The bytes of each.
            read: Makes a message of them, or `Refused`.
        """
        self._parts = deque(parts)
        self._read = read
        self._num_bytes = sum(map(len, self._parts))

    def __len__(self) -> int:
        """Return how many are left."""
        return len(self._parts)

    def ByteSize(self) -> int:
        """Return the bytes of those that are left."""
        return self._num_bytes

    def take(self) -> Any:
        """Return the next one."""
        part = self._parts.popleft()
        self._num_bytes -= len(part)
        return self._read(part)


def reader_of_several(read: Callable[[bytes], Any]) -> Callable[[bytes], "Several | Refused"]:
    """Return what reads a `GenerateBulkRequest`: `Refused` for one that is to be answered with an error as a whole.

    Args:
        read: Reads one request.
    """

    def read_several(data: bytes) -> Several | Refused:
        note_large(data)
        try:
            return Several(take_apart(data), read)
        except DecodeError:
            return Refused(InvalidRequest("request", CANNOT_BE_PARSED))
        except InvalidRequest as error:
            return Refused(error.with_traceback(None))

    return read_several


def take_apart(data: bytes) -> list[bytes]:
    """Return the bytes of each message that a message has in field 1; fields that we do not know are left out.

    Raises:
        DecodeError: If it is no message.
        InvalidRequest: If there are more than `MAX_REQUESTS`, or more than `MAX_FIELDS` of any kind, or several in more than
            `MAX_BYTES`.
    """
    parts: list[bytes] = []
    position, end, num_fields = 0, len(data), 0
    while position < end:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise InvalidRequest("request", f"more than {MAX_FIELDS} fields in one message")
        tag, position = _varint(data, position)
        kind = tag & 7
        if tag < 8:
            raise DecodeError("there is no field 0")
        if kind == 0:
            _, position = _varint(data, position)
            continue
        length = _FIXED_BYTES.get(kind)
        if length is None:
            if kind != 2:
                raise DecodeError("groups are not of this version of the wire format")
            length, position = _varint(data, position)
        if position + length > end:
            raise DecodeError("a field ends behind the message")
        if tag == _TAG:
            if len(parts) == MAX_REQUESTS:
                raise InvalidRequest("requests", f"more than {MAX_REQUESTS} in one message")
            parts.append(data[position : position + length])
        position += length
    if len(parts) > 1 and end > MAX_BYTES:
        raise InvalidRequest("requests", f"several in one message of more than {MAX_BYTES} bytes")
    return parts


def put_together(parts: Iterable[bytes]) -> bytes:
    """Return a message that has messages in field 1: a `GenerateBulkResponse` of serialised answers."""
    pieces: list[bytes] = []
    for part in parts:
        head = bytearray((_TAG,))
        length = len(part)
        while length > 0x7F:
            head.append(length & 0x7F | 0x80)
            length >>= 7
        head.append(length)
        pieces += (bytes(head), part)
    return b"".join(pieces)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a place, and where it ends.

    Raises:
        DecodeError: If there is none, or it has more than 64 bits.
    """
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise DecodeError("a number does not end")
