"""Use of a version by requests: how many hold it, when they did, and their outcomes."""

import asyncio
import math
import operator
import time
from collections.abc import Iterable
from typing import NamedTuple

from dragoman.server.errors import Draining, NotReady, ServerFault, ServiceError

# Refused before anything was done: they say nothing of the version.
REFUSED = (NotReady, Draining)
# Unforeseen errors; others, such as a caller that is gone while it is written to, are not of the version's making.
UNFORESEEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# A version that was used twice as much lately counts as if it had been used so much later.
HALF_LIFE_SECONDS = 10.0


class Outcomes(NamedTuple):
    """Outcomes of requests.

    Attributes:
        num_answered: Answered requests.
        num_failed: Requests that ended with a fault of the server, and not because it was ending.
        seconds: Total time of the answered ones, from their arrival at the model to their answer.
        queue_seconds: Total time for which those that the engine answered waited for a slot.
    """

    num_answered: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0

    def plus(self, other: "Outcomes") -> "Outcomes":
        """Return the sum."""
        return Outcomes(*map(operator.add, self, other))

    def since(self, earlier: "Outcomes") -> "Outcomes":
        """Return the difference to an earlier count."""
        return Outcomes(*map(operator.sub, self, earlier))


class Use:
    """Use of one version by the requests of one process.

    Attributes:
        num_held: Requests that hold it.
        num_moves: Number of times that one began or ended to hold it.
        last_used: Time of the last of these, or of the start; by `time.monotonic()`.
        warm_until: Time at which a single use would count as much as all uses together, see `together`.
        num_answered: See `Outcomes`, as the next three.
        num_failed: See `Outcomes`.
        seconds: See `Outcomes`.
        queue_seconds: See `Outcomes`.
    """

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
        """What became of the requests that held it."""
        return Outcomes(self.num_answered, self.num_failed, self.seconds, self.queue_seconds)

    async def until_free(self) -> None:
        """Wait until no request holds it."""
        await self._free.wait()

    def take(self) -> None:
        """Begin to hold."""
        self.num_held += 1
        self._move()
        self.warm_until = together((self.warm_until, self.last_used))
        self._free.clear()

    def leave(self, seconds: float, error: BaseException | None) -> None:
        """End to hold.

        Args:
            seconds: Time for which the request held it.
            error: How the request ended; None for an answer.
        """
        self.num_held -= 1
        self._move()
        if error is None:
            self.num_answered += 1
            self.seconds += seconds
        elif _is_fault(error):
            self.num_failed += 1
        if not self.num_held:
            self._free.set()

    def _move(self) -> None:
        self.num_moves += 1
        self.last_used = time.monotonic()


class Holding(NamedTuple):
    """Use of a version by the requests of all processes, as far as it is known here; see `Use`."""

    num_held: int
    last_used: float
    warm_until: float


def _is_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of the version: not the caller's, and no refusal."""
    if isinstance(error, ServiceError):
        return isinstance(error, ServerFault) and not isinstance(error, REFUSED)
    return isinstance(error, UNFORESEEN)


def together(times: Iterable[float]) -> float:
    """Return the time at which one use would count as much as uses at these times together (the LRFU policy).

    A use counts half as much with each `HALF_LIFE_SECONDS` since, so that a short pause does not outweigh many uses before it.
    """
    known = list(times)
    latest = max(known)
    return latest + HALF_LIFE_SECONDS * math.log2(sum(2 ** ((each - latest) / HALF_LIFE_SECONDS) for each in known))
