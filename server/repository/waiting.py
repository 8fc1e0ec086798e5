"""Requests of one process that wait for models to be loaded. Who loads models is told which, and tells what has come of it."""

import asyncio
import time
from collections.abc import Callable

from dragoman.server.errors import NotReady

USUAL_SECONDS = 30.0
# When to come again, where nothing is known of how long loading takes.
RETRY_SECONDS = 1.0
# So long it is believed that somebody comes again who was told to; then the model is loaded for nobody.
PROMISE_SECONDS = 60.0
# Of the time that a caller has, what is left for telling it that the model was not there in time.
MARGIN = 0.1
MAX_MARGIN_SECONDS = 0.25


class Waiting:
    """See above.

    Attributes:
        max_seconds: How long a request waits at the most.
        on_change: Called when other models are waited for than before.
    """

    def __init__(self, max_seconds: float = USUAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nobody waiting.

        Args:
            max_seconds: How long a request waits at the most.
            clock: In seconds.
        """
        self.max_seconds = max_seconds
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Models that somebody has been told to come back for, and until when that is believed.
        self._promised: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._load_seconds: dict[str, float] = {}

    @property
    def names(self) -> frozenset[str]:
        """Models that are waited for, or that somebody comes back for who could not wait longer."""
        now = self._clock()
        return frozenset(self._waiting) | {name for name, until in self._promised.items() if until > now}

    def num_waiting(self, name: str) -> int:
        """Return how many requests wait for a model."""
        return len(self._waiting.get(name, ()))

    def end_of(self, seconds: float | None) -> float:
        """Return until when a request may wait that has so long until its deadline; None for no deadline."""
        if seconds is None:
            return self._clock() + self.max_seconds
        return self._clock() + min(self.max_seconds, seconds - min(MAX_MARGIN_SECONDS, MARGIN * seconds))

    async def wait(self, name: str, until: float) -> None:
        """Wait until something has changed about a model; a caller that leaves meanwhile is forgotten.

        Args:
            name: Of the model.
            until: When it is too late, by the clock.

        Raises:
            NotReady: If nothing has by then, or the model cannot be loaded.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if name not in self._waiting:
            self._began.setdefault(name, self._clock())
            self._waiting[name] = {future: None}
            self.on_change()
        else:
            self._waiting[name][future] = None
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await future
        except TimeoutError:
            self._promise(name)
            raise NotReady(f"model {name!r} is being loaded", retry_after_seconds=self._retry_seconds(name)) from None
        finally:
            self._leave(name, future)

    def change(self, name: str) -> None:
        """Have those who wait for a model look again: it is answered for otherwise than before."""
        self._drop_promise(name)
        if (began := self._began.pop(name, None)) is not None:
            self._load_seconds[name] = self._clock() - began
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_result(None)

    def refuse(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Tell those who wait for a model that it cannot be loaded."""
        self._drop_promise(name)
        self._began.pop(name, None)
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_exception(NotReady(f"model {name!r} cannot be loaded: {reason}", retry_after_seconds))

    def _leave(self, name: str, future: asyncio.Future[None]) -> None:
        if future.done() and not future.cancelled():
            future.exception()  # seen, even if the caller has left at the same moment
        waiting = self._waiting[name]
        del waiting[future]
        if not waiting:
            del self._waiting[name]
            if name not in self._promised:
                self._began.pop(name, None)
            self.on_change()

    def _promise(self, name: str) -> None:
        """Have a model be loaded for who was told to come back; not for ever, it may not come."""
        self._promised[name] = self._clock() + PROMISE_SECONDS
        asyncio.get_running_loop().call_later(PROMISE_SECONDS, self._forget_promise, name)

    def _drop_promise(self, name: str) -> None:
        """Believe no longer that somebody comes back for a model: it has been loaded, or cannot be."""
        if self._promised.pop(name, None) is not None and name not in self._waiting:
            self.on_change()

    def _forget_promise(self, name: str) -> None:
        until = self._promised.get(name)
        if until is not None and until <= self._clock():
            del self._promised[name]
            self.on_change()

    def _retry_seconds(self, name: str) -> float:
        """Return what is left of loading, if it takes as long as the last time."""
        usual, began = self._load_seconds.get(name), self._began.get(name)
        if usual is None or began is None:
            return RETRY_SECONDS
        return max(RETRY_SECONDS, usual - (self._clock() - began))
