"""Calls that a coroutine waits for and that have one answer: attempts, the waits between, and the end of the client."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from dragoman.client.aio_stream import is_task_cancelled
from dragoman.client.errors import CallError, Cancelled, FailedCall
from dragoman.client.retry import Attempts
from dragoman.client.settings import Settings


class AsyncCalls:
    """Makes the calls of a client, until that is closed.

    Args:
        settings: What they share.
        sleep: Waits so many seconds.
    """

    def __init__(self, settings: Settings, sleep: Callable[[float], Awaitable[object]]) -> None:
        self._settings = settings
        self._sleep = sleep
        self.is_closed = False

    def check(self, request_id: str = "") -> None:
        """Raise `Cancelled` if the client is closed."""
        if self.is_closed:
            raise self.cancelled(request_id)

    def cancelled(self, request_id: str = "") -> Cancelled:
        """Return the error of a call that was cancelled, saying why."""
        return Cancelled("the client is closed" if self.is_closed else "the call was cancelled", request_id)

    def error(self, failure: FailedCall, request_id: str = "") -> CallError:
        """Return the error of a call that failed; where closing the client was what cancelled it, that says so."""
        error = self._settings.error(failure, request_id)
        return self.cancelled(request_id) if self.is_closed and isinstance(error, Cancelled) else error

    async def call(self, method: Any, request: Any, attempts: Attempts, request_id: str = "") -> Any:
        """Return the answer, after as many attempts as the retry policy allows.

        Args:
            method: Of a stub of grpc.aio.
            request: The message.
            attempts: Of this call.
            request_id: Id of the request, for its errors.

        Raises:
            CallError: As the last attempt failed; `TooLarge` before the first one.
        """
        self._settings.check_size(request, request_id)
        while True:
            try:
                return await self.attempt(method, request, attempts, request_id)
            except CallError as error:
                wait = attempts.wait_seconds(error)
                if wait is None:
                    raise
            await self._sleep(wait)

    async def attempt(self, method: Any, request: Any, attempts: Attempts, request_id: str = "") -> Any:
        """Return the answer to one attempt; arguments and errors as `call`."""
        self.check(request_id)
        try:
            return await method(request, timeout=attempts.start(), metadata=self._settings.metadata())
        except grpc.RpcError as error:
            raise self.error(error, request_id) from error
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            raise self.cancelled(request_id) from error
