"""Placeholder of a model's engines while the model is unloaded."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from dragoman.server.dispatch.calls import Calls
from dragoman.server.engine.messages import Ready, Request, ScoreRequest, Share, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import NotReady


class SleepingEngine(Calls):
    """Refuses every request with `NotReady`; requests wait for the model before they get here, see `Repository.hold`.

    Attributes:
        settings: Of the engines once the model is loaded.
        num_replicas: Engines that it has then.
        device: Device that they have run on; empty if they never have.
        is_ready: True: requests are accepted, and load the model.
        ready: None.
        process_ids: None.
    """

    is_ready = True
    ready: Ready | None = None
    process_ids: tuple[int, ...] = ()

    def __init__(self, name: str, settings: EngineSettings, num_replicas: int, device: str) -> None:
        """Describe engines that are not loaded; see the attributes."""
        super().__init__(name, 0.0)
        self.settings, self.num_replicas, self.device = settings, num_replicas, device

    async def start(self, *, is_persistent: bool = False) -> None:
        """Do nothing, as the next two."""

    async def stop(self) -> None:
        """See `start`."""

    def cancel(self, request_id: int) -> None:
        """See `start`."""

    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Raise `NotReady`, as the next three."""
        self._refuse()

    def ensure_place(self, share: Share) -> None:
        """See `submit`."""
        self._refuse()

    def statistics(self) -> Statistics:
        """See `submit`."""
        self._refuse()

    def watch(self) -> asyncio.Future[Snapshot]:
        """See `submit`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotReady(f"model {self.name!r} is asleep")
