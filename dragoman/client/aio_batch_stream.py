"""A batch through the client for asyncio."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc import aio

from dragoman.client.aio_calls import AsyncCalls, is_task_cancelled
from dragoman.client.batch import Batch, Outcome, Sending, Step, StreamEvent, apart, check_concurrency, result_of
from dragoman.client.errors import CallError, FailedCall, Unavailable, from_rpc_error
from dragoman.client.request import Request
from dragoman.client.results import Result
from dragoman.v1 import generation_pb2

# Longest delay of a status behind its failure, and the interval between looks: grpc.aio reports the first status only.
_STATUS_SECONDS = 1.0
_POLL_SECONDS = 0.002

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class InputEnd:
    """End of the requests, with the error that reading them raised, if any."""

    failure: Exception | None


Event = Request | InputEnd | StreamEvent


class EndStatus:
    """Status that a call of grpc.aio ended with, also where a failure to write hides it (grpc issue 36066).

    A message that cannot be written any more sets a status of grpc.aio's own: over the server's, or until that one comes.
    """

    def __init__(self, call: Any, to_error: Callable[[FailedCall], CallError] = from_rpc_error) -> None:
        self._call = call
        self._to_error = to_error
        self._status: aio.AioRpcError | None = None
        call.add_done_callback(lambda _: self._read())

    async def error(self) -> CallError | None:
        """Return why the call failed, once reading its answers did; None if the server had ended it well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                while self._status is None:
                    await asyncio.sleep(_POLL_SECONDS)
                    self._read()
        self._read()  # the event loop may have been too busy to look in time
        if self._status is None:
            return Unavailable("the connection broke while it was written to")
        return None if self._status.code() is grpc.StatusCode.OK else self._to_error(self._status)

    def _read(self) -> None:
        """Keep the status, if it is not of a failure to write."""
        code, details, metadata = (_ready(value()) for value in (self._call.code, self._call.details, self._call.trailing_metadata))
        is_of_writing = code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"
        if self._status is None and not is_of_writing:
            self._status = aio.AioRpcError(code, aio.Metadata(), metadata, details)


def _ready(value: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        value.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the call has not ended")


class AsyncBatchStream:
    """One GenerateBatch or GenerateBulk call, whose events go to a queue; requests that wait during a write go together."""

    def __init__(self, calls: AsyncCalls, stub: Any, metadata: Any, batch: Batch, events: asyncio.Queue[Event]) -> None:
        calls.check()
        self._calls = calls
        self._clock = batch.clock
        self._sendings: asyncio.Queue[Sending | None] = asyncio.Queue()
        self._events = events
        self._grouping, seconds = batch.begin_stream()
        method = stub.GenerateBulk if self._grouping.is_bulk else stub.GenerateBatch
        self._call = method(self._messages(), timeout=seconds, metadata=metadata)
        self._status = EndStatus(self._call, calls.error)
        self._receiving = asyncio.create_task(self._receive())

    def send(self, sending: Sending) -> None:
        """Send a message when its time has come and those before it have gone."""
        self._sendings.put_nowait(sending)

    async def end(self) -> None:
        """End the requests, all of which are answered, and wait for the call to end; its status does not matter any more."""
        self._sendings.put_nowait(None)
        while isinstance(await self._events.get(), generation_pb2.GenerateBatchResponse):
            pass

    async def cancel(self) -> None:
        """Cancel the call, if it has not ended."""
        self._call.cancel()
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)

    async def _messages(self) -> AsyncIterator[Any]:
        """Yield the messages to send."""
        waiting: deque[Sending | None] = deque()
        while (sending := waiting.popleft() if waiting else await self._sendings.get()) is not None:
            delay = sending.not_before - self._clock()
            if delay > 0:
                await self._calls.sleep(delay)
            while not self._sendings.empty():
                waiting.append(self._sendings.get_nowait())
            yield self._grouping.message(sending, waiting, self._clock())

    async def _receive(self) -> None:
        end: Exception | None = None
        try:
            async for response in self._call:
                for answer in apart(response):
                    self._events.put_nowait(answer)
        except grpc.RpcError:
            end = await self._status.error()
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            end = self._calls.cancelled()
        except Exception as error:  # for the caller
            end = error
        finally:
            self._sendings.put_nowait(None)  # grpc.aio would wait for more
        self._events.put_nowait(end)


class AsyncBatchRun:
    """A batch from its first request to its last outcome.

    Args:
        batch: Its state.
        items: Input, read when there is room for another request.
        to_request: Makes a request of an item.
        stub: Sends the requests.
        calls: Calls of the client.
        concurrency: Requests under way at once; twice as many are read ahead of the next outcome.
    """

    def __init__(
        self,
        batch: Batch,
        items: Iterable[Any] | AsyncIterable[Any],
        to_request: Callable[[Any], Request],
        stub: Any,
        calls: AsyncCalls,
        concurrency: int,
    ) -> None:
        check_concurrency(concurrency)
        self._batch = batch
        self._items = as_async(items)
        self._to_request = to_request
        self._stub = stub
        self._calls = calls
        self._metadata = calls.settings.metadata()
        self._room_under_way = asyncio.Semaphore(concurrency)
        self._room_ahead = asyncio.Semaphore(2 * concurrency)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stream: AsyncBatchStream | None = None
        self._end: InputEnd | None = None

    async def results(self) -> AsyncGenerator[Result, None]:
        """Yield the results up to the first failure, which is raised."""
        async with contextlib.aclosing(self.outcomes()) as outcomes:
            async for outcome in outcomes:
                yield result_of(outcome)

    async def outcomes(self) -> AsyncGenerator[Outcome, None]:
        """Yield the outcome of each request, as it is known; closing the generator cancels what runs."""
        reading = asyncio.create_task(self._read())
        try:
            while self._end is None or self._batch.num_open:
                for step in await self._steps():
                    if isinstance(step, Sending):
                        self._opened().send(step)
                        continue
                    self._room_under_way.release()
                    for outcome in self._batch.in_order(step):
                        self._room_ahead.release()
                        yield outcome
            if self._stream is not None:
                await self._stream.end()
            if self._end.failure is not None:
                raise self._end.failure
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if self._stream is not None:
                await self._stream.cancel()

    async def _read(self) -> None:
        """Read the requests, each when there is room for it; an input that fails ends."""
        failure: Exception | None = None
        try:
            await self._wait_for_room()
            async for item in self._items:
                self._events.put_nowait(self._to_request(item))
                await self._wait_for_room()
        except Exception as error:
            failure = error
        self._events.put_nowait(InputEnd(failure))

    async def _wait_for_room(self) -> None:
        await self._room_under_way.acquire()
        await self._room_ahead.acquire()

    async def _steps(self) -> Sequence[Step]:
        """Wait for the next event and return what follows from it; raises `CallError` if the batch fails."""
        seconds = self._batch.seconds_until_expiry
        is_endless = math.isinf(seconds) or not self._events.empty()
        try:
            async with asyncio.timeout(None if is_endless else max(0.0, seconds)):
                event = await self._events.get()
        except TimeoutError:
            return self._batch.expire()
        if isinstance(event, Request):
            return [self._batch.add(event)]
        if isinstance(event, InputEnd):
            self._end = event
            return []
        if not isinstance(event, generation_pb2.GenerateBatchResponse) and self._stream is not None:
            await self._stream.cancel()
            self._stream = None
        wait, steps = self._batch.handle(event)
        if wait:
            await self._calls.sleep(wait)
        return steps

    def _opened(self) -> AsyncBatchStream:
        if self._stream is None:
            self._stream = AsyncBatchStream(self._calls, self._stub, self._metadata, self._batch, self._events)
        return self._stream


def as_async(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterable[Item]:
    """Return items as asynchronous ones; raises `TypeError` if they are no iterable of either kind."""
    return items if isinstance(items, AsyncIterable) else _each(iter(items))


async def _each(items: Iterator[Item]) -> AsyncIterator[Item]:
    for item in items:
        yield item
