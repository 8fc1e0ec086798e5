"""One model's desk: the one queue, before however many engines run it. Front ends attach to it as they would to an engine.

Everything here is called on one event loop, and is done when it returns. Who starts engines and notices that they are gone is
`pool.py`; who is next, and where it goes, is `dispatcher.py`.
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from dragoman.server.dispatch.front_ends import FrontEnds
from dragoman.server.dispatch.pair_desk import PairDesk
from dragoman.server.dispatch.request_desk import RequestDesk
from dragoman.server.dispatch.watch_desk import WatchDesk
from dragoman.server.engine.messages import Cancel, Command, Down, Event, Ready, Report, Score, Statistics, Submit
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.sequence import Key
from dragoman.server.engine.snapshot import Snapshot, Watch

LOST_RETRY_SECONDS = 0.1
"""When to try again what was lost with its replica, while others are there."""


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine: what it said when it was ready, how it is told something, and what it said of itself last."""

    ready: Ready
    send: Callable[[Command], None]
    statistics: Statistics


class Desk:
    """Takes requests from front ends, gives each to one replica, and brings back what becomes of it."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without replicas: whatever comes is lost.

        Args:
            limits: `max_slots` and the prefill budget are a replica's, the others those of the model as a whole.
            clock: In seconds, as deadlines are.
        """
        self._clock = clock
        self._front_ends = FrontEnds()
        numbers = itertools.count(1)
        self._requests = RequestDesk(limits, self._front_ends, numbers, clock)
        self._pairs = PairDesk(limits, self._front_ends, numbers, clock)
        self._watched = WatchDesk(self._front_ends, self._requests.dispatcher.waiting_by_caller, clock)
        self._replicas: dict[int, _Replica] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def attach(self, origin: bytes, deliver: Callable[[Event], None]) -> None:
        """Begin to tell a front end what happens: `Ready` as soon as the model is ready, which may be at once; `Down` when not.

        Args:
            origin: Identity of the front end; what one that is attached already had asked for is ended. It uses no id again.
            deliver: Called with each event, on the loop, also from within `attach` and `take`; it must not raise.
        """
        self.detach(origin)
        self._front_ends.attach(origin, deliver)
        if self._replicas:
            deliver(next(iter(self._replicas.values())).ready)

    def take(self, origin: bytes, command: Command) -> None:
        """Take in what a front end says, but for `Hello` and `Stop`, which are not for a desk and do nothing."""
        if origin not in self._front_ends:
            return
        if isinstance(command, Watch):  # nothing changes by being looked at
            self._watched.ask(origin)
            self._set_alarm()
            return
        match command:
            case Submit(requests):
                self._front_ends.receive(origin, len(requests))
                for request in requests:
                    if self._replicas:
                        self._requests.submit(origin, request)
                    else:
                        self._requests.refuse_lost(origin, request, LOST_RETRY_SECONDS)
            case Score(pairs):
                for pair in pairs:
                    if self._replicas:
                        self._pairs.submit(origin, pair)
                    else:
                        self._pairs.refuse_lost(origin, pair, LOST_RETRY_SECONDS)
            case Cancel(ids):
                self._cancel((origin, request_id) for request_id in ids)
        self._go_on()

    def detach(self, origin: bytes) -> None:
        """End everything that a front end has asked for, and tell it nothing more; without effect for one that is not attached."""
        if origin in self._front_ends:
            self._front_ends.detach(origin)
            self._cancel(self._requests.keys(origin) + self._pairs.keys(origin))
            self._go_on()

    def open_replica(self, index: int, ready: Ready, send: Callable[[Command], None]) -> None:
        """Give work to a replica from now on.

        Args:
            index: Which of the model's replicas it is.
            ready: What it has said.
            send: Sends it a command.
        """
        self._replicas[index] = _Replica(ready, send, Statistics())
        self._requests.dispatcher.open(index, ready.max_slots, self._clock())
        self._pairs.dispatcher.open(index)
        self._watched.open(index, send)
        if len(self._replicas) == 1:
            self._front_ends.tell(ready)
        self._go_on()

    def hear(self, index: int, report: Report) -> None:
        """Take in what a replica says; nothing of one that is not open."""
        if (replica := self._replicas.get(index)) is None:
            return
        now = self._clock()
        replica.statistics = replace(report.statistics, steps=[], prefills=[])
        self._requests.hear(index, report, now)
        self._pairs.hear(report, now)
        self._go_on()

    def hear_snapshot(self, index: int, snapshot: Snapshot) -> None:
        """Take in what a replica does, which it is asked for; nothing of one that is not open."""
        self._watched.hear(index, snapshot)

    def close_replica(self, index: int, reason: str, retry_after_seconds: float) -> None:
        """End what a replica had as `lost`; with the last one everything that waits ends, and front ends are told `Down`.

        Args:
            index: Of a replica; one that is not open is none to close.
            reason: For callers, of `Down`.
            retry_after_seconds: See `Down`.
        """
        if self._replicas.pop(index, None) is None:
            return
        is_last = not self._replicas
        seconds = retry_after_seconds if is_last else LOST_RETRY_SECONDS
        for part in (self._requests, self._pairs):
            part.lose(index, seconds)
            if is_last:
                part.lose_all(seconds)
        self._watched.close(index)
        self._go_on()
        if is_last:
            self._front_ends.tell(Down(reason, retry_after_seconds))

    def statistics(self) -> Statistics:
        """Describe the queue, and what the replicas have last said together; their steps are theirs to tell."""
        dispatcher, forecast, pairs = self._requests.dispatcher, self._requests.forecast, self._pairs.dispatcher
        replicas = [replica.statistics for replica in self._replicas.values()]
        without_claim = dispatcher.without_claim()
        return Statistics(
            num_waiting=dispatcher.num_waiting + pairs.num_waiting + sum(s.num_waiting for s in replicas),
            num_waiting_tokens=dispatcher.num_waiting_tokens
            + pairs.num_waiting_tokens
            + sum(s.num_waiting_tokens for s in replicas),
            num_running=sum(s.num_running for s in replicas),
            num_slots=sum(s.num_slots for s in replicas),
            num_places=dispatcher.num_places,
            retry_after_seconds=forecast.seconds_until_a_place(dispatcher.num_waiting),
            queue_seconds=forecast.queue_seconds(dispatcher) if replicas else 0.0,
            cache_bytes_reserved=sum(s.cache_bytes_reserved for s in replicas),
            cache_bytes_used=sum(s.cache_bytes_used for s in replicas),
            without_claim=None if without_claim is None else self._requests.seconds_until_places(without_claim),
            at_their_limit=self._requests.seconds_until_places(dispatcher.at_their_limit()),
        )

    def _cancel(self, keys: Iterable[Key]) -> None:
        """End what waits here; have replicas end what they have."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for key in keys:
            if (place := self._requests.cancel(key) or self._pairs.cancel(key)) is not None:
                numbers[place[0]].append(place[1])
        for index, ids in numbers.items():
            self._replicas[index].send(Cancel(ids))

    def _go_on(self, *, has_changed: bool = True) -> None:
        """After anything has happened: end what is late, give replicas what they have room for, and tell what there is to tell."""
        now = self._clock()
        self._requests.expire(now)
        self._pairs.expire(now)
        for index, requests in self._requests.hand_over(now).items():
            self._replicas[index].send(Submit(requests))
        for index, pairs in self._pairs.hand_over().items():
            self._replicas[index].send(Score(pairs))
        self._watched.answer_late(now)
        self._front_ends.report(now, self.statistics, has_changed=has_changed)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Have `_go_on` called when the next deadline of what waits passes, or a front end is to know how things stand."""
        at = min(self._next_deadline, self._front_ends.next_report, self._watched.next_answer)
        if self._alarm is not None:
            if self._alarm.when() <= at:  # it sees then what comes next
                return
            self._alarm.cancel()
            self._alarm = None
        if at < math.inf:
            self._alarm = asyncio.get_running_loop().call_at(at, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._go_on(has_changed=self._clock() >= self._next_deadline)

    @property
    def _next_deadline(self) -> float:
        return min(self._requests.dispatcher.next_deadline, self._pairs.dispatcher.next_deadline)
