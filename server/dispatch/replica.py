"""The dispatcher's attachment to one process of a replica: its events go to the dispatcher, commands of the dispatcher to it."""

import asyncio
import time
from collections.abc import Callable

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.dispatch.link import Link
from dragoman.server.engine.messages import Event, Fatal, Hello, Ready, Report, Statistics, Stop
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import Unavailable


class ReplicaAttachment:
    """One incarnation of an engine process, as its supervisor sees it.

    Attributes:
        ready: Resolves to the engine's `Ready`; fails with `Unavailable` if the engine cannot start.
        last_heard: `time.monotonic()` of the last message.
        has_failed: Whether `fail` was called.
        fatal: Reason why the engine cannot start, once it has reported that.
    """

    def __init__(self, dispatcher: Dispatcher, index: int, endpoint: str, on_statistics: Callable[[Statistics], None]) -> None:
        """Attach.

        Args:
            dispatcher: It gives work to the replica, from when that is ready until `fail`.
            index: Of the replica.
            endpoint: Of the engine.
            on_statistics: Called with each report's statistics, before the dispatcher takes in the report.
        """
        self._dispatcher, self._index, self._on_statistics = dispatcher, index, on_statistics
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.last_heard = time.monotonic()
        self.has_failed = False
        self.fatal: str | None = None
        self._link = Link(endpoint, self._hear, lambda: self.fail(Unavailable("the engine cannot be understood")))
        self._link.send(Hello())

    def stop_engine(self) -> None:
        """Tell the engine process to end."""
        self._link.send(Stop())

    def fail(self, error: Unavailable) -> None:
        """Have the dispatcher end what the replica had, and give it nothing more."""
        self.has_failed = True
        self._dispatcher.close_engine(self._index, error.retry_after_seconds or 0.0)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved, even where nobody waits for it

    async def close(self) -> None:
        """Detach."""
        self._link.close()

    def _hear(self, event: Event) -> None:
        self.last_heard = time.monotonic()
        match event:
            case Report() if not self.has_failed:
                self._on_statistics(event.statistics)
                self._dispatcher.hear(self._index, event)
            case Snapshot() if not self.has_failed:
                self._dispatcher.hear_snapshot(self._index, event)
            case Ready() if not (self.ready.done() or self.has_failed):
                self.ready.set_result(event)
                self._dispatcher.open_engine(self._index, event, self._link.send)
            case Fatal(reason):
                self.fatal = reason
                self.fail(Unavailable("the engine cannot start"))
