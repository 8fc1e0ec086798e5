"""The part of a desk that has requests: takes them in, gives them to replicas, says how they ended."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.dispatch.front_ends import FrontEnds
from dragoman.server.dispatch.given import Given
from dragoman.server.engine.forecast import Forecast
from dragoman.server.engine.messages import Finished, FinishReason, Report, Request, Share, Tokens
from dragoman.server.engine.scheduler import Limits, QueueIsFull
from dragoman.server.engine.sequence import Key, Sequence

ANSWERS = ("eos", "length")


class RequestDesk:
    """Requests that have not ended: those that wait here, by `Dispatcher`'s rules, and those that replicas have.

    Attributes:
        dispatcher: Who waits and who is where.
        forecast: How long things take, over all replicas.
    """

    def __init__(self, limits: Limits, front_ends: FrontEnds, numbers: "itertools.count[int]", clock: Callable[[], float]) -> None:
        """Start without replicas.

        Args:
            limits: See `Dispatcher`.
            front_ends: Where to say how requests ended.
            numbers: See `Given`.
            clock: In seconds, as deadlines are.
        """
        self.dispatcher = Dispatcher(limits)
        self.forecast = Forecast()
        self._front_ends, self._clock = front_ends, clock
        self._given: Given[Sequence] = Given(numbers)

    def submit(self, origin: bytes, request: Request) -> None:
        """Queue a request, or end it at once: for lack of time, or of a place. It may push out others."""
        sequence, now, deadline = Sequence(origin, request), self._clock(), request.deadline
        if not self.dispatcher.has_work:
            self.forecast.start(now)
        elif deadline is not None and now + (needed := self.forecast.needed_seconds(sequence, self.dispatcher)) > deadline:
            self._end(sequence, "deadline_unmet", needed_seconds=needed)
            return
        try:
            pushed_out = self.dispatcher.submit(sequence)
        except QueueIsFull as full:
            self._refuse(sequence, full.limit)
            return
        for other in pushed_out:
            self._refuse(other)

    def cancel(self, key: Key) -> tuple[int, int] | None:
        """End a request that waits here; for one that a replica has, return which replica, and the number to cancel there.

        It is the replica's until that says that it has ended.
        """
        sequence = self.dispatcher.find(key)
        if sequence is None:
            return None
        if (index := self.dispatcher.replica_of(sequence)) is not None:
            return index, self._given.number(sequence)
        self.dispatcher.remove(key)
        self._end(sequence, "cancelled")
        return None

    def keys(self, origin: bytes) -> list[Key]:
        """Return the keys of what a front end has asked for and has not ended."""
        return self.dispatcher.keys(origin)

    def hear(self, index: int, report: Report, now: float) -> None:
        """Take in what a replica says of requests."""
        statistics = report.statistics
        self.dispatcher.heard(index, now, len(statistics.steps))
        for step in statistics.steps:
            self.forecast.observe_step(step.seconds)
        for prefill in statistics.prefills:
            self.forecast.observe_prefill(prefill.num_tokens, prefill.seconds)
        for tokens in report.tokens:
            if (sequence := self._given.find(tokens.id)) is not None:
                self._front_ends.add_tokens(sequence.origin, Tokens(sequence.request.id, tokens.token_ids))
        for shrunk in report.shrunk:
            if (sequence := self._given.find(shrunk.id)) is not None:
                self.dispatcher.shrink(sequence, shrunk.num_slots)
        for finished in report.finished:
            if (sequence := self._given.find(finished.id)) is not None:
                self._finish(sequence, finished, now)

    def lose(self, index: int, retry_after_seconds: float) -> None:
        """End what a replica had that is gone."""
        for sequence in self.dispatcher.close(index):
            self._lose(sequence, retry_after_seconds)

    def lose_all(self, retry_after_seconds: float) -> None:
        """End everything."""
        for sequence in self.dispatcher.remove_all():
            self._lose(sequence, retry_after_seconds)

    def refuse_lost(self, origin: bytes, request: Request, retry_after_seconds: float) -> None:
        """End a request for which there is no replica."""
        self._lose(Sequence(origin, request), retry_after_seconds)

    def expire(self, now: float) -> None:
        """End what waits here and should not any more."""
        for sequence in self.dispatcher.expire(now):
            self._end(sequence, "deadline")

    def hand_over(self, now: float) -> dict[int, list[Request]]:
        """Return what replicas are to be told to do, by replica."""
        requests: defaultdict[int, list[Request]] = defaultdict(list)
        for index, sequence in self.dispatcher.hand_over(now):
            request = sequence.request
            requests[index].append(replace(request, id=self._given.add(sequence), share=without_limits(request.share)))
        return requests

    def seconds_until_places(self, shares: list[Share]) -> dict[str, float]:
        """Return when callers are likely to have places in the queue."""
        return {share.caller: self._seconds_until_a_place(share) for share in shares}

    def _finish(self, sequence: Sequence, finished: Finished, now: float) -> None:
        """End a request as its replica says."""
        self.dispatcher.remove(sequence.key)
        self._given.discard(sequence)
        if finished.reason in ANSWERS:
            sequence.admitted = finished.admitted
            self.forecast.observe_completion(sequence, now)
        self._front_ends.add_finished(sequence.origin, replace(finished, id=sequence.request.id))

    def _lose(self, sequence: Sequence, retry_after_seconds: float) -> None:
        self._given.discard(sequence)
        self._end(sequence, "lost", retry_after_seconds=retry_after_seconds)

    def _refuse(self, sequence: Sequence, limit: str = "") -> None:
        seconds = self._seconds_until_a_place(sequence.request.share)
        self._end(sequence, "queue_full", retry_after_seconds=seconds, limit=limit)

    def _end(self, sequence: Sequence, reason: FinishReason, **details: Any) -> None:
        """Say how a request ended that no replica has."""
        self._front_ends.add_finished(sequence.origin, sequence.finished(reason, self._clock(), **details))

    def _seconds_until_a_place(self, share: Share) -> float:
        return self.forecast.seconds_until_a_place(*self.dispatcher.crowd_of(share))


def without_limits(share: Share) -> Share:
    """Return what a replica is told of a caller: limits are kept here, where all is seen that a caller has."""
    return Share(share.caller, share.weight) if share.max_slots or share.max_waiting else share
