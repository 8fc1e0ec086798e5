"""What streams of requests have in hand: requests read and not answered, answers made and not taken.

All streams of a server share one allowance of requests and one of bytes. Each may have its part, all streams alike; whatever
others have, each may have one request. So no stream waits for another's caller, and what they hold together has a bound: the
allowance, and a request for each stream.
"""

import asyncio
from hashlib import blake2b

# Each takes about 10 KB while it is served, whatever it asks for.
MAX_REQUESTS = 1024
MAX_BYTES = 16 * 2**20
# With so much not taken a stream begins nothing new.
MAX_UNTAKEN_BYTES = 256 * 2**10
# What a stream remembers of ids, to tell one that comes again.
NUM_REMEMBERED_IDS = 1024


class Allowance:
    """What all streams of a server share."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        """Start without a stream.

        Args:
            max_requests: Of all streams together.
            max_bytes: Of all streams together.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._hands: set[Hand] = set()
        self._waiting: set[Hand] = set()
        self.num_bytes = 0

    def open(self, max_requests: int) -> "Hand":
        """Return the hand of a new stream, which may have so many requests at the most; close it when the stream ends."""
        hand = Hand(self, max_requests)
        self._hands.add(hand)
        return hand

    def close(self, hand: "Hand") -> None:
        """Forget a stream, and let the others have its part."""
        self._hands.discard(hand)
        self._waiting.discard(hand)
        self.change(-hand.num_bytes)
        for other in self._hands:
            other.wake()

    def has_room(self, hand: "Hand") -> bool:
        """Say whether a stream may take another request in hand."""
        if hand.num_requests == 0:
            return True
        num_streams = len(self._hands)
        return (
            hand.num_requests < hand.max_requests
            and (hand.num_requests < self._max_requests // num_streams or num_streams == 1)
            and hand.num_bytes < self._max_bytes // num_streams
            and self.num_bytes < self._max_bytes
        )

    def change(self, num_bytes: int) -> None:
        """Count so many bytes more, or fewer; who waits for them looks again."""
        self.num_bytes += num_bytes
        if self._waiting and self.num_bytes < self._max_bytes:
            for hand in self._waiting:
                hand.wake()
            self._waiting.clear()

    def queue(self, hand: "Hand") -> None:
        """Wake a stream when there are fewer bytes in hand, if that is what it waits for."""
        if self.num_bytes >= self._max_bytes:
            self._waiting.add(hand)


class Hand:
    """What one stream has in hand.

    Attributes:
        max_requests: Most it may ever have.
        num_requests: Requests read whose answers are not taken.
        num_bytes: Of the requests that are not answered, and of the answers that are not taken.
    """

    def __init__(self, allowance: Allowance, max_requests: int) -> None:
        self.max_requests = max_requests
        self.num_requests = 0
        self.num_bytes = 0
        self._allowance = allowance
        self._num_untaken_bytes = 0
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Wait until another request may be read."""
        while not self._allowance.has_room(self):
            self._allowance.queue(self)
            await self._change()

    async def turn(self) -> None:
        """Wait until a request that was read may be begun: until the answers before it are taken, if they are large."""
        while self._num_untaken_bytes > MAX_UNTAKEN_BYTES:
            await self._change()

    def read(self, num_bytes: int) -> None:
        """Count a request."""
        self.num_requests += 1
        self._add(num_bytes)

    def answered(self, request_bytes: int, answer_bytes: int) -> None:
        """Count an answer in place of its request."""
        self._num_untaken_bytes += answer_bytes
        self._add(answer_bytes - request_bytes)
        self.wake()

    def taken(self, num_bytes: int) -> None:
        """Count an answer no more."""
        self.num_requests -= 1
        self._num_untaken_bytes -= num_bytes
        self._add(-num_bytes)
        self.wake()

    def wake(self) -> None:
        """Let what waits look again."""
        self._changed.set()

    def close(self) -> None:
        """Have nothing in hand any more."""
        self._allowance.close(self)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._allowance.change(num_bytes)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class RecentIds:
    """The ids that came last on a stream, `NUM_REMEMBERED_IDS` of them at least; a digest of eight bytes each."""

    def __init__(self) -> None:
        self._newest: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, request_id: str) -> bool:
        """Remember an id; return whether it is new."""
        digest = blake2b(request_id.encode(), digest_size=8).digest()
        if digest in self._newest or digest in self._older:
            return False
        if len(self._newest) >= NUM_REMEMBERED_IDS:
            self._older, self._newest = self._newest, set()
        self._newest.add(digest)
        return True
