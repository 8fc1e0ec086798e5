"""A batch through the client for asyncio."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty
from typing import Any, TypeVar

import grpc

from dragoman.client.aio_calls import AsyncCalls, is_task_cancelled
from dragoman.client.batch import Batch, Grouping, InOrder, Outcome, Sending, apart, together
from dragoman.client.errors import CallError, DeadlineExceeded, FailedCall, InternalError, Unavailable, from_rpc_error
from dragoman.client.request import Request, check_request
from dragoman.client.results import Result
from dragoman.v1 import generation_pb2

# Longest delay of a status behind its failure, and the interval between looks: grpc.aio reports the first status only.
_STATUS_SECONDS = 1.0
_POLL_SECONDS = 0.002


OpenCall = Callable[[AsyncIterator[Any], float | None, bool], Any]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class InputEnd:
    """End of the requests, with the error that reading them raised, if any."""

    failure: Exception | None


@dataclass(frozen=True, slots=True)
class Expiry:
    """A request's time is over."""


Event = Request | InputEnd | Expiry | generation_pb2.GenerateBatchResponse | Exception | None


class EndStatus:
    """Status that a call of grpc.aio ended with, also where a failure to write hides it (grpc issue 36066).

    A message that cannot be written any more sets a status of grpc.aio's own: over the server's, or until that one comes.
    """

    def __init__(self, call: Any, to_error: Callable[[FailedCall], CallError] = from_rpc_error) -> None:
        self._call = call
        self._to_error = to_error
        self._values: tuple[grpc.StatusCode, str | None, Any] | None = None
        call.add_done_callback(lambda _: self._read())

    async def error(self) -> CallError | None:
        """Return why the call failed, once reading its answers did; None if the server had ended it well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                while self._values is None:
                    await asyncio.sleep(_POLL_SECONDS)
                    self._read()
        self._read()  # the event loop may have been too busy to look in time
        if self._values is None:
            return Unavailable("the connection broke while it was written to")
        return None if self.code() is grpc.StatusCode.OK else self._to_error(self)

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        assert self._values is not None
        return self._values[0]

    def details(self) -> str | None:
        """Return the server's message."""
        assert self._values is not None
        return self._values[1]

    def trailing_metadata(self) -> Any:
        """Return what `google.rpc.Status` travels in."""
        assert self._values is not None
        return self._values[2]

    def _read(self) -> None:
        """Keep the status, if it is not of a failure to write."""
        code, details, metadata = (_ready(value()) for value in (self._call.code, self._call.details, self._call.trailing_metadata))
        is_of_writing = code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"
        if self._values is None and not is_of_writing:
            self._values = (code, details, metadata)


def _ready(value: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        value.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the call has not ended")


class AsyncBatchStream:
    """One GenerateBatch or GenerateBulk call: requests in, answers out; requests that wait during a write go together.

    `events` gets each answer, then the error the call failed with, or None for its end.
    """

    def __init__(
        self,
        open_call: OpenCall,
        calls: AsyncCalls,
        seconds: float | None,
        grouping: Grouping,
        events: asyncio.Queue[Event],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._calls = calls
        self._sendings: asyncio.Queue[Sending | None] = asyncio.Queue()
        self._events = events
        self._grouping = grouping
        self._call = open_call(self._messages(), seconds, self._grouping.is_bulk)
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
        sending: Sending | type[Empty] | None = await self._sendings.get()
        while isinstance(sending, Sending):
            delay = sending.not_before - self._clock()
            if delay > 0:
                await self._calls.sleep(delay)
            messages = [sending.message]
            sending = self._grouping.add_waiting(messages, self._clock, self._sendings.get_nowait)
            yield together(messages, self._grouping.is_bulk)
            if sending is Empty:
                sending = await self._sendings.get()

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

    `open_call` starts a call of grpc.aio with an iterator of messages, so many seconds (None for no limit), and whether messages
    have several requests.
    """

    def __init__(
        self,
        batch: Batch,
        requests: Iterable[Request] | AsyncIterable[Request],
        open_call: OpenCall,
        calls: AsyncCalls,
        concurrency: int,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency: {concurrency} is less than 1")
        self._batch = batch
        self._requests = as_async(requests)
        self._open_call = open_call
        self._calls = calls
        self._places = asyncio.Semaphore(concurrency)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stream: AsyncBatchStream | None = None
        self._end: InputEnd | None = None

    async def outcomes(self) -> AsyncGenerator[Outcome, None]:
        """Yield what becomes of each request, as it is known; closing the generator cancels what runs."""
        reading = asyncio.create_task(self._read())
        try:
            while self._end is None or self._batch.num_open:
                for step in await self._steps(await self._event()):
                    if isinstance(step, Outcome):
                        self._places.release()
                        yield step
                    else:
                        self._opened().send(step)
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
        """Read the requests, each when there is a place for it; an input that fails ends."""
        failure: Exception | None = None
        try:
            await self._places.acquire()
            async for request in self._requests:
                check_request(request)
                self._events.put_nowait(request)
                await self._places.acquire()
        except Exception as error:
            failure = error
        self._events.put_nowait(InputEnd(failure))

    async def _event(self) -> Event:
        """Return what happens next."""
        seconds = self._batch.seconds_until_expiry
        if math.isinf(seconds) or not self._events.empty():
            return await self._events.get()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await self._events.get()
        except TimeoutError:
            return Expiry()

    async def _steps(self, event: Event) -> list[Sending | Outcome]:
        """Return the steps that follow an event; raises `CallError` if the batch fails."""
        match event:
            case Request():
                return [self._batch.add(event)]
            case InputEnd():
                self._end = event
                return []
            case Expiry():
                return [*self._batch.expire()]
            case generation_pb2.GenerateBatchResponse():
                return [self._batch.take(event)]
            case None:
                raise InternalError(f"the stream ended with {self._batch.num_open} requests unanswered")
            case CallError():
                self._stream = None
                wait, steps = self._batch.interrupt(event)
                if wait:
                    await self._calls.sleep(wait)
                return steps
            case _:
                raise event

    def _opened(self) -> AsyncBatchStream:
        if self._stream is None:
            seconds = self._batch.deadline - self._batch.clock()
            if seconds <= 0:
                raise DeadlineExceeded("the batch's time has passed")
            timeout = None if math.isinf(seconds) else seconds
            grouping, clock = self._batch.begin_stream(), self._batch.clock
            self._stream = AsyncBatchStream(self._open_call, self._calls, timeout, grouping, self._events, clock)
        return self._stream


def async_results(
    texts: Iterable[str] | AsyncIterable[str],
    ask: Callable[[str], Request],
    run: Callable[[AsyncIterable[Request]], AsyncBatchRun],
    concurrency: int,
) -> AsyncGenerator[Result, None]:
    """Return the results of a batch of texts, in order, which end with the first failure."""
    order, items = InOrder(concurrency), aiter(as_async(texts))
    places = asyncio.Semaphore(max(0, order.max_ahead))

    async def requests() -> AsyncGenerator[Request, None]:
        while True:
            await places.acquire()
            try:
                text = await anext(items)
            except StopAsyncIteration:
                return
            yield ask(text)

    batch_run = run(requests())

    async def results() -> AsyncGenerator[Result, None]:
        async with contextlib.aclosing(batch_run.outcomes()) as outcomes:
            async for outcome in outcomes:
                for result in order.put(outcome):
                    places.release()
                    yield result

    return results()


def as_async(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterable[Item]:
    """Return items as asynchronous ones; raises `TypeError` if they are no iterable of either kind."""
    return items if isinstance(items, AsyncIterable) else _each(iter(items))


async def _each(items: Iterator[Item]) -> AsyncIterator[Item]:
    for item in items:
        yield item
