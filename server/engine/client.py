"""A frontend's client of a model's dispatcher: requests out, answers to the tasks that await them.

Submissions and cancellations of one event-loop turn leave as one message each; the events of one message are delivered in one pass.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

from dragoman.server.engine.link import Link
from dragoman.server.engine.messages import (
    Cancel,
    Down,
    Event,
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
    Submit,
    Tokens,
)
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.snapshot import Snapshot, Watch
from dragoman.server.errors import NotReady, QueueFull, Unavailable

Waiter = asyncio.Future[Finished] | asyncio.Queue[Tokens | Finished | Unavailable]


class EngineClient:
    """Client of one model's dispatcher, wherever that is. It outlives engines: requests fail while none is ready.

    Attributes:
        name: Of the model.
        settings: Of its engines, but for what is theirs alone.
        num_replicas: Engines of the model.
        ready: Message of an engine that is ready; None while the model is not.
        device: Device that the model runs on; empty until it was ready once.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        settings: EngineSettings,
        num_replicas: int,
        retry_seconds: float,
        *,
        on_statistics: Callable[[Statistics], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Describe the client; `open` attaches it.

        Args:
            name: Of the model, for messages.
            link: To the dispatcher; closed with the client.
            settings: Of the engines.
            num_replicas: Engines of the model.
            retry_seconds: When requests should be retried that come while the model is not ready.
            on_statistics: Called with each report's statistics, and with empty ones when the model is not ready any more.
            on_change: Called when `is_ready` has changed.
        """
        self.name, self.settings, self.num_replicas = name, settings, num_replicas
        self.ready: Ready | None = None
        self.device = ""
        self._link, self._retry_seconds = link, retry_seconds
        self._on_statistics, self._on_change = on_statistics, on_change
        self._ids = itertools.count(1)
        self._waiters: dict[int, Waiter] = {}
        self._score_waiters: dict[int, asyncio.Future[Scored]] = {}
        self._to_submit: list[Request] = []
        self._to_score: list[ScoreRequest] = []
        self._to_cancel: list[int] = []
        self._num_submitted = 0
        self._num_places: int | None = None
        self._statistics = Statistics()
        self._callers_on_their_way: set[str] = set()
        self._watching: asyncio.Future[Snapshot] | None = None
        self._is_ready = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self.ready is not None

    @property
    def num_outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._waiters) + len(self._score_waiters)

    def open(self) -> None:
        """Attach to the dispatcher; must be called within the event loop that uses the client."""
        self._loop = asyncio.get_running_loop()
        self._link.open(self._receive, self._attach_anew)
        self._link.send(Hello())

    def close(self) -> None:
        """Detach; requests that have not ended fail with `Unavailable`."""
        self._link.close()
        self._fail(Unavailable(f"the engine of model {self.name!r} ended", self._retry_seconds))

    async def until_ready(self) -> None:
        """Wait until the model is ready."""
        await self._is_ready.wait()

    def next_id(self) -> int:
        """Return an id that no other request of this client has."""
        return next(self._ids)

    def ensure_place(self, share: Share) -> None:
        """Do nothing if the engine's queue probably has a place for a caller; it says for sure when a request gets there.

        A caller can so be refused before anything is done for it, and need not wait for the engine's step to end. Where the queue
        is full but the caller may push somebody out of it, the engine is asked.

        Args:
            share: Whose request it is.

        Raises:
            QueueFull: If there were no more places after the last step than have been taken since, or none for this caller.
            NotReady: If the model is not ready.
        """
        self._check()
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
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
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
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._check()
        self._score_waiters[request.id] = future
        self._schedule_submissions()
        self._to_score.append(request)
        try:
            return await future
        finally:
            self._forget(request.id)

    def statistics(self) -> Statistics:
        """Return the statistics of the last report.

        Raises:
            NotReady: If the model is not ready.
        """
        self._check()
        return self._statistics

    def watch(self) -> asyncio.Future[Snapshot]:
        """Ask for a snapshot of every slot, unless one is asked for already; return a shared future, not to be cancelled.

        Raises:
            NotReady: If the model is not ready; the future fails with `Unavailable` if it ends before the answer.
        """
        self._check()
        if self._watching is None or self._watching.done():
            self._watching = self._loop.create_future()
            self._link.send(Watch())
        return self._watching

    def _attach_anew(self) -> None:
        """Begin again after an unreadable message: answers may be lost, so every request fails."""
        self._fail(Unavailable("the engine cannot be understood"))
        self._num_submitted = 0
        self._link.send(Hello())

    def _fail(self, error: Unavailable) -> None:
        """End everything that waits with an error, and refuse requests until the model is ready again."""
        was_ready, self.ready = self.is_ready, None
        self._is_ready.clear()
        waiters = [*self._waiters.values(), *self._score_waiters.values()]
        self._waiters, self._score_waiters = {}, {}
        for waiter in waiters:
            if isinstance(waiter, asyncio.Queue):
                waiter.put_nowait(error.copy())
            elif not waiter.done():
                waiter.set_exception(error.copy())
        self._end_watching(error)
        self._num_submitted -= len(self._to_submit)
        self._to_submit, self._to_score = [], []
        self._callers_on_their_way.clear()
        self._num_places, self._statistics = None, Statistics()
        if was_ready:
            self._on_statistics(Statistics())
            self._on_change()

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
        if self.ready is None:
            raise NotReady(f"model {self.name!r} is not ready", retry_after_seconds=self._retry_seconds)

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

    def _receive(self, event: Event) -> None:
        match event:
            case Report() if self.ready is not None:
                self._deliver(event)
            case Snapshot():
                if self._watching is not None and not self._watching.done():
                    self._watching.set_result(event)
            case Ready() if self.ready is None:
                self.ready, self.device = event, event.device
                self._is_ready.set()
                self._on_change()
            case Down(reason, retry_after_seconds):
                self._fail(Unavailable(reason, retry_after_seconds))

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
