"""Blocking calls: scopes that cancel them, attempts of a call, streamed answers."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from dragoman.client.errors import CallError, Cancelled
from dragoman.client.results import Piece, Result
from dragoman.client.retry import Assembly, Attempts
from dragoman.client.settings import Settings

Wait = Callable[[threading.Event, float], object]


class Cancellable(Protocol):
    """A call in flight, or a scope."""

    def cancel(self) -> object:
        """End it; once it has ended this does nothing."""


class Scope:
    """Calls of any threads that end together; leaving a `with` cancels what still runs.

    Args:
        parent: Scope that this one ends with.
        wait: Waits for an event, at most so many seconds.
    """

    def __init__(self, parent: "Scope | None" = None, wait: Wait = threading.Event.wait) -> None:
        self._wait: Wait = wait if parent is None else parent._wait
        self._parent = parent
        self._lock = threading.RLock()  # re-entered when the collector cancels an abandoned stream inside `add`
        self._running: set[Cancellable] = set()
        self._cancelled = threading.Event()
        self._reason = "the call was cancelled"
        if parent is not None:
            parent.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    @property
    def is_cancelled(self) -> bool:
        """Whether it has ended; nothing starts under it any more."""
        return self._cancelled.is_set()

    @property
    def reason(self) -> str:
        """Reason of the end, for callers whose calls it cancelled: that of the widest scope that has ended."""
        parent = self._parent
        return parent.reason if parent is not None and parent.is_cancelled else self._reason

    def cancel(self, reason: str | None = None) -> None:
        """Cancel everything that runs under this scope, and whatever would start later; the first reason given counts."""
        with self._lock:
            if reason is not None and not self._cancelled.is_set():
                self._reason = reason
            self._cancelled.set()
            running = list(self._running)
            self._running.clear()
        for call in running:
            call.cancel()
        if self._parent is not None:
            self._parent.discard(self)

    def check(self) -> None:
        """Raise `Cancelled` if this scope has ended."""
        if self._cancelled.is_set():
            raise Cancelled(self.reason)

    def open(self, start: Callable[[], Any]) -> Any:
        """Return the call that `start` starts; raises `Cancelled` if this scope has ended."""
        self.check()
        try:
            return opened(start)
        except ValueError:  # the channel was closed since the check
            self.check()
            raise

    def add(self, call: Cancellable) -> None:
        """Cancel this call with the scope, at once if that has ended."""
        with self._lock:
            if not self._cancelled.is_set():
                self._running.add(call)
                return
        call.cancel()

    def discard(self, call: Cancellable) -> None:
        """Forget a call that has ended."""
        with self._lock:
            self._running.discard(call)

    @contextmanager
    def holding(self, call: Cancellable) -> Iterator[None]:
        """Keep a call in this scope while the block runs."""
        self.add(call)
        try:
            yield
        finally:
            self.discard(call)

    def sleep(self, seconds: float) -> None:
        """Wait; raises `Cancelled` as soon as the scope ends."""
        self._wait(self._cancelled, seconds)
        self.check()


def opened(start: Callable[[], Any]) -> Any:
    """Return what `start` returns: a call with a `cancel`.

    Python runs signal handlers on the main thread, between any two lines. Ctrl-C while grpc starts a call leaves that call without
    the thread that serves it: closing the channel then waits for ever (grpc issue 19973 is of that kind), and later calls
    can lose their answers. So the main thread has its calls started by another, and an interrupt here cancels the call.
    """
    if threading.current_thread() is not threading.main_thread():
        return start()
    opening: Future[Any] = Future()

    def run() -> None:
        try:
            opening.set_result(start())
        except BaseException as error:  # for the caller
            opening.set_exception(error)

    try:
        threading.Thread(target=run, name="client-open").start()
        return opening.result()
    except BaseException:
        opening.add_done_callback(_cancel)
        raise


def _cancel(opening: Future[Any]) -> None:
    if opening.exception() is None:
        opening.result().cancel()


class Calls:
    """The calls of a client, under one scope; `wait` waits for a cancellation, at most so many seconds."""

    def __init__(self, settings: Settings, wait: Wait = threading.Event.wait) -> None:
        self.settings = settings
        self.scope = Scope(wait=wait)

    def check(self) -> None:
        """Raise `Cancelled` if the client is closed."""
        self.scope.check()

    def close(self) -> None:
        """Cancel all calls, and refuse later ones."""
        self.scope.cancel("the client is closed")

    def call(
        self,
        method: Any,
        request: Any,
        timeout_seconds: float | None = None,
        is_retried: bool = True,
        scope: Scope | None = None,
    ) -> Any:
        """Return the answer, after as many attempts as the retry policy allows.

        Raises:
            CallError: Of the last attempt; `TooLarge` before the first one.
        """
        attempts = self.settings.attempts(request, timeout_seconds)
        scope = scope or self.scope
        while True:
            try:
                return self._attempt(method, request, attempts, scope)
            except CallError as error:
                wait = attempts.wait_seconds(error) if is_retried else None
                if wait is None:
                    raise
            scope.sleep(wait)

    def _attempt(self, method: Any, request: Any, attempts: Attempts, scope: Scope) -> Any:
        seconds, metadata = attempts.start(), self.settings.metadata()
        # A future, for that can be cancelled from another thread.
        call = scope.open(lambda: method.future(request, timeout=seconds, metadata=metadata))
        with scope.holding(call):
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                raise Cancelled(scope.reason, attempts.request_id) from error
            except grpc.RpcError as error:
                failure = self.settings.error(error, attempts.request_id)
                if isinstance(failure, Cancelled) and scope.is_cancelled:  # the channel was closed before the scope held the call
                    failure = Cancelled(scope.reason, attempts.request_id)
                raise failure from error
            except BaseException:  # Ctrl-C: the server shall not work on
                call.cancel()
                raise


class Stream:
    """An answer that comes in pieces: iterate over it. The call starts at once.

    Leaving a `with` block, calling `cancel` (from any thread) or dropping the last reference cancels a call that has not ended.
    """

    def __init__(self, calls: Calls, method: Any, request: Any, timeout_seconds: float | None, scope: Scope | None = None) -> None:
        self._method = method
        self._request = request
        self._assembly = Assembly(calls.settings.attempts(request, timeout_seconds), calls.settings.error)
        self._metadata = calls.settings.metadata()
        self._scope = Scope(scope or calls.scope)
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
        """Cancel the call; reading a piece raises `Cancelled`. Once the call has ended this does nothing."""
        self._scope.cancel()

    def _open(self) -> Any:
        seconds = self._assembly.attempts.start()
        call = self._scope.open(lambda: self._method(self._request, timeout=seconds, metadata=self._metadata))
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
                wait = self._assembly.retry(failure)
            else:
                return self._assembly.piece(message)
            self._scope.discard(self._call)
            self._scope.sleep(wait)
            self._call = self._open()
