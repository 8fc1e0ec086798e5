"""A front end's side of an engine: requests out, answers to whoever waits for them.

What an event-loop turn submits and cancels leaves as one message each; what one message brings is handed out in one pass.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from dragoman.server.engine.link import Link
from dragoman.server.engine.messages import (
    Cancel,
    Down,
    Event,
    Fatal,
    Finished,
    Hello,
    Ready,
    Report,
    Request,
    Score,
    Scored,
    ScoreRequest,
    Share,
    Statistics,
    Stop,
    Submit,
    Tokens,
)
from dragoman.server.engine.snapshot import Snapshot, Watch
from dragoman.server.errors import QueueFull, Unavailable

Waiter = asyncio.Future[Finished] | asyncio.Queue[Tokens | Finished | Unavailable]


class EngineClient:
    """One attachment to one incarnation of an engine process, or to a desk before several; it does not survive their end.

    Attributes:
        ready: Resolves to the engine's `Ready`; fails with `Unavailable` if the engine cannot start.
        last_heard: `time.monotonic()` of the last message.
        failed: Set by `fail`; it takes no requests any more.
        fatal: Why the engine cannot start, once it has said so.
    """

    def __init__(self, link: Link, on_statistics: Callable[[Statistics], None]) -> None:
        """Attach; must be called within the event loop that uses it.

        Args:
            link: To the engine; its own from now on.
            on_statistics: Called with each report's statistics.
        """
        self._loop = asyncio.get_running_loop()
        self._on_statistics = on_statistics
        self._link = link
        self._waiters: dict[int, Waiter] = {}
        self._score_waiters: dict[int, asyncio.Future[Scored]] = {}
        self._to_submit: list[Request] = []
        self._to_score: list[ScoreRequest] = []
        self._to_cancel: list[int] = []
        self._error: Unavailable | None = None
        self._num_submitted = 0
        self._num_places: int | None = None
        self._statistics = Statistics()
        self._callers_on_their_way: set[str] = set()
        self._watching: asyncio.Future[Snapshot] | None = None
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.last_heard = time.monotonic()
        self.fatal: str | None = None
        self.failed = asyncio.Event()
        link.open(self._hear, lambda: self.fail(Unavailable("the engine cannot be understood")))
        link.send(Hello())

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called."""
        return self._error is not None

    @property
    def num_outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._waiters) + len(self._score_waiters)

    def ensure_place(self, share: Share) -> None:
        """Do nothing if the engine's queue probably has a place for a caller; it says for sure when a request gets there.

        A caller can so be refused before anything is done for it, and need not wait for the engine's step to end. Where the queue
        is full but the caller may push somebody out of it, the engine is asked.

        Args:
            share: Whose request it is.

        Raises:
            QueueFull: If there were no more places after the last step than have been taken since, or none for this caller.
        """
        seconds = self._statistics.at_their_limit.get(share.caller)
        if seconds is not None:
            raise QueueFull("too many requests are waiting", seconds, limit="max_waiting")
        if self._num_places is not None and self._num_places <= 0:
            self._refuse(share.caller)

    async def generate(self, request: Request) -> Finished:
        """Submit a request and wait for its end; cancelling the waiting task cancels the request.

        Raises:
            Unavailable: If the engine is gone, or goes before the answer.
        """
        future: asyncio.Future[Finished] = self._loop.create_future()
        self._submit(request, future)
        try:
            return await future
        finally:
            self._forget(request.id)

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Finished, None]:
        """Submit a request and yield what comes, its end last; closing the iterator early cancels the request.

        Raises:
            Unavailable: If the engine is gone, or goes before the end.
        """
        queue: asyncio.Queue[Tokens | Finished | Unavailable] = asyncio.Queue()
        self._submit(request, queue)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, Unavailable):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._forget(request.id)

    async def score(self, request: ScoreRequest) -> Scored:
        """Submit a pair and wait for its end; cancelling the waiting task cancels it.

        Raises:
            Unavailable: If the engine is gone, or goes before the answer.
        """
        future: asyncio.Future[Scored] = self._loop.create_future()
        self._check()
        self._score_waiters[request.id] = future
        self._schedule_submissions()
        self._to_score.append(request)
        try:
            return await future
        finally:
            self._forget(request.id)

    @property
    def statistics(self) -> Statistics:
        """What it said of itself last."""
        return self._statistics

    def watch(self) -> asyncio.Future[Snapshot]:
        """Ask what every slot does, unless that is asked already; return what will have the answer.

        It is shared: do not cancel it. It fails with `Unavailable` if the engine is gone, or goes before it answers.
        """
        if self._watching is None or self._watching.done():
            self._watching = self._loop.create_future()
            if self._error is not None:
                self._end_watching(self._error)
            else:
                self._link.send(Watch())
        return self._watching

    def stop_engine(self) -> None:
        """Tell the engine process to end."""
        self._link.send(Stop())

    def fail(self, error: Unavailable) -> None:
        """End everything that waits with an error, once, and refuse what comes later with the same."""
        self._error = error
        self.failed.set()
        waiters = [*self._waiters.values(), *self._score_waiters.values()]
        self._waiters, self._score_waiters = {}, {}
        for waiter in waiters:
            if isinstance(waiter, asyncio.Queue):
                waiter.put_nowait(error.copy())
            elif not waiter.done():
                waiter.set_exception(error.copy())
        self._end_watching(error)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen, even where nobody waits for it

    async def close(self) -> None:
        """Detach; call `fail` before, if anything may still wait."""
        self._link.close()

    def _end_watching(self, error: Unavailable) -> None:
        if self._watching is not None and not self._watching.done():
            self._watching.set_exception(error)
            self._watching.exception()  # seen, even where nobody waits for it

    def _refuse(self, caller: str) -> None:
        """Raise that the queue is full, unless there may be somebody in it who has more than a caller."""
        waiting = self._statistics.without_claim
        if waiting is not None and caller in waiting:
            raise QueueFull("too many requests are waiting", waiting[caller])
        if waiting == {} and self._callers_on_their_way <= {caller}:
            raise QueueFull("too many requests are waiting", self._statistics.retry_after_seconds)

    def _submit(self, request: Request, waiter: Waiter) -> None:
        self._check()
        self._waiters[request.id] = waiter
        self._schedule_submissions()
        self._to_submit.append(request)
        self._num_submitted += 1
        self._callers_on_their_way.add(request.share.caller)
        if self._num_places is not None:
            self._num_places -= 1

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.copy()

    def _schedule_submissions(self) -> None:
        """Call it before the first submission of a turn is noted."""
        if not (self._to_submit or self._to_score):
            self._loop.call_soon(self._flush_submissions)

    def _forget(self, request_id: int) -> None:
        """Cancel a request that has not ended; its waiter is gone."""
        if self._waiters.pop(request_id, None) is not None or self._score_waiters.pop(request_id, None) is not None:
            if not self._to_cancel:
                self._loop.call_soon(self._flush_cancellations)
            self._to_cancel.append(request_id)

    def _flush_submissions(self) -> None:
        """Send what has been submitted; nothing if a cancellation in the same turn took it along."""
        requests, self._to_submit = self._to_submit, []
        if requests:
            self._link.send(Submit(requests))
        pairs, self._to_score = self._to_score, []
        if pairs:
            self._link.send(Score(pairs))

    def _flush_cancellations(self) -> None:
        self._flush_submissions()  # a cancellation stays behind the submission it belongs to
        ids, self._to_cancel = self._to_cancel, []
        self._link.send(Cancel(ids))

    def _hear(self, event: Event) -> None:
        self.last_heard = time.monotonic()
        match event:
            case Report():
                self._deliver(event)
            case Snapshot():
                if self._watching is not None and not self._watching.done():
                    self._watching.set_result(event)
            case Ready() if not self.ready.done():
                self.ready.set_result(event)
            case Fatal(reason):
                self.fatal = reason
                self.fail(Unavailable("the engine cannot start"))
            case Down(reason, retry_after_seconds):
                self.fail(Unavailable(reason, retry_after_seconds))

    def _deliver(self, report: Report) -> None:
        for tokens in report.tokens:
            if isinstance(queue := self._waiters.get(tokens.id), asyncio.Queue):
                queue.put_nowait(tokens)
        for finished in report.finished:
            waiter = self._waiters.pop(finished.id, None)
            if isinstance(waiter, asyncio.Queue):
                waiter.put_nowait(finished)
            elif waiter is not None and not waiter.done():
                waiter.set_result(finished)
        for scored in report.scored:
            future = self._score_waiters.pop(scored.id, None)
            if future is not None and not future.done():
                future.set_result(scored)
        num_on_their_way = self._num_submitted - report.num_received
        if not num_on_their_way:
            self._callers_on_their_way.clear()
        if (num_places := report.statistics.num_places) is not None:
            num_places -= num_on_their_way
        self._num_places = num_places
        self._statistics = report.statistics
        self._on_statistics(report.statistics)
