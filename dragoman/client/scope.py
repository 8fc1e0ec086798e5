"""Calls that end together: one cancellation for all calls, waits and smaller scopes that were begun under it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from dragoman.client.errors import Cancelled

Wait = Callable[[threading.Event, float], object]


class Cancellable(Protocol):
    """A call in flight, or a scope."""

    def cancel(self) -> object:
        """End it; once it has ended this does nothing."""


class Scope:
    """Calls of any threads that end together; leaving a `with` cancels what still runs.

    Args:
        parent: Scope that this one ends with.
        wait: How to wait for an event, at most so many seconds.
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
        """Why it has ended, for the callers of what it has cancelled: the widest scope that has ended tells."""
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
