"""Pairs that wait to be scored, and the scoring of a few of them in each engine iteration.

It stands beside the engine: a pair takes no slot, and what the two share is the thread. No socket; `process.py` gives it one.
"""

import heapq
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from dragoman.server.engine.forecast import Average
from dragoman.server.engine.messages import FinishReason, Scored, ScoreRequest
from dragoman.server.engine.scheduler import Limits, place_in_line

log = structlog.get_logger("dragoman.engine")

Key = tuple[bytes, int]


class Scorer(Protocol):
    """Whatever computes scores. Used from one thread."""

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Score one pair, end-of-sequence included in both.

        Args:
            source_ids: `[S]`.
            target_ids: `[T]`.
            layer: Decoder layer whose attention is wanted; None for the mean of all.

        Returns:
            The target tokens' log-probabilities `[T]`, and the encoder–decoder attention `[T, S]`, averaged over heads.
        """
        ...


@dataclass(slots=True, eq=False)
class _Pair:
    """A request and where it came from."""

    origin: bytes
    request: ScoreRequest

    @property
    def key(self) -> Key:
        """Unique among all front ends."""
        return self.origin, self.request.id

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides."""
        return len(self.request.source_ids) + len(self.request.target_ids)


class Scoring:
    """The queue of pairs and what is reported of them.

    Order and limits are those of `Scheduler`, with the tokens of both sides counted: a pair overtakes what arrived less than its
    priority in seconds before it, so none starves. A step scores at most `prefill_tokens_per_step` tokens, or one pair that has
    more, which bounds how long running requests stall.
    """

    def __init__(self, scorer: Scorer, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_waiting_tokens = 0
        self._scorer, self._limits, self._clock = scorer, limits, clock
        self._waiting: dict[Key, _Pair] = {}
        self._queue: list[tuple[float, int, _Pair]] = []
        self._num_submitted = 0
        self._scored: defaultdict[bytes, list[Scored]] = defaultdict(list)
        self._seconds_between_ends = Average()
        self._last_end = 0.0

    @property
    def num_waiting(self) -> int:
        """Pairs not yet scored."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether a pair has ended since the last call of `take_scored`."""
        return bool(self._scored)

    def submit(self, origin: bytes, request: ScoreRequest) -> None:
        """Queue a pair, or report at once that the queue is full."""
        pair = _Pair(origin, request)
        assert pair.key not in self._waiting, "a request id is used twice"
        limits, tokens = self._limits, self.num_waiting_tokens + pair.num_tokens
        num_left_waiting = self.num_waiting - 1  # the first is scored at the next step
        if num_left_waiting >= limits.max_waiting_requests or (self._waiting and tokens > limits.max_waiting_tokens):
            self._report(pair, "queue_full", retry_after_seconds=self._seconds_until_a_place())
            return
        if not self._waiting:
            self._last_end = self._clock()  # an idle hour says nothing about how fast pairs are scored
        self._waiting[pair.key] = pair
        self.num_waiting_tokens = tokens
        self._num_submitted += 1
        self._drop_stale_entries()
        heapq.heappush(self._queue, (place_in_line(request), self._num_submitted, pair))

    def cancel(self, origin: bytes, request_id: int) -> None:
        """End a pair that nobody waits for; an id that is not here is somebody else's, or has just ended."""
        pair = self._waiting.get((origin, request_id))
        if pair is not None:
            self._end(pair, "cancelled")

    def remove_all(self, reason: FinishReason) -> None:
        """End everything."""
        for pair in list(self._waiting.values()):
            self._end(pair, reason)

    def step(self) -> None:
        """End what is past its deadline, and score the next pairs."""
        now = self._clock()
        for waiting in list(self._waiting.values()):
            if waiting.request.deadline is not None and waiting.request.deadline <= now:
                self._end(waiting, "deadline")
        budget = self._limits.prefill_tokens_per_step
        is_first = True
        while (pair := self._first()) is not None and (is_first or pair.num_tokens <= budget):
            self._score(pair)
            budget -= pair.num_tokens
            is_first = False

    def take_scored(self) -> dict[bytes, list[Scored]]:
        """Return, for each front end, how its pairs have ended since the last call."""
        scored, self._scored = self._scored, defaultdict(list)
        return scored

    def _first(self) -> _Pair | None:
        """Return who is next, and forget the places in front of it of what has ended."""
        while self._queue:
            pair = self._queue[0][2]
            if self._waiting.get(pair.key) is pair:
                return pair
            heapq.heappop(self._queue)
        return None

    def _score(self, pair: _Pair) -> None:
        """Score one pair; whatever goes wrong is that pair's end and nobody else's."""
        request = pair.request
        try:
            log_probs, attention = self._scorer.score(request.source_ids, request.target_ids, request.alignment_layer)
            alignment = attention.tobytes() if request.is_aligned else b""
            values = log_probs.tolist()
        except Exception:
            incident = uuid.uuid4().hex[:12]
            log.exception("scoring failed", incident=incident)
            self._end(pair, "step_failed", incident=incident)
            return
        now = self._clock()
        self._seconds_between_ends.add(max(now - self._last_end, 1e-6))
        self._last_end = now
        self._end(pair, "eos", values, alignment)

    def _end(
        self, pair: _Pair, reason: FinishReason, log_probs: list[float] | None = None, alignment: bytes = b"", incident: str = ""
    ) -> None:
        """Take a pair out of the queue and report its end."""
        del self._waiting[pair.key]
        self.num_waiting_tokens -= pair.num_tokens
        self._report(pair, reason, log_probs, alignment, incident)

    def _report(
        self,
        pair: _Pair,
        reason: FinishReason,
        log_probs: list[float] | None = None,
        alignment: bytes = b"",
        incident: str = "",
        retry_after_seconds: float = 0.0,
    ) -> None:
        scored = Scored(pair.request.id, reason, log_probs or [], alignment, self._clock(), incident, retry_after_seconds)
        self._scored[pair.origin].append(scored)

    def _seconds_until_a_place(self) -> float:
        """Guess when the queue has a place: the time in which a tenth of it, at least one pair, is scored."""
        if not self._seconds_between_ends.count:
            return 1.0
        return min(max(max(1.0, self.num_waiting / 10) * self._seconds_between_ends.value, 0.01), 30.0)

    def _drop_stale_entries(self) -> None:
        """Forget the places of what has ended, once they are the larger part."""
        if len(self._queue) > 2 * self.num_waiting + 64:
            self._queue = [entry for entry in self._queue if self._waiting.get(entry[2].key) is entry[2]]
            heapq.heapify(self._queue)
