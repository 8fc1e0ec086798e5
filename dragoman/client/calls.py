"""Calls that block and have one answer: attempts, the waits between, and what ends them from outside."""

from typing import Any

import grpc

from dragoman.client.errors import CallError, Cancelled
from dragoman.client.opening import opened
from dragoman.client.retry import Attempts
from dragoman.client.scope import Scope
from dragoman.client.settings import Settings


class Calls:
    """Makes the calls of a client.

    Args:
        settings: What they share.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def call(self, method: Any, request: Any, attempts: Attempts, scope: Scope, request_id: str = "") -> Any:
        """Return the answer, after as many attempts as the retry policy allows.

        Args:
            method: Of a stub of grpc.
            request: The message.
            attempts: Of this call.
            scope: What the call ends with.
            request_id: Id of the request, for its errors.

        Raises:
            CallError: As the last attempt failed; `TooLarge` before the first one.
        """
        self._settings.check_size(request, request_id)
        while True:
            try:
                return self.attempt(method, request, attempts, scope, request_id)
            except CallError as error:
                wait = attempts.wait_seconds(error)
                if wait is None:
                    raise
            scope.sleep(wait)

    def attempt(self, method: Any, request: Any, attempts: Attempts, scope: Scope, request_id: str = "") -> Any:
        """Return the answer to one attempt; arguments and errors as `call`."""
        scope.check()
        seconds, metadata = attempts.start(), self._settings.metadata()
        try:  # a future, for that can be cancelled from another thread
            call = opened(lambda: method.future(request, timeout=seconds, metadata=metadata))
        except ValueError:  # the channel was closed since the check
            scope.check()
            raise
        with scope.holding(call):
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                raise Cancelled(scope.reason, request_id) from error
            except grpc.RpcError as error:
                failure = self._settings.error(error, request_id)
                if isinstance(failure, Cancelled) and scope.is_cancelled:  # the channel was closed before the scope held the call
                    failure = Cancelled(scope.reason, request_id)
                raise failure from error
            except BaseException:  # Ctrl-C: the server shall not work for nobody
                call.cancel()
                raise
