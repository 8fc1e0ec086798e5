"""Large requests that are under way, of whichever protocol: how many bytes of them one caller may have."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dragoman.server.core.endings import RETRY_SECONDS
from dragoman.server.errors import QueueFull

# Hardly a request that a model can answer is larger.
LARGE_BYTES = 64 * 2**10
# Of large requests under way; what is kept of each, is kept until its call ends.
MAX_LARGE_BYTES = 32 * 2**20


def both_ends(text: str, num_characters: int) -> str:
    """Return a text without its middle, if it is longer than twice so many characters.

    A source that is too long is cut at its end, and a prompt at its beginning. What is left is still too long where all of it was.
    """
    return text if len(text) <= 2 * num_characters else text[:num_characters] + text[-num_characters:]


class LargeRequests:
    """The large requests that are under way, each of a call of its own, in equal parts for those who have some."""

    def __init__(self) -> None:
        self._num_bytes: Counter[str] = Counter()

    @contextmanager
    def one_more(self, num_bytes: int, owner: str) -> Iterator[None]:
        """Count one of somebody's within the `with`.

        Raises:
            QueueFull: If it is more than the owner's part; one alone may be of any size.
        """
        num_owners = len(self._num_bytes.keys() | {owner})
        if (have := self._num_bytes[owner]) and have + num_bytes > MAX_LARGE_BYTES // num_owners:
            raise QueueFull("request: too many large ones are under way", retry_after_seconds=RETRY_SECONDS)
        self._num_bytes[owner] += num_bytes
        try:
            yield
        finally:
            self._num_bytes[owner] -= num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]
