"""How fast the messages of one connection are taken up.

Whoever is too fast waits: a call before it is served, a stream before its next message is read. No more calls of a connection wait
than it may have streams, and what a stream sends meanwhile is held back by gRPC's flow control. Only what would wait too long is
refused, and that at the end of its wait, so that refusals come no faster than answers.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from dragoman.server.errors import ConnectionLimit
from dragoman.server.faces.counted import Counted

# Of a second's messages, so many may come at once.
BURST_SECONDS = 1.0
MAX_WAIT_SECONDS = 5.0
# More than there may be connections by default; of more the ones quiet for longest are forgotten.
MAX_PEERS = 8192


class Pace:
    """A token bucket for each connection, kept as the time at which it would be full again."""

    def __init__(self, messages_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without connections.

        Args:
            messages_per_second: How many messages of one connection are taken up in the long run.
            clock: Gives the time in seconds.
        """
        self._rate = messages_per_second
        self._clock = clock
        self._full: OrderedDict[str, float] = OrderedDict()

    def take(self, peer: str) -> float:
        """Count a message of a connection; return for how many seconds it has to wait. One that is not to come is not counted.

        Raises:
            ConnectionLimit: If that were longer than `MAX_WAIT_SECONDS`; it says when it would not.
        """
        _, seconds = self._after(peer, 1)
        if seconds > MAX_WAIT_SECONDS:
            raise ConnectionLimit(
                f"max_messages_per_second: {self._rate:g} on one connection", retry_after_seconds=seconds - MAX_WAIT_SECONDS
            )
        return self.count(peer)

    def count(self, peer: str, num_messages: int = 1) -> float:
        """Count messages of a connection that have come; return for how many seconds the last of them has to wait."""
        self._full[peer], seconds = self._after(peer, num_messages)
        self._full.move_to_end(peer)
        if len(self._full) > MAX_PEERS:
            self._full.popitem(last=False)
        return max(0.0, seconds)

    async def wait(self, peer: str) -> None:
        """Wait until a message of this connection may be taken up.

        Raises:
            ConnectionLimit: If even that did not help.
        """
        try:
            seconds = self.take(peer)
        except ConnectionLimit:
            await asyncio.sleep(MAX_WAIT_SECONDS)
            raise
        if seconds:
            await asyncio.sleep(seconds)

    async def read(self, messages: AsyncIterator[Any], peer: str) -> AsyncIterator[Any]:
        """Yield the messages of a stream of this connection, each when those before it may have been, however long that takes.

        One of several requests counts as so many, one of none as one. It counts before it is served: a stream that is ended then
        has had nothing for less.
        """
        async for message in messages:
            seconds = self.count(peer, max(1, len(message)) if isinstance(message, Counted) else 1)
            yield message
            del message
            if seconds:
                await asyncio.sleep(seconds)

    def _after(self, peer: str, num_messages: int) -> tuple[float, float]:
        """Return when the bucket would be full after so many more, and for how many seconds the last has to wait, if above 0."""
        now = self._clock()
        full = max(self._full.get(peer, 0.0), now) + num_messages / self._rate
        return full, full - now - BURST_SECONDS
