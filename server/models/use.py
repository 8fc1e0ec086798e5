"""Use of a version by requests: number in flight, last use, outcomes."""

import asyncio
import math
import operator
import time
from collections.abc import Iterable
from typing import NamedTuple

from dragoman.server.errors import Draining, NotReady, ServerFault, ServiceError

# Rejected before any work was done: no evidence about the version.
REFUSED = (NotReady, Draining)
# Unexpected errors that count as the version's fault; others, such as a broken connection, do not.
UNFORESEEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# A version used twice as much lately counts as if it had been used so much later.
HALF_LIFE_SECONDS = 10.0


class Outcomes(NamedTuple):
    """Outcomes of requests."""

    num_answered: int = 0
    num_failed: int = 0  # requests that ended with a server fault, apart from `REFUSED`
    seconds: float = 0.0  # total time of the answered requests from arrival to answer
    queue_seconds: float = 0.0  # total time that answered requests waited for a slot

    def plus(self, other: "Outcomes") -> "Outcomes":
        """Return the sum."""
        return Outcomes(*map(operator.add, self, other))

    def since(self, earlier: "Outcomes") -> "Outcomes":
        """Return the difference to an earlier count."""
        return Outcomes(*map(operator.sub, self, earlier))


class Use:
    """Use of one version by the requests of one process; `num_moves` counts `take` and `leave`, `warm_until` is by `together`."""

    def __init__(self) -> None:
        self.num_held = 0
        self.num_moves = 0
        self.last_used = self.warm_until = time.monotonic()
        self.num_answered = self.num_failed = 0
        self.seconds = self.queue_seconds = 0.0
        self._free = asyncio.Event()
        self._free.set()

    @property
    def outcomes(self) -> Outcomes:
        """Outcomes of the requests that held the version."""
        return Outcomes(self.num_answered, self.num_failed, self.seconds, self.queue_seconds)

    async def until_free(self) -> None:
        """Wait until no request holds the version."""
        await self._free.wait()

    def take(self) -> None:
        """Start to hold the version."""
        self.num_held += 1
        self._move()
        self.warm_until = together((self.warm_until, self.last_used))
        self._free.clear()

    def leave(self, seconds: float, error: BaseException | None, *, is_cached: bool = False) -> None:
        """Stop holding the version after some seconds; `error` is None for an answered request.

        Answers from the cache are no outcomes: their latency says nothing about the version.
        """
        self.num_held -= 1
        self._move()
        if error is None:
            self.num_answered += not is_cached
            self.seconds += 0.0 if is_cached else seconds
        elif _is_fault(error):
            self.num_failed += 1
        if not self.num_held:
            self._free.set()

    def _move(self) -> None:
        self.num_moves += 1
        self.last_used = time.monotonic()


class Holding(NamedTuple):
    """Use of a version by the requests of all processes, as last reported; see `Use`."""

    num_held: int
    last_used: float
    warm_until: float


def _is_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of the version: not the caller's, and no rejection."""
    if isinstance(error, ServiceError):
        return isinstance(error, ServerFault) and not isinstance(error, REFUSED)
    return isinstance(error, UNFORESEEN)


def together(times: Iterable[float]) -> float:
    """Return the time at which a single use would weigh as much as uses at these times together (LRFU policy).

    A use's weight halves every `HALF_LIFE_SECONDS`, so that a short pause does not outweigh many earlier uses.
    """
    known = list(times)
    latest = max(known)
    return latest + HALF_LIFE_SECONDS * math.log2(sum(2 ** ((each - latest) / HALF_LIFE_SECONDS) for each in known))
