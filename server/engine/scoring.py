"""Score requests of an engine: they hold no slot, and run beside generation in order of arrival.

On the CPU they run on a low-priority thread, in turns that leave generation half of the time; on a GPU on the engine's own thread,
between steps. The scorer's graph is loaded in the background once the engine is ready, and retried with backoff if that fails.
"""

import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from dragoman.model.errors import InputError
from dragoman.server.engine.messages import FinishReason, Scored, ScoreRequest

if TYPE_CHECKING:
    from dragoman.server.runtime.onnx import OnnxScorer

log = structlog.get_logger("dragoman.engine")

INITIAL_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
# Rest for each second of a turn beside generation: 1 leaves generation half of the time.
REST_PER_SECOND = 1.0
# Lowers the scheduling weight to a tenth: decode steps hardly slow down, and scoring still progresses.
NICENESS = 10


class _Outcome(NamedTuple):
    request: ScoreRequest
    ended: float
    log_probs: list[float]
    alignment: bytes = b""
    error: Exception | None = None


class Scoring:
    """Score requests that have not ended, and the results to report.

    Long work is one job at a time on another thread; `on_done`, called perhaps there, signals work for `step`. Requests wait while
    the scorer is not loaded, unless loading has failed.
    """

    def __init__(
        self,
        scorer: "OnnxScorer",
        turn_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        """Start with nothing waiting; `scorer` is used by one thread at a time, except for `interrupt`.

        A turn has at most `turn_tokens` of both sides, or one larger request. The clock must be thread-safe; without an `executor`,
        a low-priority thread does long work.
        """
        self.on_done: Callable[[], None] = lambda: None
        self._scorer, self._turn_tokens, self._clock = scorer, turn_tokens, clock
        self._background = executor or ThreadPoolExecutor(1, thread_name_prefix="scoring", initializer=_lower_priority)
        self._requests: dict[int, ScoreRequest] = {}
        self._waiting: dict[int, ScoreRequest] = {}
        self._scored: list[Scored] = []
        self._job: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self._is_turn = self._is_closed = self._has_failed = False
        self._next_try, self._retry_seconds = 0.0, INITIAL_RETRY_SECONDS
        self._rest_seconds = self._now = 0.0
        self._next_deadline = math.inf

    @property
    def num_waiting(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_waiting_tokens(self) -> int:
        """Source and target tokens of the requests that have not ended."""
        return sum(map(_num_tokens, self._requests.values()))

    @property
    def has_work(self) -> bool:
        """Whether `step` may have work, now or later."""
        return bool(self._requests) or self._job is not None or not self._scorer.is_loaded

    @property
    def has_news(self) -> bool:
        """Whether a request has ended since the last call of `take_scored`."""
        return bool(self._scored)

    @property
    def is_computing(self) -> bool:
        """Whether a job is running, even after `close`."""
        return self._job is not None and not self._job[0].done()

    def seconds_until_work(self) -> float:
        """Return the time until `step` has work by time alone, infinity for never; `on_done` signals other work."""
        now = self._clock()
        until_deadline = max(0.0, self._next_deadline - now)
        if self._job is not None:
            return 0.0 if self._job[0].done() else until_deadline
        if not self._scorer.is_loaded:
            return max(0.0, self._next_try - now)
        return min(self._rest_seconds, until_deadline) if self._waiting else math.inf

    def submit(self, request: ScoreRequest) -> None:
        """Add a request, or end it at once if the scorer cannot be loaded."""
        self._requests[request.id] = request
        if self._has_failed and self._job is None:
            self._end(request, "not_loaded", retry_after_seconds=self._seconds_until_try())
            return
        self._waiting[request.id] = request
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; no effect if it is unknown."""
        if (request := self._requests.get(request_id)) is not None:
            self._end(request, "cancelled")

    def end_all(self, reason: FinishReason) -> None:
        """End all requests."""
        for request in list(self._requests.values()):
            self._end(request, reason)

    def close(self) -> None:
        """Start no more jobs, and interrupt the running one."""
        self._is_closed = True
        self._background.shutdown(wait=False, cancel_futures=True)
        if self.is_computing:
            self._scorer.interrupt()

    def step(self, is_generating: bool = False) -> None:
        """Process a finished job and start the next; `is_generating` is whether tokens were generated since the last call."""
        self._retire()
        self._settle(is_generating)
        if self._job is None:
            self._begin()
            self._settle(is_generating)

    def take_scored(self) -> list[Scored]:
        """Return the ends of requests since the last call."""
        scored, self._scored = self._scored, []
        return scored

    def _retire(self) -> None:
        if (now := self._clock()) < self._next_deadline:
            return
        self._next_deadline = math.inf
        for request in list(self._requests.values()):
            if request.deadline is not None and request.deadline <= now:
                self._end(request, "deadline")
            elif request.deadline is not None:
                self._next_deadline = min(self._next_deadline, request.deadline)

    def _settle(self, is_generating: bool) -> None:
        """Update the rest, owed for the part of a turn beside generation and reduced by time, and finish a done job."""
        now = self._clock()
        elapsed, self._now = now - self._now, now
        if not self._is_turn:
            self._rest_seconds = max(0.0, self._rest_seconds - elapsed)
        elif is_generating:
            self._rest_seconds += REST_PER_SECOND * elapsed
        if self._job is not None and self._job[0].done():
            (future, on_done), self._job = self._job, None
            on_done(future)

    def _begin(self) -> None:
        if not self._scorer.is_loaded:
            if self._clock() >= self._next_try:
                self._start(self._scorer.check, self._on_checked)
        elif not self._rest_seconds and (turn := self._take_turn()):
            self._is_turn = True
            self._start(lambda: self._compute(turn), self._on_computed, is_device_work=True)

    def _take_turn(self) -> list[ScoreRequest]:
        turn: list[ScoreRequest] = []
        budget = self._turn_tokens
        for request in self._waiting.values():
            if turn and _num_tokens(request) > budget:
                break
            budget -= _num_tokens(request)
            turn.append(request)
        for request in turn:
            del self._waiting[request.id]
        return turn

    def _start(self, do: Callable[[], Any], on_done: Callable[[Future[Any]], None], *, is_device_work: bool = False) -> None:
        """Start a job in the background; device work runs at once on this thread."""
        future: Future[Any]
        if is_device_work and self._scorer.is_on_device:
            future = Future()
            try:
                future.set_result(do())
            except Exception as error:
                future.set_exception(error)
        else:
            future = self._background.submit(do)
        self._job = future, on_done
        future.add_done_callback(lambda _: self.on_done())

    def _on_checked(self, future: Future[None]) -> None:
        if (error := future.exception()) is None:
            self._start(self._scorer.open, self._on_opened, is_device_work=True)
        else:
            self._fail_to_load(error)

    def _on_opened(self, future: Future[None]) -> None:
        if (error := future.exception()) is None:
            self._has_failed = False
            log.info("scorer loaded")
        else:
            self._fail_to_load(error)

    def _fail_to_load(self, error: BaseException) -> None:
        """Log the first of consecutive failures, and end the waiting requests."""
        self._next_try = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
        if not self._has_failed:
            is_foreseen = isinstance(error, InputError | OSError)
            log.error("the scorer cannot be loaded", reason=str(error), exc_info=None if is_foreseen else error)
        self._has_failed = True
        for request in list(self._requests.values()):
            self._end(request, "not_loaded", retry_after_seconds=self._seconds_until_try())

    def _seconds_until_try(self) -> float:
        return max(0.01, self._next_try - self._clock())

    def _compute(self, turn: list[ScoreRequest]) -> list[_Outcome]:
        """Score the requests that have not ended meanwhile, one by one; runs on the background thread, if any."""
        outcomes: list[_Outcome] = []
        for request in turn:
            if self._is_closed:
                break
            if request.id not in self._requests:
                continue
            try:
                log_probs, attention = self._scorer.score(
                    request.source_ids, request.target_ids, request.alignment_layer, request.decoder_start_id
                )
                alignment = attention.tobytes() if request.is_aligned else b""
                outcomes.append(_Outcome(request, self._clock(), log_probs.tolist(), alignment))
            except Exception as error:
                outcomes.append(_Outcome(request, self._clock(), [], error=error))
        return outcomes

    def _on_computed(self, future: Future[list[_Outcome]]) -> None:
        """End the requests of a turn that have not ended meanwhile; an error fails one request only."""
        self._is_turn = False
        for request, ended, log_probs, alignment, error in future.result():
            if request.id not in self._requests:
                continue
            if error is None:
                self._end(request, "eos", log_probs=log_probs, alignment=alignment, ended=ended)
                continue
            incident = uuid.uuid4().hex[:12]
            log.error("scoring failed", incident=incident, exc_info=error)
            self._end(request, "step_failed", incident=incident)

    def _end(self, request: ScoreRequest, reason: FinishReason, **details: Any) -> None:
        del self._requests[request.id]
        self._waiting.pop(request.id, None)
        fields: dict[str, Any] = {"log_probs": [], "alignment": b"", "ended": self._clock()} | details
        self._scored.append(Scored(id=request.id, reason=reason, **fields))


def _num_tokens(request: ScoreRequest) -> int:
    return len(request.source_ids) + len(request.target_ids)


def _lower_priority() -> None:
    """Lower this thread's priority; on Linux `nice` applies to the calling thread."""
    with contextlib.suppress(OSError):  # if forbidden, turns alone limit scoring
        os.nice(NICENESS)
