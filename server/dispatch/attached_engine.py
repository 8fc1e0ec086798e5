"""A model's engine as a front end has it whose requests go to a desk, wherever that is."""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from dragoman.server.engine.client import EngineClient
from dragoman.server.engine.link import Link
from dragoman.server.engine.messages import Ready, Statistics
from dragoman.server.errors import NotReady, Unavailable
from dragoman.server.workers.engine_calls import EngineCalls

log = structlog.get_logger("dragoman.supervisor")


class AttachedEngine(EngineCalls):
    """See above. It attaches, and when the desk has been down attaches anew, until it is stopped.

    Attributes:
        ready: What the desk has said; None while the model is not ready.
        device: What the model runs on; empty until it was ready once.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Link],
        retry_seconds: float,
        *,
        on_statistics: Callable[[Statistics], None],
        on_change: Callable[[], None],
    ) -> None:
        """Describe the attachment; `begin` begins it.

        Args:
            name: Of the model, for messages.
            connect: Returns a new link to the desk.
            retry_seconds: What callers are told who come while the model is not ready.
            on_statistics: Called with each report's statistics.
            on_change: Called when `is_ready` has changed.
        """
        super().__init__()
        self.name = name
        self.ready: Ready | None = None
        self.device = ""
        self._connect, self._retry_seconds = connect, retry_seconds
        self._on_statistics, self._on_change = on_statistics, on_change
        self._is_ready = asyncio.Event()
        self._client: EngineClient | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self.ready is not None and self._client is not None and not self._client.has_failed

    def begin(self) -> None:
        """Attach, and stay attached."""
        self._task = asyncio.create_task(self._stay_attached(), name=f"attachment {self.name}")

    async def until_ready(self) -> None:
        """Wait until the model is ready."""
        await self._is_ready.wait()

    async def stop(self) -> None:
        """Detach; what still runs ends with `Unavailable`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ready_client(self) -> EngineClient:
        """See `EngineCalls`."""
        if not self.is_ready:
            raise NotReady(f"model {self.name!r} is not ready", retry_after_seconds=self._retry_seconds)
        assert self._client is not None
        return self._client

    async def _stay_attached(self) -> None:
        while True:
            try:
                link = self._connect()
            except Exception:  # such as that there is no room for a socket; the next time may be luckier
                log.exception("cannot attach to the desk", model=self.name)
                await asyncio.sleep(self._retry_seconds)
                continue
            self._client = client = EngineClient(link, self._on_statistics)
            try:
                with contextlib.suppress(Unavailable):
                    self.ready = await client.ready
                    self.device = self.ready.device
                    self._is_ready.set()
                    self._on_change()
                    await client.failed.wait()
            finally:
                client.fail(Unavailable(f"the engine of model {self.name!r} ended", self._retry_seconds))
                await client.close()
                self._client = self.ready = None
                self._is_ready.clear()
                self._on_statistics(Statistics())  # nothing runs or waits any more
                self._on_change()
