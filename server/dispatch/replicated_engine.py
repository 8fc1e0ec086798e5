"""A model's engine that is several: the desk, its replicas, and the front end's attachment, all in one process."""

import asyncio
from collections.abc import Callable, Sequence

from dragoman.server.dispatch.attached_engine import AttachedEngine
from dragoman.server.dispatch.direct_link import DirectLink
from dragoman.server.engine.messages import Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.workers.pool import ReplicaPool
from dragoman.server.workers.supervisor import RestartPolicy, stopped_unless_started


class ReplicatedEngine(AttachedEngine):
    """What the core calls, and what is started and stopped; see `SupervisedEngine` for the same of one engine.

    What a replica was doing when it dies ends once with `Unavailable`; what waited goes to the others. Only while there is none
    does everything end so.

    Attributes:
        settings: Of the first replica; those of the others differ in their cores.
        pool: What keeps the replicas running.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[EngineSettings],
        policy: RestartPolicy,
        *,
        on_statistics: Callable[[Statistics], None],
        on_engine_statistics: Callable[[int, Statistics], None],
        on_change: Callable[[], None],
        on_engine_change: Callable[[int], None],
        on_restart: Callable[[int], None],
    ) -> None:
        """Describe engines; `start` starts them.

        Args:
            name: Of the model, for messages.
            settings: Of each replica.
            policy: When to restart one.
            on_statistics: Called with what the desk says of the model, see `Desk.statistics`.
            on_engine_statistics: See `ReplicaPool`.
            on_change: Called when `is_ready` has changed.
            on_engine_change: Called when a replica's `is_ready` has changed.
            on_restart: See `ReplicaPool`.
        """
        self.settings = settings[0]
        self.pool = ReplicaPool(
            name,
            settings,
            policy,
            on_statistics=on_engine_statistics,
            on_change=on_engine_change,
            on_restart=on_restart,
        )
        super().__init__(
            name,
            lambda: DirectLink(self.pool.desk),
            policy.initial_backoff_seconds,
            on_statistics=on_statistics,
            on_change=on_change,
        )

    @property
    def num_replicas(self) -> int:
        """Engines, whether they are ready or not."""
        return len(self.pool.replicas)

    @property
    def process_ids(self) -> list[int]:
        """Of the engines that have a process at the moment."""
        return [replica.process_id for replica in self.pool.replicas if replica.process_id is not None]

    async def start(self, *, is_persistent: bool = False) -> None:
        """Start replicas; done once one is ready.

        Args:
            is_persistent: Whether they are tried again also if none can be started at first.

        Raises:
            EngineCannotStart: If none can be, at the first try.
        """
        self.begin()
        async with stopped_unless_started(self.stop, is_persistent=is_persistent):
            await self.pool.start(is_persistent=is_persistent)
            await self.until_ready()

    async def stop(self) -> None:
        """End all; what still runs or waits ends with `Unavailable`."""
        await asyncio.gather(self.pool.stop(), super().stop())
