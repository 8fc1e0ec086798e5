"""Requests to a model, as the service makes them: on the dispatcher itself, or on a remote attachment to it."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from dragoman.server.engine.messages import Finished, FinishReason, Request, Scored, ScoreRequest, Share, Statistics, Tokens
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import NotReady


class Calls(ABC):
    """Waiting for the ends of requests.

    Attributes:
        name: Of the model, for messages.
        retry_seconds: Hint for callers while the model is not ready.
    """

    def __init__(self, name: str, retry_seconds: float) -> None:
        self.name, self.retry_seconds = name, retry_seconds
        self._ids = itertools.count(1)

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether requests are taken now."""

    @abstractmethod
    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Take a request; may deliver its end at once.

        Args:
            request: Its id is one of `next_id`.
            deliver: Called with each `Tokens` of a streamed request, and then with its `Finished` or `Scored`; it must not raise.

        Raises:
            NotReady: If the model is not ready.
        """

    @abstractmethod
    def cancel(self, request_id: int) -> None:
        """End a request, of which nothing more is delivered; without effect for one that has ended."""

    @abstractmethod
    def ensure_place(self, share: Share) -> None:
        """Return if the queue probably has a place for a caller's request; so it can be refused before any work is done for it.

        Raises:
            QueueFull: If it has none.
            NotReady: If the model is not ready.
        """

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the state of queue and engines, as last reported.

        Raises:
            NotReady: If the model is not ready.
        """

    @abstractmethod
    def watch(self) -> asyncio.Future[Snapshot]:
        """Ask every engine for its slots, unless that is under way; return the shared future of the answer, not to be cancelled.

        Raises:
            NotReady: If the model is not ready.
        """

    def next_id(self) -> int:
        """Return an id for a request."""
        return next(self._ids)

    async def generate(self, request: Request) -> Finished:
        """Submit a request and wait for its end; cancelling the waiting task cancels the request.

        Raises:
            NotReady: If the model is not ready.
        """
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self.submit(request, partial(_resolve, future))
        try:
            return await future
        finally:
            if future.cancelled():
                self.cancel(request.id)

    async def score(self, request: ScoreRequest) -> Scored:
        """Submit a score request and wait for its end; see `generate`."""
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self.submit(request, partial(_resolve, future))
        try:
            return await future
        finally:
            if future.cancelled():
                self.cancel(request.id)

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Finished, None]:
        """Submit a request and yield its tokens and its end; closing the iterator early cancels the request.

        Raises:
            NotReady: If the model is not ready.
        """
        queue: asyncio.Queue[Tokens | Finished] = asyncio.Queue()
        self.submit(request, queue.put_nowait)
        try:
            while not isinstance(event := await queue.get(), Finished):
                yield event
            yield event
        finally:
            self.cancel(request.id)

    def check_ready(self) -> None:
        """Raise `NotReady` if requests are not taken now."""
        if not self.is_ready:
            raise NotReady(f"model {self.name!r} is not ready", retry_after_seconds=self.retry_seconds)


def ending(request: Request | ScoreRequest, reason: FinishReason, now: float, **details: Any) -> Finished | Scored:
    """Return the end of a request that no engine has run."""
    if isinstance(request, ScoreRequest):
        return Scored(request.id, reason, [], b"", now, **details)
    return Finished(request.id, reason, [], 0, None, 0.0, None, now, **details)


def _resolve(future: asyncio.Future[Any], event: Any) -> None:
    if not future.done():
        future.set_result(event)
