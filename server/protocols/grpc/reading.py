"""Reading of gRPC requests: large messages are cut, bulk messages are divided."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError, Message

from dragoman.server.errors import InvalidRequest, QueueFull, ServiceError
from dragoman.server.protocols.several_requests import LARGE_BYTES, Counted, both_ends
from dragoman.server.service.ids import check_request_id
from dragoman.server.service.languages import check_language
from dragoman.server.service.outcomes import RETRY_SECONDS
from dragoman.server.service.search_options import check_num_suppressed
from dragoman.server.service.validation import check_model_name, check_model_version

# Large messages that are put together at once for one connection, and how long one is waited for before another may come too.
READS_AT_ONCE = 8
READ_SECONDS = 0.25

# Messages of unary calls that come at once on one connection, and how long one may take while another waits for its place.
ARRIVALS_AT_ONCE = 16
ARRIVAL_SECONDS = 5.0

Value = TypeVar("Value")
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


class Turns:
    """The turns of a connection's streams at reading messages that may be large."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(READS_AT_ONCE)

    async def take(self, reading: Awaitable[Value]) -> Value:
        """Return what is read, when it is its turn; after `READ_SECONDS` another may begin: the caller has nothing to send."""
        await self._free.acquire()
        is_stand_in = True

        def give() -> None:
            nonlocal is_stand_in
            if is_stand_in:
                is_stand_in = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(READ_SECONDS, give)
        try:
            return await reading
        finally:
            timer.cancel()
            give()


class OfConnections(Generic[Value]):
    """One object for each connection, as long as somebody has it."""

    def __init__(self, make: Callable[[], Value]) -> None:
        """Make them so."""
        self._make = make
        self._made: WeakValueDictionary[str, Value] = WeakValueDictionary()

    def of(self, peer: str) -> Value:
        """Return that of a connection, by its address."""
        found = self._made.get(peer)
        if found is None:
            found = self._made[peer] = self._make()
        return found


class Arrivals:
    """The messages of one connection's unary calls that have not come whole.

    gRPC keeps what has come of each, which may be all but a byte, so there is a bound to how many it asks for. A small one is there
    with its call and takes no time; the others wait for a place, and who takes too long meanwhile loses his.
    """

    # Most calls make one, as no other is under way on their connection.
    __slots__ = ("__weakref__", "_coming", "_ended", "_timer", "_waiting")

    def __init__(self) -> None:
        self._coming: dict[asyncio.Task[Any], float] = {}  # since when, the oldest first
        self._ended: list[asyncio.Task[Any]] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, reading: Callable[[], Awaitable[Value]]) -> Value | Refused:
        """Return what is read, in the task at hand; `Refused` if it takes too long while others wait."""
        if len(self._coming) >= ARRIVALS_AT_ONCE:
            await self._place()
        task = asyncio.current_task()
        assert task is not None
        self._coming[task] = asyncio.get_running_loop().time()
        try:
            return await reading()
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel():
                raise
            reason = f"request: it did not come within {ARRIVAL_SECONDS:g} s, and others wait"
            return Refused(QueueFull(reason, retry_after_seconds=RETRY_SECONDS))
        finally:
            del self._coming[task]
            if task in self._ended:
                self._ended.remove(task)
            if self._waiting:
                self._wake()

    async def _place(self) -> None:
        """Wait for a place, behind those who wait already."""
        while len(self._coming) >= ARRIVALS_AT_ONCE:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._watch()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()  # another may have the place
                raise
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.pop(0)
            if not turn.done():
                turn.set_result(None)
                return

    def _watch(self) -> None:
        """End the oldest when its time is over, as long as somebody waits."""
        if self._timer is None:
            began = next((since for task, since in self._coming.items() if task not in self._ended), None)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at((loop.time() if began is None else began) + ARRIVAL_SECONDS, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        latest = asyncio.get_running_loop().time() - ARRIVAL_SECONDS
        late = [task for task, since in self._coming.items() if since <= latest and task not in self._ended]
        for task in late[: len(self._waiting)]:
            self._ended.append(task)
            task.cancel()
        self._watch()


MAX_REQUESTS = 1024
# Fields of a message, those that we do not know among them: each is looked at while everybody waits.
MAX_FIELDS = 2 * MAX_REQUESTS
# Bytes of a message of several: those that wait for their turn in it are kept as they came.
MAX_BYTES = 256 * 2**10
# Field 1 of `GenerateBulkRequest` and of `GenerateBulkResponse`: a message, with its length before it.
_TAG = 0x0A
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
