"""A streamed answer, read by blocking."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from dragoman.client.assembly import Assembly
from dragoman.client.errors import Cancelled
from dragoman.client.opening import opened
from dragoman.client.results import Piece, Result
from dragoman.client.scope import Scope


class Stream:
    """An answer that comes in pieces: iterate over it. The call starts at once.

    Leaving a `with` block, calling `cancel` (from any thread) or dropping the last reference cancels a call that has not ended.

    Args:
        open_call: Starts a call of grpc with so many seconds: an iterator of messages with a `cancel`.
        assembly: Takes the pieces in.
        scope: The scope of this call alone.
    """

    def __init__(self, open_call: Callable[[float], Any], assembly: Assembly, scope: Scope) -> None:
        self._scope = scope
        self._assembly = assembly
        self._open_call = open_call
        self._call = self._open()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """Return the next piece; raises `CallError` if the call fails. A failure before the first piece is retried."""
        if self._assembly.is_ended:
            raise StopIteration
        try:
            return self._read()
        except BaseException:  # the end and Ctrl-C too: either way nothing of the call stays behind
            self._assembly.is_ended = True
            self._scope.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_scope"):
            self._scope.cancel()

    @property
    def result(self) -> Result:
        """The whole answer, once the last piece has come; raises `RuntimeError` before."""
        return self._assembly.result

    def cancel(self) -> None:
        """Cancel the call; whoever asks for a piece gets `Cancelled`. Once the call has ended this does nothing."""
        self._scope.cancel()

    def _open(self) -> Any:
        self._scope.check()
        seconds = self._assembly.attempts.start()
        try:
            call = opened(lambda: self._open_call(seconds))
        except ValueError:  # the channel was closed since the check
            self._scope.check()
            raise
        self._scope.add(call)
        return call

    def _read(self) -> Piece:
        while True:
            try:
                message = next(self._call)
            except StopIteration:
                self._assembly.end()
                raise
            except grpc.RpcError as failure:
                if self._assembly.has_result:  # the answer is complete: how the call ends does not matter any more
                    raise StopIteration from failure
                if self._scope.is_cancelled:
                    raise Cancelled(self._scope.reason, self._assembly.request_id) from failure
                error = self._assembly.error(failure)
                wait = self._assembly.wait_seconds(error)
                if wait is None:
                    raise error from failure
            else:
                return self._assembly.piece(message)
            self._scope.discard(self._call)
            self._scope.sleep(wait)
            self._call = self._open()
