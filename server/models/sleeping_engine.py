"""What stands in an engine's place while its model is asleep: it is described, and nothing of it is loaded."""

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn

from dragoman.server.engine.messages import Finished, Ready, Request, Scored, ScoreRequest, Share, Statistics, Tokens
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import NotReady


class SleepingEngine:
    """Takes no request by itself: whoever holds a model waits until it is awake, see `Repository.hold`.

    Attributes:
        name: Of the model.
        settings: With which its engines are started.
        num_replicas: Engines that it has when it is awake.
        device: What they have run on; empty if they never have.
        is_ready: True: requests are welcome, they wake it.
        ready: None: nothing has said anything.
        process_ids: None.
    """

    is_ready = True
    ready: Ready | None = None
    process_ids: tuple[int, ...] = ()

    def __init__(self, name: str, settings: EngineSettings, num_replicas: int, device: str) -> None:
        """Describe what is not there; see the attributes."""
        self.name, self.settings, self.num_replicas, self.device = name, settings, num_replicas, device

    def begin(self) -> None:
        """Do nothing, as the next three: there is nothing to attach to, to start, or to end."""

    async def until_ready(self) -> None:
        """See `begin`."""

    async def start(self, *, is_persistent: bool = False) -> None:
        """See `begin`."""

    async def stop(self) -> None:
        """See `begin`."""

    def next_id(self) -> int:
        """Refuse, as the next six.

        Raises:
            NotReady: Always.
        """
        self._refuse()

    def ensure_place(self, share: Share) -> None:
        """See `next_id`."""
        self._refuse()

    async def generate(self, request: Request) -> Finished:
        """See `next_id`."""
        self._refuse()

    def stream(self, request: Request) -> AsyncIterator[Tokens | Finished]:
        """See `next_id`."""
        self._refuse()

    async def score(self, request: ScoreRequest) -> Scored:
        """See `next_id`."""
        self._refuse()

    def statistics(self) -> Statistics:
        """See `next_id`."""
        self._refuse()

    def watch(self) -> asyncio.Future[Snapshot]:
        """See `next_id`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotReady(f"model {self.name!r} is asleep")
