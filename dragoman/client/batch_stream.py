"""A batch through the blocking client."""

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from dragoman.client.batch import Batch, Grouping, InOrder, Outcome, Sending, apart, together
from dragoman.client.calls import Calls, Scope
from dragoman.client.errors import CallError, Cancelled, DeadlineExceeded, FailedCall, InternalError
from dragoman.client.request import Request
from dragoman.client.results import Result
from dragoman.v1 import generation_pb2

OpenCall = Callable[[Iterator[Any], float | None, bool], Any]
Event = generation_pb2.GenerateBatchResponse | Exception | None


class BatchStream:
    """One GenerateBatch or GenerateBulk call, on two threads; requests that wait during a write go together."""

    def __init__(
        self,
        open_call: Callable[[Iterator[Any], bool], Any],
        scope: Scope,
        grouping: Grouping,
        clock: Callable[[], float],
        to_error: Callable[[FailedCall], CallError],
    ) -> None:
        self._open_call = open_call
        self._scope = scope
        self._grouping = grouping
        self._clock = clock
        self._to_error = to_error
        self._sendings: SimpleQueue[Sending | None] = SimpleQueue()
        self._events: SimpleQueue[Event] = SimpleQueue()
        # Also because Ctrl-C must not come while grpc starts a call: see `opening`.
        threading.Thread(target=self._receive, name="client-batch", daemon=True).start()

    def send(self, sending: Sending) -> None:
        """Send a message when its time has come and those before it have gone."""
        self._sendings.put(sending)

    def take(self, may_wait: bool, seconds: float = math.inf) -> Event:
        """Return the next answer, an error the call failed with, or None for its end; raises `Empty` if there is none in time."""
        return self._events.get(may_wait, None if math.isinf(seconds) else max(0.0, min(seconds, threading.TIMEOUT_MAX)))

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
        sending: Sending | type[Empty] | None = self._sendings.get()
        while isinstance(sending, Sending):
            delay = sending.not_before - self._clock()
            try:
                if delay > 0:
                    self._scope.sleep(delay)
            except Cancelled:
                return
            messages = [sending.message]
            sending = self._grouping.add_waiting(messages, self._clock, self._sendings.get_nowait)
            yield together(messages, self._grouping.is_bulk)
            if sending is Empty:
                sending = self._sendings.get()

    def _receive(self) -> None:
        try:
            self._scope.check()
            call = self._open_call(self._messages(), self._grouping.is_bulk)
            with self._scope.holding(call):
                for response in call:
                    for answer in apart(response):
                        self._events.put(answer)
            self._events.put(None)
        except grpc.RpcError as failure:
            self._events.put(Cancelled(self._scope.reason) if self._scope.is_cancelled else self._to_error(failure))
        except ValueError as error:  # the channel was closed since the check
            self._events.put(Cancelled(self._scope.reason) if self._scope.is_cancelled else error)
        except Exception as error:  # for the caller
            self._events.put(error)


class BatchRun:
    """A batch from its first request to its last outcome; `may_read` returns whether another request may be read now.

    `open_call` starts a call of grpc with an iterator of messages, so many seconds (None for no limit), and whether messages have
    several requests.
    """

    def __init__(
        self,
        batch: Batch,
        requests: Iterable[Request],
        open_call: OpenCall,
        calls: Calls,
        concurrency: int,
        scope: Scope | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency: {concurrency} is less than 1")
        self._batch = batch
        self._requests = iter(requests)
        self._open_call = open_call
        self._calls = calls
        self._parent = scope or calls.scope
        self._concurrency = concurrency
        self.may_read: Callable[[], bool] = lambda: True
        self._stream: BatchStream | None = None
        self._is_read = False
        self._failure: Exception | None = None

    def outcomes(self) -> Generator[Outcome, None, None]:
        """Yield the outcome of each request, as it is known; dropping the generator cancels what runs."""
        with Scope(self._parent) as scope:
            yield from self._outcomes(scope)

    def _outcomes(self, scope: Scope) -> Generator[Outcome, None, None]:
        try:
            while not self._is_read or self._batch.num_open:
                for step in self._take(scope) or self._read():
                    if isinstance(step, Outcome):
                        yield step
                    else:
                        self._opened(scope).send(step)
            if self._stream is not None:
                self._stream.end()
            if self._failure is not None:
                raise self._failure
        finally:
            if self._stream is not None:
                self._stream.cancel()

    def _take(self, scope: Scope) -> list[Sending | Outcome]:
        """Return what an answer leads to; nothing if none is there and there may be a request to read first."""
        if self._stream is None:
            return []
        try:
            may_wait = self._is_read or self._batch.num_open >= self._concurrency or not self.may_read()
            event = self._stream.take(may_wait, self._batch.seconds_until_expiry if may_wait else math.inf)
        except Empty:
            return [*self._batch.expire()]
        if isinstance(event, generation_pb2.GenerateBatchResponse):
            return [self._batch.take(event)]
        if event is None:
            raise InternalError(f"the stream ended with {self._batch.num_open} requests unanswered")
        if not isinstance(event, CallError):
            raise event
        self._stream.cancel()
        self._stream = None
        wait, steps = self._batch.interrupt(event)
        if wait:
            scope.sleep(wait)
        return steps

    def _read(self) -> list[Sending | Outcome]:
        """Return what the next request leads to; one that cannot be read ends the batch, after those before it."""
        if not self.may_read():
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
            seconds = self._batch.deadline - self._batch.clock()
            if seconds <= 0:
                raise DeadlineExceeded("the batch's time has passed")
            timeout = None if math.isinf(seconds) else seconds
            self._stream = BatchStream(
                lambda messages, is_bulk: self._open_call(messages, timeout, is_bulk),
                Scope(scope),
                self._batch.begin_stream(),
                self._batch.clock,
                self._calls.settings.error,
            )
        return self._stream


def results(
    texts: Iterable[str], ask: Callable[[str], Request], run: Callable[[Iterable[Request]], BatchRun], concurrency: int
) -> Generator[Result, None, None]:
    """Return the results of a batch of texts, in order, which end with the first failure."""
    order = InOrder(concurrency)

    def counted(text: str) -> Request:
        order.num_read += 1
        return ask(text)

    batch_run = run(map(counted, texts))
    batch_run.may_read = lambda: order.has_room
    return order.results(batch_run.outcomes())
