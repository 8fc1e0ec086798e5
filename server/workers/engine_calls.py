"""What the core asks of a model's engine, handed on to whichever client is attached to it at the moment."""

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from dragoman.server.engine.client import EngineClient
from dragoman.server.engine.messages import Finished, Request, Scored, ScoreRequest, Share, Statistics, Tokens
from dragoman.server.engine.snapshot import Snapshot


class EngineCalls(ABC):
    """The calls of `core.ports.Engine`; clients come and go."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    @abstractmethod
    def ready_client(self) -> EngineClient:
        """Return the client to ask.

        Raises:
            Unavailable: If the engine is down.
        """

    def next_id(self) -> int:
        """Return a request id that this engine has not seen."""
        return next(self._ids)

    def ensure_place(self, share: Share) -> None:
        """See `EngineClient.ensure_place`.

        Raises:
            Unavailable: If the engine is down.
        """
        self.ready_client().ensure_place(share)

    async def generate(self, request: Request) -> Finished:
        """See `EngineClient.generate`."""
        return await self.ready_client().generate(request)

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Finished, None]:
        """See `EngineClient.stream`."""
        async with contextlib.aclosing(self.ready_client().stream(request)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        """See `EngineClient.score`."""
        return await self.ready_client().score(request)

    def statistics(self) -> Statistics:
        """Return what it said of itself last.

        Raises:
            Unavailable: If the engine is down.
        """
        return self.ready_client().statistics

    def watch(self) -> asyncio.Future[Snapshot]:
        """See `EngineClient.watch`.

        Raises:
            Unavailable: If the engine is down.
        """
        return self.ready_client().watch()
