"""In-flight windows and rates: bounds on requests, bytes and streams of callers and connections, for every protocol.

A call has a window if it is large or has several requests. All windows of a frontend share one allowance of requests and one of
bytes, divided equally among callers with something in flight, and a caller's share among its windows; each window may always have
one request. Single small requests have none: the dispatcher's queue bounds them.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from dragoman.server.buckets import Bucket
from dragoman.server.errors import ConnectionLimit, QueueFull
from dragoman.server.service.callers import RETRY_SECONDS

T = TypeVar("T")

# For each slot of the largest model: one decoding request and one ready to take the slot.
REQUESTS_PER_SLOT = 2
# Each request takes about 10 KB while it is served.
MAX_REQUESTS = 1024
MAX_BYTES = 32 * 2**20
# Few valid requests are larger; bytes of smaller ones are counted in streams only.
LARGE_BYTES = 64 * 2**10
# A stream with so many unwritten answer bytes is not read further.
MAX_UNWRITTEN_BYTES = 256 * 2**10
# Requests of one message started before yielding to other tasks.
REQUESTS_PER_TURN = 16


class _Caller:
    """A caller, or an address without authentication: open windows, busy windows and bytes."""

    __slots__ = ("num_busy", "num_bytes", "num_large_bytes", "num_windows")

    def __init__(self) -> None:
        self.num_windows = self.num_busy = self.num_bytes = self.num_large_bytes = 0


class InFlight:
    """Allowance shared by all windows of a frontend."""

    def __init__(
        self, max_requests_per_window: Callable[[], int], max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES
    ) -> None:
        """Start without windows; `max_requests` and `max_bytes` are totals of all windows."""
        self._max_requests_per_window = max_requests_per_window
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._callers: dict[str, _Caller] = {}
        self._num_busy = 0  # callers
        self._waiting: set[Window] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes in flight."""
        return sum(caller.num_bytes for caller in self._callers.values())

    @contextmanager
    def window(self, caller: str, num_bytes: int = 0) -> "Iterator[Window]":
        """Open a window for a call of `caller` (name or address); `num_bytes` is the message's size if it is large.

        Raises `QueueFull` if the caller's large messages exceed its share of bytes; a single one may be of any size.
        """
        owner = self._callers.setdefault(caller, _Caller())
        owner.num_windows += 1
        window = Window(self, owner, self._max_requests_per_window())
        try:
            if owner.num_large_bytes and num_bytes and owner.num_large_bytes + num_bytes > self._max_bytes // self._num_busy:
                raise QueueFull("request: too many large ones are under way", retry_after_seconds=RETRY_SECONDS)
            window.reserve(num_bytes)
            yield window
        finally:
            window.reserve(0)
            self._waiting.discard(window)
            self.change(window, -window.num_requests, -window.num_bytes)
            owner.num_windows -= 1
            if not owner.num_windows:
                del self._callers[caller]

    def has_room(self, window: "Window") -> bool:
        """Return whether a window has room for another request."""
        if not window.num_requests:
            return True
        caller = window.caller
        num_bytes = self._max_bytes // self._num_busy
        return (
            window.num_requests < min(window.max_requests, self._max_requests // self._num_busy // caller.num_busy)
            and window.num_unwritten_bytes <= MAX_UNWRITTEN_BYTES
            and window.num_bytes < num_bytes // caller.num_busy
            and caller.num_bytes < num_bytes
        )

    def change(self, window: "Window", num_requests: int, num_bytes: int) -> None:
        """Add to (or subtract from) a window's requests and bytes, and wake windows that have room now."""
        caller, was_busy = window.caller, window.is_busy
        before = self._share(caller)
        window.num_requests += num_requests
        window.num_bytes += num_bytes
        caller.num_bytes += num_bytes
        if was_busy != window.is_busy:
            caller.num_busy += -1 if was_busy else 1
            if caller.num_busy == (0 if was_busy else 1):
                self._num_busy += -1 if was_busy else 1
        if window in self._waiting:
            window.changed.set()
        if len(self._waiting) > (window in self._waiting) and self._share(caller) > before:
            for other in self._waiting:
                if self.has_room(other):
                    other.changed.set()

    async def wait(self, window: "Window") -> None:
        """Wait until a window has room for another request."""
        if self.has_room(window):
            return
        self._waiting.add(window)
        try:
            while not self.has_room(window):
                window.changed.clear()
                await window.changed.wait()
        finally:
            self._waiting.discard(window)

    def _share(self, caller: _Caller) -> tuple[int, bool]:
        """Return a value that increases when a caller's change made room for other windows."""
        callers = max(1, self._num_busy)
        return self._max_requests // callers // max(1, caller.num_busy), caller.num_bytes < self._max_bytes // callers


class Window:
    """In-flight window of one call; `changed` is set when there may be room again.

    Counts requests whose answers are not written, and the bytes of unanswered requests and unwritten answers.
    """

    __slots__ = ("_all", "_num_reserved", "caller", "changed", "max_requests", "num_bytes", "num_requests", "num_unwritten_bytes")

    def __init__(self, in_flight: InFlight, caller: _Caller, max_requests: int) -> None:
        self._all = in_flight
        self.caller = caller
        self.max_requests = max_requests
        self.num_requests = self.num_bytes = self.num_unwritten_bytes = self._num_reserved = 0
        self.changed = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return self.num_requests > 0 or self.num_bytes > 0

    async def wait(self) -> None:
        """Wait until there is room for another request."""
        await self._all.wait(self)

    def reserve(self, num_bytes: int) -> None:
        """Set the bytes of the call's large message: the largest possible size until it is read, then its own."""
        more, self._num_reserved = num_bytes - self._num_reserved, num_bytes
        self.caller.num_large_bytes += more
        self.hold(more)

    def hold(self, num_bytes: int) -> None:
        """Add or subtract bytes of a message whose requests have not begun."""
        if num_bytes:
            self._all.change(self, 0, num_bytes)

    def begin(self, num_bytes: int = 0) -> None:
        """Count a started request."""
        self._all.change(self, 1, num_bytes)

    def answered(self, request_bytes: int, answer_bytes: int) -> None:
        """Replace the bytes of a request by those of its answer."""
        self.num_unwritten_bytes += answer_bytes
        self._all.change(self, 0, answer_bytes - request_bytes)

    def end(self, num_bytes: int = 0) -> None:
        """Stop counting a request whose answer is written."""
        self.num_unwritten_bytes -= num_bytes
        self._all.change(self, -1, -num_bytes)

    async def run_each(
        self,
        count: int,
        serve: Callable[[int], Coroutine[Any, Any, T]],
        most: int | None = None,
        has_begun: asyncio.Event | None = None,
    ) -> Sequence[T]:
        """Serve the requests of one message, each in a task started when there is room; return the results in order.

        `most` limits concurrency; `has_begun` is set when the last request has begun, or none will. The first failure
        cancels the other requests and is raised.
        """
        tasks: list[asyncio.Task[T]] = []
        places = asyncio.Semaphore(most or count)

        def end(_: object) -> None:
            self.end()
            places.release()

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(count):
                    await places.acquire()
                    await self.wait()
                    if number % REQUESTS_PER_TURN == 0:
                        await asyncio.sleep(0)
                    self.begin()
                    tasks.append(group.create_task(serve(number)))
                    tasks[-1].add_done_callback(end)
                if has_begun is not None:
                    has_begun.set()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            if has_begun is not None:
                has_begun.set()
        return [task.result() for task in tasks]


class StreamLimit:
    """Limit of open streams, in total and for each connection."""

    def __init__(self, name: str, total: float, per_connection: int) -> None:
        self._name, self._total, self._per_connection = name, total, per_connection
        self._open: Counter[str] = Counter()

    @contextmanager
    def stream(self, connection: str) -> Iterator[None]:
        """Count a stream of a connection within the `with`; raise `ConnectionLimit` if there are too many."""
        if self._open[connection] >= self._per_connection:
            raise ConnectionLimit(f"{self._name}: {self._per_connection} on one connection", retry_after_seconds=RETRY_SECONDS)
        if self._open.total() >= self._total:
            raise ConnectionLimit(f"{self._name}: all {self._total} are taken", retry_after_seconds=RETRY_SECONDS)
        self._open[connection] += 1
        try:
            yield
        finally:
            self._open[connection] -= 1
            if not self._open[connection]:
                del self._open[connection]


class MessageRate:
    """Token bucket of messages for each connection; messages above the rate wait."""

    # Burst in seconds' worth of messages; longest wait; more connections than the default limit allows.
    BURST_SECONDS = 1.0
    MAX_WAIT_SECONDS = 5.0
    MAX_CONNECTIONS = 8192

    def __init__(self, messages_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = messages_per_second, clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # least recently used first

    def count(self, connection: str, num_messages: int = 1, max_seconds: float = float("inf")) -> float:
        """Count messages; return the last one's waiting seconds, or raise `ConnectionLimit`, uncounted, if above `max_seconds`."""
        bucket = self._buckets.get(connection)
        if bucket is None:
            bucket = self._buckets[connection] = Bucket(self._rate, self._rate * self.BURST_SECONDS, self._clock)
            if len(self._buckets) > self.MAX_CONNECTIONS:
                self._buckets.popitem(last=False)
        seconds = (num_messages - bucket.level) / self._rate
        if seconds > max_seconds:
            reason = f"max_messages_per_second: {self._rate:g} on one connection"
            raise ConnectionLimit(reason, retry_after_seconds=seconds - max_seconds)
        bucket.take(num_messages)
        self._buckets.move_to_end(connection)
        return max(0.0, seconds)

    async def wait(self, connection: str) -> None:
        """Wait until a message may be served; raise `ConnectionLimit` after the longest wait, so that refusals are not faster."""
        try:
            seconds = self.count(connection, 1, self.MAX_WAIT_SECONDS)
        except ConnectionLimit:
            await asyncio.sleep(self.MAX_WAIT_SECONDS)
            raise
        if seconds:
            await asyncio.sleep(seconds)

    async def read(self, messages: AsyncIterator[T], connection: str, num_requests: Callable[[T], int]) -> AsyncIterator[T]:
        """Yield a stream's messages at the connection's allowed rate; a message of n requests counts n times."""
        async for message in messages:
            seconds = self.count(connection, max(1, num_requests(message)))
            yield message
            del message
            if seconds:
                await asyncio.sleep(seconds)


class Receiving:
    """Places for partially received messages of a connection's unary calls, whose bytes the transport buffers."""

    MAX_MESSAGES = 16
    MAX_SECONDS = 5.0

    def __init__(self) -> None:
        self._started: dict[str, dict[asyncio.Task[Any], float]] = {}  # tasks by connection, the oldest first
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._late: set[asyncio.Task[Any]] = set()

    async def receive(self, connection: str, read: Callable[[], Awaitable[T]]) -> T:
        """Return the current task's message; raise `QueueFull` if receiving takes too long while others wait."""
        while len(started := self._started.setdefault(connection, {})) >= self.MAX_MESSAGES:
            await self._wait(connection, started)
        task = asyncio.current_task()
        assert task is not None
        started[task] = time.monotonic()
        try:
            return await read()
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel():
                raise
            reason = f"request: it did not come within {self.MAX_SECONDS:g} s, and others wait"
            raise QueueFull(reason, retry_after_seconds=RETRY_SECONDS) from None
        finally:
            del started[task]
            self._late.discard(task)
            if connection in self._waiting:
                self._wake(connection)
            elif not started and self._started.get(connection) is started:
                del self._started[connection]

    async def _wait(self, connection: str, started: dict[asyncio.Task[Any], float]) -> None:
        """Wait for a place; cancel the oldest message once it is overdue."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection, []).append(place)
        try:
            while not place.done():
                oldest, since = next(((task, at) for task, at in started.items() if task not in self._late), (None, 0.0))
                seconds = None if oldest is None else since + self.MAX_SECONDS - time.monotonic()
                if oldest is not None and seconds is not None and seconds <= 0:
                    self._late.add(oldest)
                    oldest.cancel()
                    seconds = None
                await asyncio.wait((place,), timeout=seconds)
        except asyncio.CancelledError:
            if place.done():
                self._wake(connection)
            raise
        finally:
            if place in self._waiting.get(connection, ()):
                self._waiting[connection].remove(place)
            if not self._waiting.get(connection):
                self._waiting.pop(connection, None)
                if not started and self._started.get(connection) is started:
                    del self._started[connection]

    def _wake(self, connection: str) -> None:
        if waiting := self._waiting.get(connection):
            waiting.pop(0).set_result(None)
