"""Places for streams that may stay open for ever: so many in all, and so many on one connection; and whose a call is."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dragoman.server.core.calls import Call
from dragoman.server.core.endings import RETRY_SECONDS
from dragoman.server.errors import ConnectionLimit


def owner_of(call: Call, peer: str) -> str:
    """Return whose a call is, for what is shared out: its caller or, where callers are not known, its address without the port."""
    return peer.rpartition(":")[0] if call.caller is None else call.caller.name


class Places:
    """Counts who has one; memory is that of those who have."""

    def __init__(self, name: str, total: int, per_connection: int) -> None:
        """Start with all of them free.

        Args:
            name: What callers are told the limit is called.
            total: How many there are.
            per_connection: How many of them one connection may have.
        """
        self._name = name
        self._total = total
        self._per_connection = per_connection
        self._taken: Counter[str] = Counter()

    @property
    def num_taken(self) -> int:
        """Places that somebody has."""
        return self._taken.total()

    @contextmanager
    def take(self, peer: str) -> Iterator[None]:
        """Have a place within the `with`.

        Args:
            peer: The connection's name, as gRPC gives it.

        Raises:
            ConnectionLimit: If the connection has its share, or none is left.
        """
        if self._taken[peer] >= self._per_connection:
            raise ConnectionLimit(f"{self._name}: {self._per_connection} on one connection", retry_after_seconds=RETRY_SECONDS)
        if self.num_taken >= self._total:
            raise ConnectionLimit(f"{self._name}: all {self._total} are taken", retry_after_seconds=RETRY_SECONDS)
        self._taken[peer] += 1
        try:
            yield
        finally:
            self._taken[peer] -= 1
            if not self._taken[peer]:
                del self._taken[peer]
