"""Retry policy, the attempts of a call, and the state of a streamed answer; the clients do the waiting."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dragoman.client.errors import CallError, DeadlineExceeded, FailedCall, InternalError, Overloaded, Unavailable
from dragoman.client.results import Piece, Result, piece_from_proto
from dragoman.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts and waits between them, for calls that were refused as overloaded or could not be served.

    Attributes:
        max_attempts: Attempts in all; 1 never tries again.
        initial_backoff_seconds: Wait after the first failure, without jitter.
        max_backoff_seconds: Longest wait, without jitter; a longer one that the server asks for is respected all the same.
        multiplier: Growth of the wait from one failure to the next.
        jitter: Each wait is lengthened by a random part of itself, at most this: clients that failed together come back apart.
    """

    max_attempts: int = 5
    initial_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    multiplier: float = 2.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: {self.max_attempts} is less than 1")
        for name in ("initial_backoff_seconds", "max_backoff_seconds", "jitter"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value} is not a number of 0 or more")
        if not (math.isfinite(self.multiplier) and self.multiplier >= 1):
            raise ValueError(f"multiplier: {self.multiplier} is not a number of 1 or more")

    def wait_seconds(self, num_attempts: int, error: CallError, draw: float) -> float | None:
        """Return how long to wait before the next attempt, or None if there is to be none.

        Args:
            num_attempts: Attempts made so far, the failed one included.
            error: How the last one failed.
            draw: A random number from 0 to 1.
        """
        if num_attempts >= self.max_attempts or not isinstance(error, Overloaded | Unavailable):
            return None
        backoff = self.initial_backoff_seconds
        for _ in range(num_attempts - 1):  # not a power: that overflows where this stops growing
            backoff = min(backoff * self.multiplier, self.max_backoff_seconds)
        return max(min(backoff, self.max_backoff_seconds), error.retry_after_seconds or 0.0) * (1.0 + self.jitter * draw)


DEFAULT_RETRY: Final = RetryPolicy()


class Attempts:
    """The attempts of one call and the time they share: one deadline for all of them and the waits between."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_seconds: float,
        request_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._timeout_seconds = timeout_seconds
        self.request_id = request_id
        self._clock = clock
        self._draw = draw
        self._deadline = clock() + timeout_seconds
        self._num_attempts = 0

    def start(self) -> float:
        """Count an attempt and return the time it has, in seconds; raises `DeadlineExceeded` if there is none left."""
        self._num_attempts += 1
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise DeadlineExceeded(f"the call's {self._timeout_seconds:g} s have passed", self.request_id)
        return remaining

    def wait_seconds(self, error: CallError) -> float | None:
        """Return how long to wait before the next attempt; None if the call fails with this error, for want of time too."""
        wait = self._policy.wait_seconds(self._num_attempts, error, self._draw())
        if wait is None or self._clock() + wait >= self._deadline:
            return None
        return wait


class Assembly:
    """State of a streamed answer: pieces received, and whether it may be requested again."""

    def __init__(self, attempts: Attempts, to_error: Callable[[FailedCall, str], CallError]) -> None:
        self.attempts = attempts
        self.request_id = attempts.request_id
        self.is_ended = False
        self._to_error = to_error
        self._num_pieces = 0
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The whole answer; raises `RuntimeError` before the last piece."""
        if self._result is None:
            raise RuntimeError("the stream has not delivered its last piece")
        return self._result

    @property
    def has_result(self) -> bool:
        """Whether the answer is complete, however the call ends after that."""
        return self._result is not None

    def piece(self, message: generation_pb2.GenerateStreamResponse) -> Piece:
        """Add the next message."""
        piece = piece_from_proto(message)
        self._num_pieces += 1
        self._result = piece.result
        return piece

    def end(self) -> None:
        """End a successful call; raises `InternalError` if the last piece has not come."""
        if self._result is None:
            raise InternalError("the stream ended without its result", self.request_id)

    def retry(self, failure: Any) -> float:
        """Return the wait before another attempt; raises the call's error if there is none, as once a piece is delivered."""
        error = self._to_error(failure, self.request_id)
        wait = self.attempts.wait_seconds(error) if self._num_pieces == 0 else None
        if wait is None:
            raise error from failure
        return wait
