"""What requests do with a version of a model: how many hold it, and what became of those that did."""

import asyncio
import math
import operator
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple, TypeVar

from dragoman.server.errors import Draining, NotReady, ServerFault, ServiceError

# Refused before anything was done for them: they say nothing of the version.
REFUSED = (NotReady, Draining)
# Nobody foresaw them. Others, such as that a caller is gone while it is being written to, are not of the version's making.
UNFORESEEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# What has been used twice as much lately counts as if it had been used so much later.
HALF_LIFE_SECONDS = 10.0

T = TypeVar("T")


class Outcomes(NamedTuple):
    """What became of requests.

    Attributes:
        num_answered: Those that were answered.
        num_failed: Those that ended with a fault of the server, and not because it was ending.
        seconds: What the answered ones took together, from their arrival at the model to their answer.
        queue_seconds: What those that the engine answered waited for a slot, together.
    """

    num_answered: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0

    def plus(self, other: "Outcomes") -> "Outcomes":
        """Return what became of both."""
        return Outcomes(*map(operator.add, self, other))

    def since(self, earlier: "Outcomes") -> "Outcomes":
        """Return what became of those that an earlier count did not have."""
        return Outcomes(*map(operator.sub, self, earlier))


class Use:
    """The use of one version, by the requests of one process.

    Attributes:
        num_held: Requests that hold it.
        num_moves: Times that one has begun or ended to hold it.
        last_used: When that was last, or when there was no use of it yet; by `time.monotonic()`.
        warm_until: When a single use of it would have to be to count as much as all of them do, see `together`.
        num_answered: See `Outcomes`, as the next three.
        num_failed: See `num_answered`.
        seconds: See `num_answered`.
        queue_seconds: See `num_answered`.
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
            seconds: How long the request has held it.
            error: How it ended; None for an answer.
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
    """The use of a version by the requests of all processes, as far as it is known here.

    Attributes:
        num_held: Requests that hold it.
        last_used: See `Use`, as the next.
        warm_until: See `Use`.
    """

    num_held: int
    last_used: float
    warm_until: float


class Held(AbstractAsyncContextManager[T, None]):
    """Holds what is chosen when it is entered, until it is left."""

    def __init__(
        self, choose: Callable[[], tuple[T, Use]], until_there: Callable[[T], Awaitable[None] | None] = lambda _: None
    ) -> None:
        """Choose nothing yet.

        Args:
            choose: Returns what is to be held, and its use; called when the `with` is entered.
            until_there: Returns what is to be waited for before something that was chosen can be held; another may be chosen then.
                None for nothing.
        """
        self._choose, self._until_there = choose, until_there

    async def __aenter__(self) -> T:
        """Choose and hold, in one turn of the event loop: nothing can end between the two."""
        chosen, self._use = self._choose()
        while (coming := self._until_there(chosen)) is not None:
            await coming
            chosen, self._use = self._choose()
        self._use.take()
        self._began = time.monotonic()
        return chosen

    async def __aexit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Hold it no longer."""
        self._use.leave(time.monotonic() - self._began, error)


def _is_fault(error: BaseException) -> bool:
    """Return whether an end is a fault of what answers: not the caller's, not that the caller is gone, and no refusal."""
    if isinstance(error, ServiceError):
        return isinstance(error, ServerFault) and not isinstance(error, REFUSED)
    return isinstance(error, UNFORESEEN)


def together(times: Iterable[float]) -> float:
    """Return the time at which one use would have to be to count as much as uses at some times together (the LRFU policy).

    A use counts half as much with each `HALF_LIFE_SECONDS` that have passed since. Of what is used seldom this is hardly later than
    the last use; what is used again and again is not taken for unused because it was not in the very last moment.
    """
    known = list(times)
    latest = max(known)
    return latest + HALF_LIFE_SECONDS * math.log2(sum(2 ** ((each - latest) / HALF_LIFE_SECONDS) for each in known))
