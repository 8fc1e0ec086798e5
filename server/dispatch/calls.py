"""Interface between the service and a model's dispatcher, local or remote."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

from dragoman.server.engine.messages import (
    Finished,
    FinishReason,
    Request,
    Scored,
    ScoreRequest,
    Share,
    Snapshot,
    Statistics,
    Tokens,
)
from dragoman.server.errors import NotReady


class Calls(ABC):
    """Requests to one model; submission, `ensure_place` and `watch` raise `NotReady` while the model is not ready."""

    def __init__(self, name: str, retry_seconds: float) -> None:
        self.name, self.retry_seconds = name, retry_seconds
        self._ids = itertools.count(1)

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the model accepts requests now."""

    @abstractmethod
    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Queue a request, whose id comes from `next_id`; its end may be delivered before this returns.

        `deliver` gets each `Tokens` of a streamed request, then its `Finished` or `Scored`; it must not raise.
        """

    @abstractmethod
    def cancel(self, request_id: int) -> None:
        """Cancel a request and deliver nothing more of it; no effect if it has ended."""

    @abstractmethod
    def ensure_place(self, share: Share) -> None:
        """Raise `QueueFull` if the queue probably has no room for a caller's request, before any work is done for it."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the last reported state of queue and engines."""

    @abstractmethod
    def watch(self) -> asyncio.Future[Snapshot]:
        """Return a shared future of a snapshot of all engines, not to be cancelled."""

    def next_id(self) -> int:
        """Return a new request id."""
        return next(self._ids)

    def generate(self, request: Request) -> Coroutine[Any, Any, Finished]:
        """Submit a request and wait for its end; cancelling the waiting task cancels the request."""
        return self._end_of(request)

    def score(self, request: ScoreRequest) -> Coroutine[Any, Any, Scored]:
        """Submit a score request and wait for its end, as `generate` does."""
        return self._end_of(request)

    async def _end_of(self, request: Request | ScoreRequest) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.submit(request, partial(_resolve, future))
        try:
            return await future
        finally:
            if future.cancelled():
                self.cancel(request.id)

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Finished, None]:
        """Submit a request and yield its tokens and its end; closing the iterator early cancels the request."""
        queue: asyncio.Queue[Tokens | Finished] = asyncio.Queue()
        self.submit(request, queue.put_nowait)
        try:
            while not isinstance(event := await queue.get(), Finished):
                yield event
            yield event
        finally:
            self.cancel(request.id)

    def check_ready(self) -> None:
        """Raise `NotReady` if the model does not accept requests now."""
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
