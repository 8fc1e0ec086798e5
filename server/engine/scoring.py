"""Pairs that wait to be scored, and whose turn it is.

It stands beside the engine: a pair takes no slot, and is computed on a thread that gives way to the engine's, in turns that leave
generation half of the time. No socket; `process.py` gives it one.
"""

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import structlog

from dragoman.server.engine.executors import Here, background
from dragoman.server.engine.forecast import Average
from dragoman.server.engine.messages import FinishReason, Scored, ScoreRequest
from dragoman.server.engine.pairs import Pair, Pairs
from dragoman.server.engine.scheduler import Limits, QueueIsFull
from dragoman.server.engine.scorer import Scorer
from dragoman.server.engine.scorer_loading import ScorerLoading
from dragoman.server.engine.turns import Turns

log = structlog.get_logger("dragoman.engine")


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What became of a pair, and when."""

    pair: Pair
    ended: float
    log_probs: list[float]
    alignment: bytes = b""
    error: Exception | None = None


class Scoring:
    """The queue of pairs and what is reported of them.

    `Pairs` says who is next, `Turns` when, `ScorerLoading` when to try to load a scorer that is not; whatever takes long is a job
    in the background, of which there is one at a time. Pairs that come before the scorer is loaded wait, unless that has failed.

    Attributes:
        on_done: Called, perhaps on another thread, when there is something for `step` to do.
    """

    def __init__(
        self,
        scorer: Scorer,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        """Begin with nothing waiting.

        Args:
            scorer: What scores.
            limits: Of the queue and of a turn.
            clock: In seconds, as deadlines are; for any thread.
            executor: Where to do what takes long; None for a thread of its own.
        """
        self.on_done: Callable[[], None] = lambda: None
        self._scorer, self._clock = scorer, clock
        self._background = executor or background()
        self._executor = Here() if scorer.is_on_device else self._background
        self._pairs = Pairs(limits)
        self._scored: defaultdict[bytes, list[Scored]] = defaultdict(list)
        self._job: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self._is_turn = False
        self._is_closed = False
        self._loading = ScorerLoading()
        self._turns = Turns()
        self._seconds_between_ends = Average()
        self._last_end = 0.0

    @property
    def num_waiting(self) -> int:
        """Pairs that have not ended."""
        return len(self._pairs)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of both sides of those."""
        return self._pairs.num_tokens

    @property
    def has_work(self) -> bool:
        """Whether `step` may have something to do, now or later."""
        return bool(self._pairs) or self._job is not None or not self._scorer.is_loaded

    @property
    def has_news(self) -> bool:
        """Whether a pair has ended since the last call of `take_scored`."""
        return bool(self._scored)

    @property
    def is_computing(self) -> bool:
        """Whether a thread is at work; after `close`, too."""
        return self._job is not None and not self._job[0].done()

    def seconds_until_work(self) -> float:
        """Return when `step` is to be called, as far as that depends on time alone; `on_done` says the rest. Infinity for never."""
        now = self._clock()
        until_deadline = max(0.0, self._pairs.next_deadline - now)
        if self._job is not None:
            return 0.0 if self._job[0].done() else until_deadline
        if not self._scorer.is_loaded:
            return max(0.0, self._loading.next_try - now)
        return min(self._turns.rest_seconds, until_deadline) if self._pairs.num_waiting else math.inf

    def submit(self, origin: bytes, request: ScoreRequest) -> None:
        """Queue a pair, or report at once why not."""
        pair, now = Pair(origin, request), self._clock()
        if self._loading.has_failed and self._job is None:
            self._report(pair, "not_loaded", retry_after_seconds=self._loading.seconds_until_try(now))
            return
        if not len(self._pairs):
            self._last_end = now  # an idle hour says nothing about how fast pairs are scored
        try:
            pushed_out = self._pairs.submit(pair)
        except QueueIsFull as error:
            self._report(pair, "queue_full", retry_after_seconds=self._seconds_until_a_place(), limit=error.limit)
            return
        for other in pushed_out:
            self._report(other, "queue_full", retry_after_seconds=self._seconds_until_a_place())

    def cancel(self, origin: bytes, request_id: int) -> None:
        """End a pair that nobody waits for; an id that is not here is somebody else's, or has just ended."""
        if (pair := self._pairs.find((origin, request_id))) is not None:
            self._end(pair, "cancelled")

    def remove_all(self, reason: FinishReason) -> None:
        """End everything."""
        for pair in self._pairs.all():
            self._end(pair, reason)

    def close(self) -> None:
        """Begin nothing any more, and let what is being computed fail soon."""
        self._is_closed = True
        self._background.shutdown(wait=False, cancel_futures=True)
        if self.is_computing:
            self._scorer.interrupt()

    def step(self, is_generating: bool = False) -> None:
        """Take in what has been done, and begin what comes next; what takes long is done elsewhere.

        Args:
            is_generating: Whether something has been generated since the last call.
        """
        for pair in self._pairs.expire(self._clock()):
            self._report(pair, "deadline")
        self._settle(is_generating)
        if self._job is None:
            self._begin()
            self._settle(is_generating)

    def take_scored(self) -> dict[bytes, list[Scored]]:
        """Return, for each front end, how its pairs have ended since the last call."""
        scored, self._scored = self._scored, defaultdict(list)
        return scored

    def _settle(self, is_generating: bool) -> None:
        """Let time pass, and see whether a job is done."""
        self._turns.pass_time(self._clock(), is_turn=self._is_turn, is_generating=is_generating)
        if self._job is not None and self._job[0].done():
            (future, on_done), self._job = self._job, None
            on_done(future)

    def _begin(self) -> None:
        """Begin the next job, if one is due: a try to load, or a turn."""
        if not self._scorer.is_loaded:
            if self._clock() >= self._loading.next_try:
                self._start(self._background, self._scorer.check, self._on_checked)
        elif not self._turns.rest_seconds and (pairs := self._pairs.take_turn()):
            self._is_turn = True
            self._start(self._executor, lambda: self._compute(pairs), self._on_computed)

    def _start(self, executor: Executor, do: Callable[[], Any], on_done: Callable[[Future[Any]], None]) -> None:
        future = executor.submit(do)
        self._job = future, on_done
        future.add_done_callback(lambda _: self.on_done())

    def _on_checked(self, future: Future[None]) -> None:
        if (error := future.exception()) is None:
            self._start(self._executor, self._scorer.open, self._on_opened)
        else:
            self._fail_to_load(error)

    def _on_opened(self, future: Future[None]) -> None:
        if (error := future.exception()) is None:
            self._loading.succeed()
        else:
            self._fail_to_load(error)

    def _fail_to_load(self, error: BaseException) -> None:
        now = self._clock()
        self._loading.fail(error, now)
        for pair in self._pairs.all():
            self._end(pair, "not_loaded", retry_after_seconds=self._loading.seconds_until_try(now))

    def _compute(self, pairs: list[Pair]) -> list[_Outcome]:
        """Score pairs one by one, but those that have ended meanwhile; on whichever thread that is done."""
        outcomes: list[_Outcome] = []
        for pair in pairs:
            if self._is_closed:
                break
            if pair not in self._pairs:
                continue
            request = pair.request
            try:
                log_probs, attention = self._scorer.score(
                    request.source_ids, request.target_ids, request.alignment_layer, request.decoder_start_id
                )
                alignment = attention.tobytes() if request.is_aligned else b""
                outcomes.append(_Outcome(pair, self._clock(), log_probs.tolist(), alignment))
            except Exception as error:
                outcomes.append(_Outcome(pair, self._clock(), [], error=error))
        return outcomes

    def _on_computed(self, future: Future[list[_Outcome]]) -> None:
        """End what was scored and has not ended meanwhile; whatever goes wrong with a pair is its end and nobody else's."""
        self._is_turn = False
        for outcome in future.result():
            pair = outcome.pair
            if pair not in self._pairs:
                continue
            if outcome.error is not None:
                incident = uuid.uuid4().hex[:12]
                log.error("scoring failed", incident=incident, exc_info=outcome.error)
                self._end(pair, "step_failed", incident=incident)
                continue
            self._seconds_between_ends.add(max(outcome.ended - self._last_end, 1e-6))
            self._last_end = outcome.ended
            self._end(pair, "eos", log_probs=outcome.log_probs, alignment=outcome.alignment)

    def _end(self, pair: Pair, reason: FinishReason, **details: Any) -> None:
        """Forget a pair and report its end."""
        self._pairs.remove(pair)
        self._report(pair, reason, **details)

    def _report(self, pair: Pair, reason: FinishReason, **details: Any) -> None:
        fields = {"log_probs": [], "alignment": b""} | details
        self._scored[pair.origin].append(Scored(id=pair.request.id, reason=reason, ended=self._clock(), **fields))

    def _seconds_until_a_place(self) -> float:
        """Guess when the queue has a place: the time in which a tenth of it, at least one pair, is scored."""
        if not self._seconds_between_ends.count:
            return 1.0
        return min(max(max(1.0, self.num_waiting / 10) * self._seconds_between_ends.value, 0.01), 30.0)
