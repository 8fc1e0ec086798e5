"""The part of a desk that has pairs to score: takes them in, gives them to replicas, says how they ended."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dragoman.server.dispatch.front_ends import FrontEnds
from dragoman.server.dispatch.given import Given
from dragoman.server.dispatch.pair_dispatcher import PairDispatcher
from dragoman.server.dispatch.request_desk import without_limits
from dragoman.server.engine.messages import FinishReason, Report, Scored, ScoreRequest
from dragoman.server.engine.pairs import Key, Pair
from dragoman.server.engine.scheduler import Limits, QueueIsFull


class PairDesk:
    """Pairs that have not ended: those that wait here, by `PairDispatcher`'s rules, and those that replicas have.

    Attributes:
        dispatcher: Who waits and who is where.
    """

    def __init__(self, limits: Limits, front_ends: FrontEnds, numbers: "itertools.count[int]", clock: Callable[[], float]) -> None:
        """Start without replicas; for the arguments see `RequestDesk`."""
        self.dispatcher = PairDispatcher(limits)
        self._front_ends, self._clock = front_ends, clock
        self._given: Given[Pair] = Given(numbers)

    def submit(self, origin: bytes, request: ScoreRequest) -> None:
        """Queue a pair, or end it at once for lack of a place. It may push out others."""
        pair = Pair(origin, request)
        try:
            pushed_out = self.dispatcher.submit(pair, self._clock())
        except QueueIsFull as full:
            self._refuse(pair, full.limit)
            return
        for other in pushed_out:
            self._refuse(other)

    def cancel(self, key: Key) -> tuple[int, int] | None:
        """End a pair that waits here; for one that a replica has, return which replica, and the number to cancel there."""
        pair = self.dispatcher.find(key)
        if pair is None:
            return None
        if (index := self.dispatcher.replica_of(pair)) is not None:
            return index, self._given.number(pair)
        self.dispatcher.remove(pair)
        self._end(pair, "cancelled")
        return None

    def keys(self, origin: bytes) -> list[Key]:
        """Return the keys of what a front end has asked for and has not ended."""
        return self.dispatcher.keys(origin)

    def hear(self, report: Report, now: float) -> None:
        """Take in what a replica says of pairs."""
        for scored in report.scored:
            if (pair := self._given.find(scored.id)) is not None:
                if scored.reason == "eos":
                    self.dispatcher.scored(pair, now)
                else:
                    self.dispatcher.remove(pair)
                self._given.discard(pair)
                self._front_ends.add_scored(pair.origin, replace(scored, id=pair.request.id))

    def lose(self, index: int, retry_after_seconds: float) -> None:
        """End what a replica had that is gone."""
        for pair in self.dispatcher.close(index):
            self._lose(pair, retry_after_seconds)

    def lose_all(self, retry_after_seconds: float) -> None:
        """End everything."""
        for pair in self.dispatcher.remove_all():
            self._lose(pair, retry_after_seconds)

    def refuse_lost(self, origin: bytes, request: ScoreRequest, retry_after_seconds: float) -> None:
        """End a pair for which there is no replica."""
        self._lose(Pair(origin, request), retry_after_seconds)

    def expire(self, now: float) -> None:
        """End what should not wait any more, here or in a replica."""
        for pair in self.dispatcher.expire(now):
            self._given.discard(pair)
            self._end(pair, "deadline")

    def hand_over(self) -> dict[int, list[ScoreRequest]]:
        """Return what replicas are to be told to score, by replica."""
        requests: defaultdict[int, list[ScoreRequest]] = defaultdict(list)
        for index, pair in self.dispatcher.hand_over():
            request = pair.request
            requests[index].append(replace(request, id=self._given.add(pair), share=without_limits(request.share)))
        return requests

    def _lose(self, pair: Pair, retry_after_seconds: float) -> None:
        self._given.discard(pair)
        self._end(pair, "lost", retry_after_seconds=retry_after_seconds)

    def _refuse(self, pair: Pair, limit: str = "") -> None:
        self._end(pair, "queue_full", retry_after_seconds=self.dispatcher.seconds_until_a_place(), limit=limit)

    def _end(self, pair: Pair, reason: FinishReason, **details: Any) -> None:
        """Say how a pair ended that was not scored."""
        scored = Scored(id=pair.request.id, reason=reason, log_probs=[], alignment=b"", ended=self._clock(), **details)
        self._front_ends.add_scored(pair.origin, scored)
