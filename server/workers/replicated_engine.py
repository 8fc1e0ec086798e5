"""A model's engines with their dispatcher, all started and stopped together."""

from collections.abc import Callable, Sequence

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.engine.messages import Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.workers.pool import ReplicaPool
from dragoman.server.workers.supervisor import RestartPolicy, stopped_unless_started


class ReplicatedEngine(Dispatcher):
    """A dispatcher that starts its engines.

    Requests that a replica had when it dies end once with `Unavailable`; waiting requests go to the others. With the last replica
    everything ends so.

    Attributes:
        settings: Of the first replica; those of the others differ in their cores.
        pool: Keeps the replicas running.
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
            on_statistics: Called with those of the model after each report of an engine.
            on_engine_statistics: See `ReplicaPool`.
            on_change: Called when `is_ready` has changed.
            on_engine_change: Called when a replica's `is_ready` has changed.
            on_restart: See `ReplicaPool`.
        """
        self.settings = settings[0]
        super().__init__(
            name,
            self.settings.queue_limits,
            self.settings.limits.prefill_tokens_per_step,
            retry_seconds=policy.initial_backoff_seconds,
            on_statistics=on_statistics,
            on_change=on_change,
        )
        self.pool = ReplicaPool(
            name,
            self,
            settings,
            policy,
            on_statistics=on_engine_statistics,
            on_change=on_engine_change,
            on_restart=on_restart,
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
        async with stopped_unless_started(self.stop, is_persistent=is_persistent):
            await self.pool.start(is_persistent=is_persistent)

    async def stop(self) -> None:
        """End all; what still runs or waits ends with `Unavailable`."""
        await self.pool.stop()
