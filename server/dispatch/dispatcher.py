"""Dispatcher of one model: its request queues and the table of requests in flight, in front of all its engines.

Runs on one event loop: in the only frontend process, or with several in their parent (`remote.py`). Requests submitted in one turn
of the loop are batched into one message to each engine.
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
from dragoman.server.dispatch.fair_queue import Entry
from dragoman.server.dispatch.queue import Load, QueueIsFull, RequestQueue
from dragoman.server.engine.messages import (
    CallerUse,
    Cancel,
    Command,
    EngineSnapshot,
    FinishReason,
    Ready,
    Report,
    Request,
    Score,
    ScoreRequest,
    Share,
    Snapshot,
    Statistics,
    Submit,
    Watch,
    of_replica,
    summed_up,
)
from dragoman.server.engine.settings import QueueLimits
from dragoman.server.errors import QueueFull

log = structlog.get_logger("dragoman.dispatch")

ANSWERS = ("eos", "length")
# Retry hint for requests lost with their engine while other engines are open.
LOST_RETRY_SECONDS = 0.1
# Least lookahead of an engine, in slots.
MIN_LOOKAHEAD = 2
# Lookahead is a quarter of the slots: those freed while a report travels, and sources to prefetch.
SLOTS_PER_LOOKAHEAD = 4
# Lookahead of score requests, in turns, so that the next turn is queued when one ends.
SCORE_LOOKAHEAD = 2
# Age up to which a snapshot is reused by the next `watch`.
WATCH_SECONDS = 0.2
# A snapshot waits no longer for engines; the last one of an engine that has not answered is used.
WATCH_PATIENCE_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Engine:
    ready: Ready
    send: Callable[[Command], None]
    statistics: Statistics = field(default_factory=Statistics)
    snapshots: tuple[EngineSnapshot, ...] = ()
    is_asked: bool = False
    cancelled: list[int] = field(default_factory=list)


class Dispatcher(Calls):
    """Queue of one model: assigns each request to one engine and delivers its tokens and its end.

    `device` is empty until an engine was ready once; `listeners` are called after reports, changes of readiness, submissions and
    deadlines.
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
        """Start without engines; `limits` apply to generation and score requests separately.

        `on_statistics` is called after each engine report and when an engine is closed, `on_change` when `is_ready` changes.
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
        """Whether an engine is open."""
        return bool(self._engines)

    @property
    def ready(self) -> Ready | None:
        """`Ready` message of the first open engine; None if there is none."""
        return next((engine.ready for engine in self._engines.values()), None)

    def ensure_place(self, share: Share) -> None:
        """Raise `QueueFull` if the queue has no room for the caller."""
        self.check_ready()
        try:
            self._requests.check_place(share)
        except QueueIsFull as full:
            raise QueueFull("too many requests are waiting", self._requests.seconds_until_place(share), limit=full.limit) from None

    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Queue a request, or refuse it by delivering its end."""
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
        """Cancel a request; a running one keeps its slots until the engine reports its end."""
        if (entry := self._entries.get(request_id)) is None:
            return
        entry.deliver = _ignore
        if entry.engine is not None:
            self._engines[entry.engine].cancelled.append(request_id)
        else:
            self._queue_of(entry).remove(entry)
            del self._entries[request_id]
        self._schedule()

    def open_engine(self, index: int, ready: Ready, send: Callable[[Command], None]) -> None:
        """Assign requests to a ready engine from now on; `send` sends it a command."""
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
        """End an engine's requests as `lost`, and all others too if it was the last; no effect if it is not open."""
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
        """Process an engine's report; ignored if the engine is not open."""
        if (engine := self._engines.get(index)) is None:
            return
        now, entries, requests, scores = self._clock(), self._entries, self._requests, self._scores
        statistics = engine.statistics = report.statistics
        requests.note_report(index, now, statistics.steps)
        scores.note_report(index, now, [])
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
                elif finished.reason == "queue_full":  # no memory for its source
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
        """Return the state of the queues and the sum over the engines; raise `NotReady` if there are none."""
        self.check_ready()
        return self._sum_statistics()

    def _sum_statistics(self) -> Statistics:
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
            num_urgent=requests.num_urgent + scores.num_urgent,
        )

    def statistics_for_callers(self) -> Statistics:
        """Return statistics with the callers that would be refused, for remote dispatchers."""
        requests = self._requests
        return replace(self._sum_statistics(), without_claim=requests.without_claim(), at_their_limit=requests.at_their_limit())

    def watch(self) -> asyncio.Future[Snapshot]:
        """Return a future of a snapshot, requested at most once in `WATCH_SECONDS` and without waiting for an engine that hangs."""
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
        """Process an engine's snapshot; ignored if the engine is not open."""
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
        """Resolve a watch with the last snapshots; assigned requests without a slot count as waiting."""
        if watching.done():
            return
        self._awaited.clear()
        snapshots = [one for _, engine in sorted(self._engines.items()) for one in engine.snapshots]
        in_slots = {slot.request for one in snapshots for slot in one.slots}
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for queue in self._queues:
            waiting.update(dict(queue.waiting_by_caller()))
            for entry in queue.running():
                (running if entry.request.id in in_slots else waiting)[entry.request.share.caller] += 1
        uses = [CallerUse(name, waiting[name], running[name]) for name in waiting.keys() | running.keys()]
        watching.set_result(Snapshot(snapshots, summed_up(uses)))

    def _queue_of(self, entry: Entry) -> RequestQueue:
        return self._requests if entry.num_slots else self._scores

    def _refuse(self, queue: RequestQueue, entry: Entry, limit: str = "") -> None:
        self._end(entry, "queue_full", retry_after_seconds=queue.seconds_until_place(entry.request.share), limit=limit)

    def _end(self, entry: Entry, reason: FinishReason, **details: Any) -> None:
        """Deliver the end of a request that no engine holds."""
        self._entries.pop(entry.request.id, None)
        entry.deliver(ending(entry.request, reason, self._clock(), **details))

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._is_scheduled = False
        self._go_on(self._clock())

    def _go_on(self, now: float) -> None:
        """Expire requests, send engines their next requests and cancellations, and call the listeners."""
        for queue in self._queues:
            if queue.next_deadline <= now:
                for entry in queue.expire(now):
                    self._end(entry, "deadline")
        if requests := self._requests.assign(now):
            self._send(requests, Submit)
        if scores := self._scores.assign(now):
            self._send(scores, Score)
        for engine in self._engines.values():
            if engine.cancelled:
                engine.send(Cancel(engine.cancelled))
                engine.cancelled = []
        self._set_alarm()
        for listener in self.listeners:
            listener()

    def _send(self, entries: list[Entry], message: Callable[[list[Any]], Command]) -> None:
        """Send each engine its requests; skip entries whose engine was lost meanwhile."""
        by_engine: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.engine is not None:
                by_engine[entry.engine].append(entry)
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
        """Schedule `_go_on` for the next deadline of a waiting request."""
        at = min(self._requests.next_deadline, self._scores.next_deadline)
        if self._alarm is not None:
            if self._alarm.when() <= at:
                return  # the callback sets the next alarm
            self._alarm.cancel()
            self._alarm = None
        if at < math.inf:
            self._alarm = asyncio.get_running_loop().call_at(at, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._go_on(self._clock())


def _ignore(event: Any) -> None:
    """Discard an event of a cancelled request."""
