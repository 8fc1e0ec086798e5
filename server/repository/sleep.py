"""Whether one model is to be loaded: it falls asleep when no request has come for a time, and wakes when one does."""

import math
import time
from collections.abc import Callable
from enum import StrEnum

from dragoman.server.repository.use import Holding

# After a model could not be woken nobody tries again for so long, twice as long each further time up to the second.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


class Why(StrEnum):
    """Why a model has fallen asleep."""

    IDLE = "idle"
    MEMORY = "memory"


class Sleep:
    """See above. It decides; who leads the model's versions does it.

    Attributes:
        keep_seconds: How long the model stays loaded without a request; infinite for always.
        is_asleep: What has been decided.
        why: Why it is asleep, if it has fallen asleep.
        is_asked: Whether it is to give way to another model.
        awake_since: When it was loaded last, by the clock.
        problem: Why it could not be woken the last time; empty if it could.
        retry_at: Before then it is not tried again.
    """

    def __init__(self, keep_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin asleep, unless it is always loaded.

        Args:
            keep_seconds: How long the model stays loaded without a request.
            clock: In seconds.
        """
        self.keep_seconds = keep_seconds
        self.is_asleep = keep_seconds < math.inf
        self.why = Why.IDLE
        self.is_asked = False
        self.awake_since = clock()
        self.problem = ""
        self.retry_at = -math.inf
        self._clock = clock
        self._num_failures = 0

    @property
    def may_sleep(self) -> bool:
        """Whether it is unloaded at all."""
        return self.keep_seconds < math.inf

    @property
    def retry_seconds(self) -> float:
        """Time until it may be tried again to wake it; 0 for at once."""
        return max(0.0, self.retry_at - self._clock())

    def decide(self, holding: Holding, *, is_awaited: bool, is_tried: bool) -> None:
        """Decide anew.

        Args:
            holding: How requests use it.
            is_awaited: Whether some wait for it.
            is_tried: Whether one of its versions is on probation: then it stays.
        """
        asked, self.is_asked = self.is_asked, False
        if not self.may_sleep:
            self.is_asleep = self.is_asleep and self.retry_seconds > 0
        elif self.is_asleep:
            self.is_asleep = not is_awaited or self.retry_seconds > 0
        elif not (is_awaited or is_tried):
            if asked:
                self.is_asleep, self.why = True, Why.MEMORY
            elif not holding.num_held and self._idle_seconds(holding) >= self.keep_seconds:
                self.is_asleep, self.why = True, Why.IDLE

    def pause(self, holding: Holding) -> float | None:
        """Return after how long it is to be decided anew if nothing happens; None for never."""
        if self.is_asleep:
            return self.retry_seconds or None
        if not self.may_sleep:
            return None
        return self.keep_seconds if holding.num_held else max(0.001, self.keep_seconds - self._idle_seconds(holding))

    def wake(self) -> None:
        """Take note that it has been loaded."""
        self.awake_since, self.problem, self._num_failures = self._clock(), "", 0

    def stay(self) -> None:
        """Be loaded for a while longer: it cannot sleep now."""
        self.is_asleep, self.awake_since = False, self._clock()

    def lie_down(self) -> None:
        """Sleep on: nobody waits any more."""
        self.is_asleep = True

    def fail(self, problem: str) -> None:
        """Sleep on: it could not be loaded, and may be the next time."""
        self.is_asleep, self.problem = True, problem
        seconds = min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(self._num_failures, 10))
        self._num_failures += 1
        self.retry_at = self._clock() + seconds

    def _idle_seconds(self, holding: Holding) -> float:
        return self._clock() - max(holding.last_used, self.awake_since)
