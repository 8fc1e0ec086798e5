"""Lines that callers can cause at will: some of each kind are written, the others counted and told in one line now and then."""

import threading
import time
from collections.abc import Callable

from dragoman.server.buckets import Bucket

# Of each kind: lines that may come at once, and lines a second in the long run.
BURST = 100
PER_SECOND = 10.0
# How often those that were not written are to be told.
TELL_SECONDS = 10.0


class Sampler:
    """Says which lines to write; for any thread. Kinds must be few: each is remembered."""

    def __init__(self, tell: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing left out.

        Args:
            tell: Writes that of a kind so many lines were not written.
            clock: Seconds that only rise.
        """
        self._tell = tell
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._suppressed: dict[str, int] = {}
        self._last_told = clock()
        self._lock = threading.Lock()

    def allows(self, kind: str) -> bool:
        """Say whether to write a line of this kind; one that is not is counted, and told when it is time for that."""
        with self._lock:
            bucket = self._buckets.get(kind)
            if bucket is None:
                bucket = self._buckets[kind] = Bucket(PER_SECOND, BURST, self._clock)
            if bucket.level >= 1.0:
                bucket.take(1.0)
                return True
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            is_due = self._clock() - self._last_told >= TELL_SECONDS
        if is_due:
            self.tell()
        return False

    def tell(self) -> None:
        """Tell how many lines of each kind were not written and not told yet."""
        with self._lock:
            suppressed, self._suppressed = self._suppressed, {}
            self._last_told = self._clock()
        for kind, count in suppressed.items():
            self._tell(kind, count)
