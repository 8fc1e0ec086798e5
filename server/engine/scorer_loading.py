"""When a scorer is loaded: at once, and where that fails again and again, ever more rarely."""

import structlog

from dragoman.model.errors import InputError

log = structlog.get_logger("dragoman.engine")

INITIAL_SECONDS = 1.0
MAX_SECONDS = 60.0


class ScorerLoading:
    """The tries to load a scorer; what it takes to do so is for others.

    Attributes:
        has_failed: Whether the last try has.
        next_try: When to try again, by the clock that `fail` is told.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.next_try = 0.0
        self._backoff_seconds = INITIAL_SECONDS

    def fail(self, error: BaseException, now: float) -> None:
        """Note a failure, and log the first of a row."""
        self.next_try = now + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, MAX_SECONDS)
        if not self.has_failed:
            is_foreseen = isinstance(error, InputError | OSError)
            log.error("the scorer cannot be loaded", reason=str(error), exc_info=None if is_foreseen else error)
        self.has_failed = True

    def succeed(self) -> None:
        """Note and log that it is loaded."""
        self.has_failed = False
        log.info("scorer loaded")

    def seconds_until_try(self, now: float) -> float:
        """Return what to tell a caller who has to come again."""
        return max(0.01, self.next_try - now)
