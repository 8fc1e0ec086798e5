"""Dispatcher in the parent process shared by several frontend processes: the server socket, and each frontend's client.

Clients refuse requests themselves, from the last reported statistics, when the queue is full: a refusal needs neither tokenising
nor a message.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import structlog
import zmq
from msgspec.structs import replace

from dragoman.server.dispatch.calls import Calls, ending
from dragoman.server.dispatch.dispatcher import LOST_RETRY_SECONDS, Dispatcher
from dragoman.server.dispatch.link import Link, Socket
from dragoman.server.engine.messages import (
    Cancel,
    Command,
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
    Snapshot,
    Statistics,
    Submit,
    Tokens,
    Watch,
)
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import NotReady, QueueFull, Unavailable

log = structlog.get_logger("dragoman.dispatch")

# Interval of statistics reports to a frontend without other events; none while nothing happens.
REPORT_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class _Frontend:
    """Attached frontend process: in-flight requests (its ids to the dispatcher's) and its next report."""

    send: Callable[[Event], None]
    ids: dict[int, int] = field(default_factory=dict)
    num_received: int = 0
    last_report: float = 0.0
    tokens: list[Tokens] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)

    def deliver(self, request_id: int, event: Tokens | Finished | Scored) -> None:
        event = replace(event, id=request_id)
        if isinstance(event, Tokens):
            self.tokens.append(event)
            return
        self.ids.pop(request_id, None)
        if isinstance(event, Finished):
            self.finished.append(event)
        else:
            self.scored.append(event)

    def report(self, now: float, statistics: Statistics) -> None:
        self.send(Report(self.tokens, self.finished, statistics, self.scored, self.num_received))
        self.tokens, self.finished, self.scored = [], [], []
        self.last_report = now


class DispatcherServer:
    """ROUTER socket of a dispatcher; frontend processes attach with `Hello`, identified by name."""

    def __init__(self, endpoint: str, dispatcher: Dispatcher) -> None:
        """Bind the endpoint, on the dispatcher's event loop; raise `zmq.ZMQError` if that fails."""
        self.endpoint = endpoint
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._attached: dict[bytes, _Frontend] = {}
        self._is_ready = dispatcher.is_ready
        self._timer: asyncio.TimerHandle | None = None
        self._socket = Socket(zmq.ROUTER, self._receive)
        self._socket.open(lambda socket: socket.bind(endpoint))
        dispatcher.listeners.append(self._report)

    def detach(self, name: str) -> None:
        """Cancel all requests of a frontend process that has ended."""
        if (frontend := self._attached.pop(name.encode(), None)) is not None:
            for request_id in frontend.ids.values():
                self._dispatcher.cancel(request_id)

    def close(self) -> None:
        """Close the socket; idempotent."""
        with contextlib.suppress(ValueError):
            self._dispatcher.listeners.remove(self._report)
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def _receive(self, parts: list[bytes]) -> None:
        origin, payload = parts
        command = self._decoder.decode(payload)
        if isinstance(command, Hello):
            self.detach(origin.decode(errors="replace"))  # a frontend that attaches again
            self._attached[origin] = _Frontend(partial(self._send, origin))
            if (ready := self._dispatcher.ready) is not None:
                self._send(origin, ready)
            return
        if (frontend := self._attached.get(origin)) is None:
            return
        match command:
            case Submit(requests):
                frontend.num_received += len(requests)
                for request in requests:
                    self._submit(frontend, request)
            case Score(score_requests):
                for score_request in score_requests:
                    self._submit(frontend, score_request)
            case Cancel(ids):
                for request_id in ids:
                    if (own_id := frontend.ids.pop(request_id, None)) is not None:
                        self._dispatcher.cancel(own_id)
            case Watch():
                with contextlib.suppress(NotReady):
                    self._dispatcher.watch().add_done_callback(lambda future: self._send(origin, future.result()))
        self._report()

    def _submit(self, frontend: _Frontend, request: Request | ScoreRequest) -> None:
        own_id = self._dispatcher.next_id()
        frontend.ids[request.id] = own_id
        try:
            self._dispatcher.submit(replace(request, id=own_id), partial(frontend.deliver, request.id))
        except NotReady:
            frontend.deliver(request.id, ending(request, "lost", self._loop.time(), retry_after_seconds=LOST_RETRY_SECONDS))

    def _report(self) -> None:
        """Send reports to frontends with events or old statistics, after any change of readiness."""
        self._publish_readiness()
        now, next_report = self._loop.time(), math.inf
        statistics: Statistics | None = None
        for frontend in self._attached.values():
            if frontend.tokens or frontend.finished or frontend.scored or now >= frontend.last_report + REPORT_SECONDS:
                statistics = statistics or self._dispatcher.statistics_for_callers()
                frontend.report(now, statistics)
            else:
                next_report = min(next_report, frontend.last_report + REPORT_SECONDS)
        if self._timer is None and next_report < math.inf:
            self._timer = self._loop.call_at(next_report, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._report()

    def _publish_readiness(self) -> None:
        if self._is_ready == self._dispatcher.is_ready:
            return
        self._is_ready = not self._is_ready
        for frontend in self._attached.values():
            if (ready := self._dispatcher.ready) is not None:
                frontend.send(ready)
            else:
                frontend.report(self._loop.time(), Statistics())  # ends of lost requests go before `Down`
                frontend.send(Down(self._dispatcher.retry_seconds))

    def _send(self, origin: bytes, event: Event) -> None:
        self._socket.send(origin, self._encoder.encode(event))


class RemoteDispatcher(Calls):
    """Client of a dispatcher in the parent process, for a frontend process; `device` is empty until the model was ready once."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        identity: str,
        settings: EngineSettings,
        num_replicas: int,
        retry_seconds: float,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Configure the client; `open` attaches it. `identity` must never have been used by another process."""
        super().__init__(name, retry_seconds)
        self.settings, self.num_replicas = settings, num_replicas
        self.ready: Ready | None = None
        self.device = ""
        self._endpoint, self._identity, self._on_change = endpoint, identity, on_change
        self._has_become_ready = asyncio.Event()
        self._link: Link | None = None
        self._delivers: dict[int, tuple[Request | ScoreRequest, Callable[[Any], None]]] = {}
        self._to_submit: list[Request] = []
        self._to_score: list[ScoreRequest] = []
        self._to_cancel: list[int] = []
        self._is_scheduled = False
        self._num_submitted = 0
        self._num_places: int | None = None
        self._statistics = Statistics()
        self._callers_on_their_way: set[str] = set()
        self._watching: asyncio.Future[Snapshot] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the model accepts requests now."""
        return self.ready is not None

    def open(self) -> None:
        """Attach; call it on the event loop that uses the client."""
        self._link = Link(self._endpoint, self._hear, self._reattach, self._identity.encode())
        self._link.send(Hello())

    def close(self) -> None:
        """Detach; requests in flight end as `lost`."""
        if self._link is not None:
            self._link.close()
        self._go_down(self.retry_seconds)

    async def until_ready(self) -> None:
        """Wait until the model is ready."""
        await self._has_become_ready.wait()

    def ensure_place(self, share: Share) -> None:
        """Raise `QueueFull` if the queue, with requests in transit, is full, unless the caller might evict others."""
        self.check_ready()
        statistics, caller = self._statistics, share.caller
        if (seconds := statistics.at_their_limit.get(caller)) is not None:
            raise QueueFull("too many requests are waiting", seconds, limit="max_waiting")
        if self._num_places is None or self._num_places > 0:
            return
        waiting = statistics.without_claim
        if waiting is not None and caller in waiting:
            raise QueueFull("too many requests are waiting", waiting[caller])
        if waiting == {} and self._callers_on_their_way <= {caller}:
            raise QueueFull("too many requests are waiting", statistics.retry_after_seconds)

    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Send a request to the dispatcher, in the next turn of the event loop."""
        self.check_ready()
        self._delivers[request.id] = request, deliver
        if isinstance(request, Request):
            self._to_submit.append(request)
            self._num_submitted += 1
            self._callers_on_their_way.add(request.share.caller)
            if self._num_places is not None:
                self._num_places -= 1
        else:
            self._to_score.append(request)
        self._schedule()

    def cancel(self, request_id: int) -> None:
        """Cancel a request; no effect if it has ended."""
        if self._delivers.pop(request_id, None) is not None:
            self._to_cancel.append(request_id)
            self._schedule()

    def statistics(self) -> Statistics:
        """Return the last reported statistics; raise `NotReady` while the model is not ready."""
        self.check_ready()
        return self._statistics

    def watch(self) -> asyncio.Future[Snapshot]:
        """Request a snapshot, unless a request is pending; return its future."""
        self.check_ready()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_future()
            self._send(Watch())
        return self._watching

    def _reattach(self) -> None:
        """Attach again after a message that could not be handled, since it may have contained ends of requests."""
        self._go_down(self.retry_seconds)
        self._num_submitted, self._to_cancel = 0, []  # the dispatcher counts what a new attachment sends from 0
        self._callers_on_their_way.clear()
        self._send(Hello())

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what was submitted in this turn of the event loop, then its cancellations."""
        self._is_scheduled = False
        if self._to_submit:
            self._send(Submit(self._to_submit))
            self._to_submit = []
        if self._to_score:
            self._send(Score(self._to_score))
            self._to_score = []
        if self._to_cancel:
            self._send(Cancel(self._to_cancel))
            self._to_cancel = []

    def _send(self, command: Command) -> None:
        assert self._link is not None
        self._link.send(command)

    def _hear(self, event: Event) -> None:
        match event:
            case Report():
                self._deliver(event)
            case Snapshot():
                if self._watching is not None and not self._watching.done():
                    self._watching.set_result(event)
            case Ready():
                self.ready, self.device = event, event.device
                self._num_places = None  # a report that came before may have been to an earlier attachment
                self._has_become_ready.set()
                self._on_change()
            case Down(retry_after_seconds):
                self._go_down(retry_after_seconds)

    def _go_down(self, retry_after_seconds: float) -> None:
        """End requests in flight as `lost`, and refuse others until the next `Ready`."""
        self.ready = None
        self._has_become_ready.clear()
        self._statistics, self._num_places = Statistics(), None
        self._num_submitted -= len(self._to_submit)
        self._to_submit, self._to_score = [], []
        waiting, self._delivers = self._delivers, {}
        now = asyncio.get_running_loop().time()
        for request, deliver in waiting.values():
            deliver(ending(request, "lost", now, retry_after_seconds=retry_after_seconds))
        if self._watching is not None and not self._watching.done():
            self._watching.set_exception(Unavailable(f"the engine of model {self.name!r} ended", retry_after_seconds))
            self._watching.exception()  # retrieved, so that asyncio logs nothing if it is not awaited
        self._on_change()

    def _deliver(self, report: Report) -> None:
        for tokens in report.tokens:
            if (waiting := self._delivers.get(tokens.id)) is not None:
                waiting[1](tokens)
        for finished in report.finished:
            if (waiting := self._delivers.pop(finished.id, None)) is not None:
                waiting[1](finished)
        for scored in report.scored:
            if (waiting := self._delivers.pop(scored.id, None)) is not None:
                waiting[1](scored)
        num_on_their_way = self._num_submitted - report.num_received
        if not num_on_their_way:
            self._callers_on_their_way.clear()
        if (num_places := report.statistics.num_places) is not None:
            num_places -= num_on_their_way
        self._num_places = num_places
        self._statistics = report.statistics
