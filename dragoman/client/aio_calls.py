"""Calls of the asyncio client: attempts of a call, streamed answers."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from dragoman.client.errors import CallError, Cancelled, FailedCall
from dragoman.client.results import Piece, Result
from dragoman.client.retry import Assembly, Attempts
from dragoman.client.settings import Settings


class AsyncCalls:
    """The calls of a client, until it is closed; `sleep` waits so many seconds."""

    def __init__(self, settings: Settings, sleep: Callable[[float], Awaitable[object]]) -> None:
        self.settings = settings
        self.sleep = sleep
        self._is_closed = False

    def close(self) -> None:
        """Refuse later calls; closing the channel cancels those that run."""
        self._is_closed = True

    def check(self, request_id: str = "") -> None:
        """Raise `Cancelled` if the client is closed."""
        if self._is_closed:
            raise self.cancelled(request_id)

    def cancelled(self, request_id: str = "") -> Cancelled:
        """Return the error of a call that was cancelled, saying why."""
        return Cancelled("the client is closed" if self._is_closed else "the call was cancelled", request_id)

    def error(self, failure: FailedCall, request_id: str = "") -> CallError:
        """Return the error of a call that failed; where closing the client was what cancelled it, that says so."""
        error = self.settings.error(failure, request_id)
        return self.cancelled(request_id) if self._is_closed and isinstance(error, Cancelled) else error

    async def call(self, method: Any, request: Any, timeout_seconds: float | None = None, is_retried: bool = True) -> Any:
        """Return the answer, after as many attempts as the retry policy allows.

        Raises:
            CallError: Of the last attempt; `TooLarge` before the first one.
        """
        attempts = self.settings.attempts(request, timeout_seconds)
        while True:
            try:
                return await self._attempt(method, request, attempts)
            except CallError as error:
                wait = attempts.wait_seconds(error) if is_retried else None
                if wait is None:
                    raise
            await self.sleep(wait)

    async def _attempt(self, method: Any, request: Any, attempts: Attempts) -> Any:
        self.check(attempts.request_id)
        try:
            return await method(request, timeout=attempts.start(), metadata=self.settings.metadata())
        except grpc.RpcError as error:
            raise self.error(error, attempts.request_id) from error
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            raise self.cancelled(attempts.request_id) from error


class AsyncStream:
    """An answer that comes in pieces: iterate over it with `async for`. The call starts at once.

    Leaving an `async with` block, calling `cancel`, cancelling the task that reads or dropping the last reference cancels a call
    that has not ended.
    """

    def __init__(self, calls: AsyncCalls, method: Any, request: Any, timeout_seconds: float | None) -> None:
        self._calls = calls
        self._method = method
        self._request = request
        self._assembly = Assembly(calls.settings.attempts(request, timeout_seconds), calls.error)
        self._metadata = calls.settings.metadata()
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False
        self._open()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece; raises `CallError` if the call fails. A failure before the first piece is retried."""
        if self._assembly.is_ended:
            raise StopAsyncIteration
        try:
            return await self._read()
        except BaseException:  # the end and a cancelled task too: either way nothing of the call stays behind
            self._assembly.is_ended = True
            self._call.cancel()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call") and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)  # the collector may run on any thread

    @property
    def result(self) -> Result:
        """The whole answer, once the last piece has come; raises `RuntimeError` before."""
        return self._assembly.result

    def cancel(self) -> None:
        """Cancel the call; reading a piece raises `Cancelled`. Once the call has ended this does nothing."""
        self._is_cancelled = True
        self._call.cancel()

    def _open(self) -> None:
        if self._is_cancelled:
            raise self._calls.cancelled(self._assembly.request_id)
        self._calls.check(self._assembly.request_id)
        self._call = self._method(self._request, timeout=self._assembly.attempts.start(), metadata=self._metadata)
        # Not `read`: that gives up messages which have arrived when the status is there too.
        self._messages = aiter(self._call)

    async def _read(self) -> Piece:
        while True:
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._assembly.end()
                raise
            except asyncio.CancelledError as failure:
                if is_task_cancelled():
                    raise
                raise self._calls.cancelled(self._assembly.request_id) from failure
            except grpc.RpcError as failure:
                if self._assembly.has_result:  # the answer is complete: how the call ends does not matter any more
                    raise StopAsyncIteration from failure
                wait = self._assembly.retry(failure)
            else:
                return self._assembly.piece(message)
            await self._calls.sleep(wait)
            self._open()


def is_task_cancelled() -> bool:
    """Return whether the running task itself was cancelled; grpc.aio raises the same error when only the call was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
