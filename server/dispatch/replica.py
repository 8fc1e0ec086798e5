"""The desk's attachment to one incarnation of a replica: what comes goes to the desk, what the desk says goes out."""

import asyncio
import time
from collections.abc import Callable

from dragoman.server.dispatch.desk import Desk
from dragoman.server.engine.link import Link
from dragoman.server.engine.messages import Event, Fatal, Hello, Ready, Report, Statistics, Stop
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import Unavailable


class ReplicaAttachment:
    """See above; for its supervisor it is what `EngineClient` is for that of a model's only engine.

    Attributes:
        ready: See `EngineClient`, as the next three.
        last_heard: See `EngineClient`.
        has_failed: See `EngineClient`.
        fatal: See `EngineClient`.
    """

    def __init__(self, desk: Desk, index: int, link: Link, on_statistics: Callable[[Statistics], None]) -> None:
        """Attach.

        Args:
            desk: Which gives work to the replica, from when it is ready until `fail`.
            index: Of the replica.
            link: To the engine; its own from now on.
            on_statistics: Called with each report's statistics, before the desk goes on with what the report brings.
        """
        self._desk, self._index, self._link, self._on_statistics = desk, index, link, on_statistics
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.last_heard = time.monotonic()
        self.has_failed = False
        self.fatal: str | None = None
        link.open(self._hear, lambda: self.fail(Unavailable("the engine cannot be understood")))
        link.send(Hello())

    def stop_engine(self) -> None:
        """Tell the engine process to end."""
        self._link.send(Stop())

    def fail(self, error: Unavailable) -> None:
        """Have the desk end what the replica had, and give it nothing more."""
        self.has_failed = True
        self._desk.close_replica(self._index, error.message, error.retry_after_seconds or 0.0)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen, even where nobody waits for it

    async def close(self) -> None:
        """Detach."""
        self._link.close()

    def _hear(self, event: Event) -> None:
        self.last_heard = time.monotonic()
        match event:
            case Report() if not self.has_failed:
                self._on_statistics(event.statistics)
                self._desk.hear(self._index, event)
            case Snapshot() if not self.has_failed:
                self._desk.hear_snapshot(self._index, event)
            case Ready() if not (self.ready.done() or self.has_failed):
                self.ready.set_result(event)
                self._desk.open_replica(self._index, event, self._link.send)
            case Fatal(reason):
                self.fatal = reason
                self.fail(Unavailable("the engine cannot start"))
