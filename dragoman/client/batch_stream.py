"""A batch through the blocking client."""

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from dragoman.client.batch import Batch, Outcome, Sending, Step, StreamEvent, apart, check_concurrency, result_of
from dragoman.client.calls import Calls, Scope
from dragoman.client.errors import Cancelled
from dragoman.client.request import Request
from dragoman.client.results import Result
from dragoman.v1 import generation_pb2


class BatchStream:
    """One GenerateBatch or GenerateBulk call, on two threads; requests that wait during a write go together."""

    def __init__(self, calls: Calls, scope: Scope, stub: Any, metadata: Any, batch: Batch) -> None:
        self._calls = calls
        self._scope = scope
        self._grouping, self._seconds = batch.begin_stream()
        self._method = stub.GenerateBulk if self._grouping.is_bulk else stub.GenerateBatch
        self._metadata = metadata
        self._clock = batch.clock
        self._sendings: SimpleQueue[Sending | None] = SimpleQueue()
        self._events: SimpleQueue[StreamEvent] = SimpleQueue()
        # Also because Ctrl-C must not come while grpc starts a call: see `opened`.
        threading.Thread(target=self._receive, name="client-batch", daemon=True).start()

    def send(self, sending: Sending) -> None:
        """Send a message when its time has come and those before it have gone."""
        self._sendings.put(sending)

    def take(self, seconds: float) -> StreamEvent:
        """Return the next event; raises `Empty` if there is none in time."""
        return self._events.get(timeout=None if math.isinf(seconds) else max(0.0, min(seconds, threading.TIMEOUT_MAX)))

    def end(self) -> None:
        """End the requests, all of which are answered, and wait for the call to end; its status does not matter any more."""
        self._sendings.put(None)
        while isinstance(self._events.get(), generation_pb2.GenerateBatchResponse):
            pass

    def cancel(self) -> None:
        """Cancel the call, if it has not ended, and let the threads go."""
        self._scope.cancel()
        self._sendings.put(None)

    def _messages(self) -> Iterator[Any]:
        """Yield the messages to send, on grpc's thread."""
        waiting: deque[Sending | None] = deque()
        while (sending := waiting.popleft() if waiting else self._sendings.get()) is not None:
            delay = sending.not_before - self._clock()
            try:
                if delay > 0:
                    self._scope.sleep(delay)
            except Cancelled:
                return
            while not self._sendings.empty():
                waiting.append(self._sendings.get_nowait())
            yield self._grouping.message(sending, waiting, self._clock())

    def _receive(self) -> None:
        try:
            call = self._scope.open(lambda: self._method(self._messages(), timeout=self._seconds, metadata=self._metadata))
            with self._scope.holding(call):
                for response in call:
                    for answer in apart(response):
                        self._events.put(answer)
            self._events.put(None)
        except grpc.RpcError as failure:
            error = self._calls.settings.error(failure)
            self._events.put(Cancelled(self._scope.reason) if self._scope.is_cancelled else error)
        except Exception as error:  # for the caller
            self._events.put(error)


class BatchRun:
    """A batch from its first request to its last outcome.

    Args:
        batch: Its state.
        items: Input, read when there is room for another request.
        to_request: Makes a request of an item.
        stub: Sends the requests.
        calls: Calls of the client.
        concurrency: Requests under way at once; twice as many are read ahead of the next outcome.
        scope: Cancels the batch when it ends; None for that of the client.
    """

    def __init__(
        self,
        batch: Batch,
        items: Iterable[Any],
        to_request: Callable[[Any], Request],
        stub: Any,
        calls: Calls,
        concurrency: int,
        scope: Scope | None = None,
    ) -> None:
        check_concurrency(concurrency)
        self._batch = batch
        self._requests = map(to_request, items)
        self._stub = stub
        self._calls = calls
        self._metadata = calls.settings.metadata()
        self._parent = scope or calls.scope
        self._concurrency = concurrency
        self._stream: BatchStream | None = None
        self._is_read = False
        self._failure: Exception | None = None

    def results(self) -> Generator[Result, None, None]:
        """Yield the results up to the first failure, which is raised."""
        with closing(self.outcomes()) as outcomes:
            yield from map(result_of, outcomes)

    def outcomes(self) -> Generator[Outcome, None, None]:
        """Yield the outcome of each request, as it is known; dropping the generator cancels what runs."""
        with Scope(self._parent) as scope:
            try:
                while not self._is_read or self._batch.num_open:
                    for step in self._take(scope) or self._read():
                        if isinstance(step, Sending):
                            self._opened(scope).send(step)
                        else:
                            yield from self._batch.in_order(step)
                if self._stream is not None:
                    self._stream.end()
                if self._failure is not None:
                    raise self._failure
            finally:
                if self._stream is not None:
                    self._stream.cancel()

    @property
    def _has_room(self) -> bool:
        return self._batch.num_open < self._concurrency and self._batch.num_ahead < 2 * self._concurrency

    def _take(self, scope: Scope) -> Sequence[Step]:
        """Return what an answer leads to; nothing if none is there and there may be a request to read first."""
        if self._stream is None:
            return []
        may_wait = self._is_read or not self._has_room
        try:
            event = self._stream.take(self._batch.seconds_until_expiry if may_wait else 0.0)
        except Empty:
            return self._batch.expire()
        if not isinstance(event, generation_pb2.GenerateBatchResponse):
            self._stream.cancel()
            self._stream = None
        wait, steps = self._batch.handle(event)
        if wait:
            scope.sleep(wait)
        return steps

    def _read(self) -> Sequence[Step]:
        """Return what the next request leads to; one that cannot be read ends the batch, after those before it."""
        if not self._has_room:
            return []
        try:
            return [self._batch.add(next(self._requests))]
        except StopIteration:
            self._is_read = True
        except Exception as error:
            self._is_read, self._failure = True, error
        return []

    def _opened(self, scope: Scope) -> BatchStream:
        if self._stream is None:
            self._stream = BatchStream(self._calls, Scope(scope), self._stub, self._metadata, self._batch)
        return self._stream
