"""One model's dispatcher: the one queue before however many engines run it, and the table of requests in flight.

It lives in the only frontend process, which calls it directly, or with several in their parent process (`remote.py`). Everything is
called on one event loop. Engines are given what they can run and a little more; `queue.py` decides which requests and where.
Requests submitted in one turn of the event loop leave as one message to each engine; one message of an engine reaches all waiting
callers in one pass.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec.structs import replace

from dragoman.server.dispatch.calls import Calls, ending
from dragoman.server.dispatch.queue import Entry, Load, QueueIsFull, RequestQueue
from dragoman.server.engine.messages import (
    Cancel,
    Command,
    FinishReason,
    Ready,
    Report,
    Request,
    Score,
    ScoreRequest,
    Share,
    Statistics,
    Submit,
)
from dragoman.server.engine.settings import QueueLimits
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, Snapshot, Watch, of_replica, summed_up
from dragoman.server.errors import QueueFull

log = structlog.get_logger("dragoman.dispatch")

ANSWERS = ("eos", "length")
LOST_RETRY_SECONDS = 0.1
"""Retry hint for requests that were lost with their engine, while others are there."""
MIN_LOOKAHEAD = 2
"""Slots' worth of requests that an engine is given beyond its slots, at the least."""
SLOTS_PER_LOOKAHEAD = 4
"""One more for so many slots: those that become free while a report travels, and sources that are encoded ahead meanwhile."""
SCORE_LOOKAHEAD = 2
"""Turns of score requests that an engine is given at once: the next is there when one ends."""
WATCH_SECONDS = 0.2
"""Age of a snapshot up to which it answers the next `watch` too."""
WATCH_PATIENCE_SECONDS = 0.1
"""Time after which an engine that has not answered is left out of a snapshot."""


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine that is ready: `send` is its link, `commands` what this turn of the event loop adds to the next messages."""

    ready: Ready
    send: Callable[[Command], None]
    statistics: Statistics = field(default_factory=Statistics)
    snapshots: tuple[EngineSnapshot, ...] = ()
    is_asked: bool = False
    cancelled: list[int] = field(default_factory=list)


class Dispatcher(Calls):
    """Takes requests, gives each to one engine, and delivers their tokens and ends.

    Attributes:
        device: Device that the engines run on; empty until one was ready once.
        listeners: Called after anything has happened: a report, a change of readiness, deadlines.
    """

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        score_turn_tokens: int,
        *,
        retry_seconds: float,
        on_statistics: Callable[[Statistics], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without engines.

        Args:
            name: Of the model.
            limits: Of each of the two queues.
            score_turn_tokens: Tokens of the score requests that an engine scores between two rests.
            retry_seconds: Hint for callers while there is no engine.
            on_statistics: Called with those of the model after each report of an engine, and when one is gone.
            on_change: Called when `is_ready` has changed.
            clock: In seconds, as deadlines are.
        """
        super().__init__(name, retry_seconds)
        self._on_statistics, self._on_change = on_statistics, on_change
        self.listeners: list[Callable[[], None]] = []
        self._clock, self._score_turn_tokens = clock, score_turn_tokens
        self._requests = RequestQueue(limits, has_slots=True)
        self._scores = RequestQueue(limits, has_slots=False)
        self._queues = (self._requests, self._scores)
        self._entries: dict[int, Entry] = {}
        self._engines: dict[int, _Engine] = {}
        self.device = ""
        self._is_scheduled = False
        self._alarm: asyncio.TimerHandle | None = None
        self._watching: asyncio.Future[Snapshot] | None = None
        self._awaited: set[int] = set()
        self._watched_at = -math.inf

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine."""
        return bool(self._engines)

    @property
    def ready(self) -> Ready | None:
        """Message of the first engine that is ready; None if none is."""
        return next((engine.ready for engine in self._engines.values()), None)

    def ensure_place(self, share: Share) -> None:
        """See `Calls`."""
        self.check_ready()
        try:
            self._requests.check_place(share)
        except QueueIsFull as full:
            raise QueueFull("too many requests are waiting", self._requests.seconds_until_place(share), limit=full.limit) from None

    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """See `Calls`."""
        self.check_ready()
        if isinstance(request, Request):
            queue, entry = self._requests, Entry(request, deliver, len(request.source_ids), request.search.num_slots)
        else:
            queue, entry = self._scores, Entry(request, deliver, len(request.source_ids) + len(request.target_ids), 0)
        now = self._clock()
        if not queue.has_work:
            queue.forecast.start(now)
        elif request.deadline and entry.num_slots and now + (needed := queue.needed_seconds(entry)) > request.deadline:
            self._end(entry, "deadline_unmet", needed_seconds=needed)
            return
        try:
            evicted = queue.submit(entry, now)
        except QueueIsFull as full:
            self._refuse(queue, entry, full.limit)
            return
        self._entries[request.id] = entry
        for other in evicted:
            self._refuse(queue, other)
        self._schedule()

    def cancel(self, request_id: int) -> None:
        """See `Calls`. A request that an engine has keeps its slots until the engine reports its end."""
        if (entry := self._entries.get(request_id)) is None:
            return
        entry.deliver = _ignore
        if entry.load is not None:
            self._engines[entry.load.index].cancelled.append(request_id)
        else:
            self._queue_of(entry).remove(entry)
            del self._entries[request_id]
        self._schedule()

    def open_engine(self, index: int, ready: Ready, send: Callable[[Command], None]) -> None:
        """Give work to an engine from now on.

        Args:
            index: Number of the engine among the model's.
            ready: Its message.
            send: Sends it a command.
        """
        now = self._clock()
        self._engines[index] = _Engine(ready, send)
        self.device = self.device or ready.device
        lookahead = max(MIN_LOOKAHEAD, ready.max_slots // SLOTS_PER_LOOKAHEAD)
        self._requests.open(Load(index, ready.max_slots, lookahead, now))
        self._scores.open(Load(index, 0, SCORE_LOOKAHEAD * self._score_turn_tokens, now))
        if len(self._engines) == 1:
            self._on_change()
        self._go_on(now)

    def close_engine(self, index: int, retry_after_seconds: float) -> None:
        """End what an engine had as `lost`, and with the last engine everything; without effect for one that is not open.

        Args:
            index: Number of the engine.
            retry_after_seconds: Hint for callers where it was the last.
        """
        if self._engines.pop(index, None) is None:
            return
        is_last = not self._engines
        for queue in self._queues:
            for entry in queue.close(index) + (queue.remove_all() if is_last else []):
                self._end(entry, "lost", retry_after_seconds=retry_after_seconds if is_last else LOST_RETRY_SECONDS)
        self._note_snapshot(index)
        self._on_statistics(Statistics() if is_last else self._sum_statistics())
        if is_last:
            self._on_change()
        self._go_on(self._clock())

    def hear(self, index: int, report: Report) -> None:
        """Take in the report of an engine; of one that is not open nothing."""
        if (engine := self._engines.get(index)) is None:
            return
        now, entries, requests, scores = self._clock(), self._entries, self._requests, self._scores
        statistics = engine.statistics = report.statistics
        requests.heard(index, now, len(statistics.steps))
        scores.heard(index, now, 0)
        if steps := statistics.steps:
            requests.forecast.observe_steps(sum(step.seconds for step in steps), len(steps))
        for prefill in statistics.prefills:
            if prefill.num_tokens:
                requests.forecast.observe_prefill(prefill.num_tokens, prefill.seconds)
        for tokens in report.tokens:
            if (entry := entries.get(tokens.id)) is not None:
                entry.deliver(tokens)
        for shrunk in report.shrunk:
            if (entry := entries.get(shrunk.id)) is not None:
                requests.shrink(entry, shrunk.num_slots)
        for finished in report.finished:
            if (entry := entries.pop(finished.id, None)) is not None:
                requests.remove(entry)
                if finished.reason in ANSWERS:
                    requests.forecast.observe_completion(now, finished.admitted)
                elif finished.reason == "queue_full":  # there is no memory for its source
                    seconds = requests.seconds_until_place(entry.request.share)
                    finished = replace(finished, retry_after_seconds=seconds)
                entry.deliver(finished)
        for scored in report.scored:
            if (entry := entries.pop(scored.id, None)) is not None:
                scores.remove(entry)
                if scored.reason in ANSWERS:
                    scores.forecast.observe_completion(now)
                entry.deliver(scored)
        is_quiet = len(self._engines) == 1 and not requests.num_waiting and requests.num_used < requests.capacity
        self._on_statistics(statistics if is_quiet and not scores.num_waiting else self._sum_statistics())
        self._go_on(now)

    def statistics(self) -> Statistics:
        """See `Calls`."""
        self.check_ready()
        return self._sum_statistics()

    def _sum_statistics(self) -> Statistics:
        """Return the state of queues and engines, also without engines."""
        requests, scores = self._requests, self._scores
        engines = [engine.statistics for engine in self._engines.values()]
        return Statistics(
            num_waiting=requests.num_waiting + scores.num_waiting + sum(s.num_waiting for s in engines),
            num_waiting_tokens=requests.num_waiting_tokens + scores.num_waiting_tokens + sum(s.num_waiting_tokens for s in engines),
            num_running=sum(s.num_running for s in engines),
            num_slots=sum(s.num_slots for s in engines),
            num_places=requests.num_places,
            retry_after_seconds=requests.seconds_until_place(),
            queue_seconds=requests.queue_seconds(),
            cache_bytes_reserved=sum(s.cache_bytes_reserved for s in engines),
            cache_bytes_used=sum(s.cache_bytes_used for s in engines),
        )

    def statistics_for_callers(self) -> Statistics:
        """Return the same with the callers that have no place in the queue, for attachments that refuse requests themselves."""
        requests = self._requests
        return replace(self._sum_statistics(), without_claim=requests.without_claim(), at_their_limit=requests.at_their_limit())

    def watch(self) -> asyncio.Future[Snapshot]:
        """See `Calls`. Engines are asked at most once in `WATCH_SECONDS`; one that hangs holds up nobody."""
        self.check_ready()
        now, watching = self._clock(), self._watching
        if watching is not None and (not watching.done() or now < self._watched_at + WATCH_SECONDS):
            return watching
        loop = asyncio.get_running_loop()
        watching = self._watching = loop.create_future()
        self._watched_at = now
        self._awaited = {index for index, engine in self._engines.items() if not engine.is_asked}
        for index in self._awaited:
            self._engines[index].is_asked = True
            self._engines[index].send(Watch())
        loop.call_later(WATCH_PATIENCE_SECONDS, self._answer_watch, watching)
        return watching

    def hear_snapshot(self, index: int, snapshot: Snapshot) -> None:
        """Take in the snapshot of an engine; of one that is not open nothing."""
        if (engine := self._engines.get(index)) is not None:
            engine.is_asked = False
            engine.snapshots = tuple(of_replica(one, index) for one in snapshot.engines)
            self._note_snapshot(index)

    def _note_snapshot(self, index: int) -> None:
        if index in self._awaited:
            self._awaited.discard(index)
            if not self._awaited and self._watching is not None:
                self._answer_watch(self._watching)

    def _answer_watch(self, watching: asyncio.Future[Snapshot]) -> None:
        """Resolve a watch with the last snapshots; requests that are in no slot yet count as waiting."""
        if watching.done():
            return
        self._awaited.clear()
        snapshots = [one for _, engine in sorted(self._engines.items()) for one in engine.snapshots]
        in_slots = {slot.request for one in snapshots for slot in one.slots}
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for queue in self._queues:
            waiting.update(dict(queue.waiting_by_caller()))
            for entry in queue.given():
                (running if entry.request.id in in_slots else waiting)[entry.request.share.caller] += 1
        uses = [CallerUse(name, waiting[name], running[name]) for name in waiting.keys() | running.keys()]
        watching.set_result(Snapshot(snapshots, summed_up(uses)))

    def _queue_of(self, entry: Entry) -> RequestQueue:
        return self._requests if entry.num_slots else self._scores

    def _refuse(self, queue: RequestQueue, entry: Entry, limit: str = "") -> None:
        self._end(entry, "queue_full", retry_after_seconds=queue.seconds_until_place(entry.request.share), limit=limit)

    def _end(self, entry: Entry, reason: FinishReason, **details: Any) -> None:
        """Deliver the end of a request that no engine has."""
        self._entries.pop(entry.request.id, None)
        entry.deliver(ending(entry.request, reason, self._clock(), **details))

    def _schedule(self) -> None:
        """Have `_go_on` called in the next turn of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._is_scheduled = False
        self._go_on(self._clock())

    def _go_on(self, now: float) -> None:
        """End what is late, send engines what they have room for, and tell listeners."""
        for queue in self._queues:
            if queue.next_deadline <= now:
                for entry in queue.expire(now):
                    self._end(entry, "deadline")
        if requests := self._requests.hand_over(now):
            self._send(requests, Submit)
        if scores := self._scores.hand_over(now):
            self._send(scores, Score)
        for engine in self._engines.values():
            if engine.cancelled:
                engine.send(Cancel(engine.cancelled))
                engine.cancelled = []
        self._set_alarm()
        for listener in self.listeners:
            listener()

    def _send(self, entries: list[Entry], message: Callable[[list[Any]], Command]) -> None:
        """Send each engine its part of what it has been given; entries that were lost meanwhile have no engine."""
        by_engine: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.load is not None:
                by_engine[entry.load.index].append(entry)
        for index, given in by_engine.items():
            try:
                self._engines[index].send(message([entry.request for entry in given]))
            except Exception:
                log.exception("requests cannot be sent", model=self.name, replica=index, num_requests=len(given))
                for entry in given:
                    self._queue_of(entry).remove(entry)
                    self._end(entry, "lost", retry_after_seconds=LOST_RETRY_SECONDS)
                self._schedule()

    def _set_alarm(self) -> None:
        """Have `_go_on` called when the next deadline of a waiting request passes."""
        at = min(self._requests.next_deadline, self._scores.next_deadline)
        if self._alarm is not None:
            if self._alarm.when() <= at:
                return  # it is set anew when it rings
            self._alarm.cancel()
            self._alarm = None
        if at < math.inf:
            self._alarm = asyncio.get_running_loop().call_at(at, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._go_on(self._clock())


def _ignore(event: Any) -> None:
    """Deliver nothing: the caller is gone."""
