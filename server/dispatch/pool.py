"""The replicas of one model, kept running behind its dispatcher: each is started, watched and restarted by itself."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.dispatch.replica import ReplicaAttachment
from dragoman.server.engine.messages import Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.supervisor import EngineCannotStart, RestartPolicy, Supervisor, stopped_unless_started

log = structlog.get_logger("dragoman.supervisor")


class ReplicaPool:
    """See above. The model is ready while at least one replica is.

    Attributes:
        name: Of the model.
        dispatcher: It gives them work.
        replicas: What keeps each running.
    """

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher,
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
            dispatcher: It gives them work.
            settings: Of each replica.
            policy: When to restart one.
            on_statistics: Called with a replica's index and each of its reports' statistics.
            on_change: Called when a replica's `is_ready` has changed.
            on_restart: Called when a dead replica is about to be replaced.
        """
        self.name, self._policy = name, policy
        self.dispatcher = dispatcher
        self._on_statistics = on_statistics
        self.replicas = [
            Supervisor(
                name,
                one,
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
        return ReplicaAttachment(self.dispatcher, index, endpoint, partial(self._on_statistics, index))
