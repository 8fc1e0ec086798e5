"""Replicas of one model, started, watched and restarted."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from msgspec.structs import replace

from dragoman.server.dispatch.desk import Desk
from dragoman.server.engine.link import Link, ZmqLink
from dragoman.server.engine.messages import Event, Fatal, Hello, Ready, Report, Statistics, Stop
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import Unavailable
from dragoman.server.workers.supervisor import EngineCannotStart, RestartPolicy, Supervisor, stopped_unless_started


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


log = structlog.get_logger("dragoman.supervisor")

UNLIMITED = 2**31 - 1


class ReplicaPool:
    """See above. The model is ready while at least one replica is.

    Attributes:
        name: Of the model.
        desk: What front ends attach to.
        replicas: What keeps each running.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[EngineSettings],
        policy: RestartPolicy,
        *,
        on_statistics: Callable[[int, Statistics], None],
        on_change: Callable[[int], None],
        on_restart: Callable[[int], None],
    ) -> None:
        """Describe replicas; `start` starts them.

        Args:
            name: Of the model, for messages.
            settings: Of each replica; the queue's limits, the same in all, are those of the model as a whole.
            policy: When to restart one.
            on_statistics: Called with a replica's index and each of its reports' statistics.
            on_change: Called when a replica's `is_ready` has changed.
            on_restart: Called when a dead replica is about to be replaced.
        """
        self.name, self._policy = name, policy
        self.desk = Desk(settings[0].limits)
        self._on_statistics = on_statistics
        self.replicas = [
            Supervisor(
                name,
                of_replica(one),
                policy,
                partial(self._attach, index),
                is_inline=False,
                on_end=partial(on_statistics, index, Statistics()),  # nothing runs or waits there any more
                on_change=partial(on_change, index),
                on_restart=partial(on_restart, index),
                replica=index,
            )
            for index, one in enumerate(settings)
        ]

    @property
    def ready(self) -> Ready | None:
        """What the first replica has said that is ready; None if none is."""
        return next((replica.ready for replica in self.replicas if replica.ready is not None), None)

    @property
    def device(self) -> str:
        """What they run on; empty until one was ready once."""
        return next((replica.device for replica in self.replicas if replica.device), "")

    async def start(self, *, is_persistent: bool = False) -> None:
        """Start replicas and keep them running; done once one is ready.

        The first goes first, and has the machine to itself until it is ready: so the server is ready soonest, and what replicas
        share is made once. The others then start beside it. One that cannot start is tried again as long as another can.

        Args:
            is_persistent: Whether they are tried again also if none can be started at first.

        Raises:
            EngineCannotStart: If none can; for the reason of the first.
        """
        async with stopped_unless_started(self.stop, is_persistent=is_persistent):
            await self._start()

    async def stop(self) -> None:
        """End all; what still runs or waits ends with `Unavailable`."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def _start(self) -> None:
        first, others = self.replicas[0], self.replicas[1:]
        reason: EngineCannotStart | None = None
        try:
            await first.begin(is_persistent=True)
        except EngineCannotStart as error:
            reason = error
            self._tell_failure(0, error)
        starting = {replica.begin(is_persistent=True): index for index, replica in enumerate(others, 1)}
        for future, index in starting.items():
            future.add_done_callback(partial(self._on_started, index))
        if reason is None:
            return
        waiting = set(starting)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() is None for future in done):
                return
        raise reason

    def _on_started(self, index: int, future: asyncio.Future[None]) -> None:
        """Say of a replica that it could not start the first time; nobody else may be there to hear it."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self._tell_failure(index, error)

    def _tell_failure(self, index: int, error: BaseException) -> None:
        log.error("replica cannot start", model=self.name, replica=index, reason=str(error))

    def _attach(self, index: int, endpoint: str) -> ReplicaAttachment:
        return ReplicaAttachment(self.desk, index, ZmqLink(endpoint), partial(self._on_statistics, index))


def of_replica(settings: EngineSettings) -> EngineSettings:
    """Return the settings of a replica: it takes whatever the desk gives it, which keeps the queue's limits."""
    return replace(settings, max_waiting_requests=UNLIMITED, max_waiting_tokens=UNLIMITED)
