"""How requests are read: what cannot be is refused in its place, and of a large one only what a model could use is kept.

gRPC puts a message together before it gives it to us, and for as long as a call runs it keeps what it was given.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError, Message

from dragoman.server.core.endings import RETRY_SECONDS
from dragoman.server.core.ids import check_request_id
from dragoman.server.core.search_options import check_num_suppressed
from dragoman.server.core.validation import check_model_name
from dragoman.server.errors import InvalidRequest, QueueFull, ServiceError

# No request of this size is looked at; hardly one that a model can answer is larger.
LARGE_BYTES = 64 * 2**10
# Large messages that are put together at once for one connection, and how long one is waited for before another may come too.
READS_AT_ONCE = 2
READ_SECONDS = 1.0

Value = TypeVar("Value")
# Of large unary requests under way: gRPC keeps the bytes of each until its call ends.
MAX_LARGE_BYTES = 32 * 2**20
# Bytes of the last large message that came in the task at hand; 0 for none.
large_bytes_read: ContextVar[int] = ContextVar("large_bytes_read", default=0)
# What is checked of a field before its value is kept, the id first; every other text is cut to what a model could use.
CHECKS: dict[str, Callable[[Any], object]] = {
    "request_id": lambda value: check_request_id("request_id", value),
    "model": check_model_name,
    "suppressed_tokens": lambda values: check_num_suppressed(len(values)),
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
        is_large = len(data) > LARGE_BYTES
        if is_large:
            large_bytes_read.set(len(data))
        try:
            message = deserialise(data)
        except DecodeError:
            return Refused(InvalidRequest("request", "cannot be parsed; is every string UTF-8?"))
        return _slimmed(message, max_characters()) if is_large else message

    return read


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
    cut = {name: value[:max_characters] if isinstance(value, str) else value for name, value in values.items()}
    return type(message)(**cut)


class LargeRequests:
    """The large requests that are under way, each of a call of its own."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @contextmanager
    def one_more(self, num_bytes: int) -> Iterator[None]:
        """Count one within the `with`.

        Raises:
            QueueFull: If there are too many already; one alone may be of any size.
        """
        if self._num_bytes and self._num_bytes + num_bytes > MAX_LARGE_BYTES:
            raise QueueFull("request: too many large ones are under way", retry_after_seconds=RETRY_SECONDS)
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes


class Turns:
    """The turns of a connection's streams at reading messages that may be large."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(READS_AT_ONCE)

    async def take(self, reading: Awaitable[Value]) -> Value:
        """Return what is read, when it is its turn; after `READ_SECONDS` another may begin: the caller has nothing to send."""
        await self._free.acquire()
        is_held = True

        def give() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(READ_SECONDS, give)
        try:
            return await reading
        finally:
            timer.cancel()
            give()


class TurnsOfConnections:
    """One `Turns` for each connection that has a stream."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    def of(self, peer: str) -> Turns:
        """Return the turns of a connection, by its address."""
        turns = self._turns.get(peer)
        if turns is None:
            turns = self._turns[peer] = Turns()
        return turns
