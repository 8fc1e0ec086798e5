"""What streams of requests have in hand: requests read and not answered, answers made and not taken.

All streams of a server share one allowance of requests and one of bytes. Each owner of streams may have its part, all owners
alike, and of that each of its streams; whatever others have, each stream may have one request. So no stream waits for another's
caller, none is slowed by how many streams another caller has, and what they hold together has a bound: the allowance, and a message
for each stream, of which what no model could use is not kept: `reading.py` and `several.py` see to that.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

# Each takes about 10 KB while it is served, whatever it asks for.
MAX_REQUESTS = 1024
MAX_BYTES = 16 * 2**20
# With so much not taken a stream begins nothing new.
MAX_UNTAKEN_BYTES = 256 * 2**10
# What a stream remembers of ids, to tell one that comes again.
NUM_REMEMBERED_IDS = 1024


class Owner:
    """Whoever has streams: a caller or, where callers are not known, an address.

    Attributes:
        num_streams: Those that are open.
        num_busy: Of them, those that have something in hand.
        num_bytes: In hand of all of them.
    """

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_busy = 0
        self.num_bytes = 0


class Allowance:
    """What all streams of a server share: alike among owners, and an owner's part among its streams.

    Only those count that have something in hand.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        """Start without a stream.

        Args:
            max_requests: Of all streams together.
            max_bytes: Of all streams together.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._owners: dict[str, Owner] = {}
        self._num_busy = 0  # owners
        self._waiting: set[Hand] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes in hand of all streams."""
        return sum(owner.num_bytes for owner in self._owners.values())

    def open(self, max_requests: int, owner: str = "") -> "Hand":
        """Return the hand of an owner's new stream, which may have so many requests at the most; close it when the stream ends."""
        found = self._owners.setdefault(owner, Owner())
        found.num_streams += 1
        return Hand(self, max_requests, found, owner)

    @contextmanager
    def held(self, max_requests: int, owner: str) -> "Iterator[Hand]":
        """Give an owner's call of several requests its hand within the `with`; arguments as `open`."""
        hand = self.open(max_requests, owner)
        try:
            yield hand
        finally:
            hand.close()

    def close(self, hand: "Hand") -> None:
        """Forget a stream, and let the others have its part."""
        self._waiting.discard(hand)
        owner = hand.owner
        self.change(hand, -hand.num_requests, -hand.num_bytes)
        owner.num_streams -= 1
        if not owner.num_streams:
            del self._owners[hand.name]

    def has_room(self, hand: "Hand") -> bool:
        """Say whether a stream may take another request in hand."""
        if hand.num_requests == 0:
            return True
        owner = hand.owner
        requests, num_bytes = self._max_requests // self._num_busy, self._max_bytes // self._num_busy
        is_alone = self._num_busy == owner.num_busy == 1
        return (
            hand.num_requests < hand.max_requests
            and (is_alone or hand.num_requests < requests // owner.num_busy)
            and hand.num_bytes < num_bytes // owner.num_busy
            and owner.num_bytes < num_bytes
        )

    def change(self, hand: "Hand", num_requests: int, num_bytes: int) -> None:
        """Count so much more, or less; who waits for it looks again."""
        owner, was_busy = hand.owner, hand.num_requests > 0
        before = self._part(owner)
        hand.num_requests += num_requests
        hand.num_bytes += num_bytes
        owner.num_bytes += num_bytes
        if was_busy != (hand.num_requests > 0):
            owner.num_busy += -1 if was_busy else 1
            if owner.num_busy == (0 if was_busy else 1):
                self._num_busy += -1 if was_busy else 1
        if self._waiting and self._part(owner) > before:
            self._wake_those_with_room()

    def queue(self, hand: "Hand") -> None:
        """Wake a stream when others have made room for it."""
        self._waiting.add(hand)

    def leave(self, hand: "Hand") -> None:
        """Wake a stream no more."""
        self._waiting.discard(hand)

    def _part(self, owner: Owner) -> tuple[int, bool]:
        """Return what grows when one of an owner's streams has made room for others."""
        owners = max(1, self._num_busy)
        return self._max_requests // owners // max(1, owner.num_busy), owner.num_bytes < self._max_bytes // owners

    def _wake_those_with_room(self) -> None:
        for hand in self._waiting:
            if self.has_room(hand):
                hand.wake()


class Hand:
    """What one stream has in hand.

    Attributes:
        max_requests: Most it may ever have.
        owner: Whose it is.
        name: The owner's.
        num_requests: Requests read whose answers are not taken.
        num_bytes: Of the requests that are not answered, and of the answers that are not taken.
    """

    def __init__(self, allowance: Allowance, max_requests: int, owner: Owner, name: str) -> None:
        self.max_requests = max_requests
        self.owner = owner
        self.name = name
        self.num_requests = 0
        self.num_bytes = 0
        self._allowance = allowance
        self._num_untaken_bytes = 0
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Wait until another request may be read."""
        if self._allowance.has_room(self):
            return
        self._allowance.queue(self)
        try:
            while not self._allowance.has_room(self):
                await self._change()
        finally:
            self._allowance.leave(self)

    async def turn(self) -> None:
        """Wait until a request that was read may be begun: until the answers before it are taken, if they are large."""
        while self._num_untaken_bytes > MAX_UNTAKEN_BYTES:
            await self._change()

    def hold(self, num_bytes: int) -> None:
        """Count so many bytes more, or less, of a message whose requests are not begun."""
        self._allowance.change(self, 0, num_bytes)

    def read(self, num_bytes: int) -> None:
        """Count a request."""
        self._allowance.change(self, 1, num_bytes)

    def answered(self, request_bytes: int, answer_bytes: int) -> None:
        """Count an answer in place of its request."""
        self._num_untaken_bytes += answer_bytes
        self._allowance.change(self, 0, answer_bytes - request_bytes)
        self.wake()

    def taken(self, num_bytes: int) -> None:
        """Count an answer no more."""
        self._num_untaken_bytes -= num_bytes
        self._allowance.change(self, -1, -num_bytes)
        self.wake()

    def wake(self) -> None:
        """Let what waits look again."""
        self._changed.set()

    def close(self) -> None:
        """Have nothing in hand any more."""
        self._allowance.close(self)

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
