"""In-flight windows of streaming calls: requests, bytes and streams of one connection."""

import asyncio
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from dragoman.server.errors import ConnectionLimit
from dragoman.server.protocols.grpc.reading import OfConnections, Turns
from dragoman.server.protocols.several_requests import Counted
from dragoman.server.service.context import Call
from dragoman.server.service.outcomes import RETRY_SECONDS
from dragoman.server.service.service import Core

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


# Requests in hand for each slot of the largest model: one that decodes and one that is ready to take its place.
REQUESTS_PER_SLOT = 2


def requests_per_stream(core: Core) -> int:
    """Return how many requests a stream may have in hand."""
    return REQUESTS_PER_SLOT * max((model.max_slots for model in core.models.all()), default=1)


class Streams:
    """Gives each stream its place, its turns at reading, and its part of what may be in hand."""

    def __init__(self, core: Core, max_per_connection: int = 2**31) -> None:
        """Start without streams.

        Args:
            core: Whose models answer.
            max_per_connection: Streams of one connection; each may have a large message half sent.
        """
        self._core = core
        self._allowance = Allowance()
        self._turns = OfConnections(Turns)
        self._places = Places("max_batch_streams_per_connection", sys.maxsize, max_per_connection)

    def turns(self, peer: str) -> Turns:
        """Return the turns of a connection's streams."""
        return self._turns.of(peer)

    @contextmanager
    def open(self, call: Call, peer: str) -> Iterator[Hand]:
        """Give a stream its place and its hand within the `with`.

        Raises:
            ConnectionLimit: If the connection has its share of places.
        """
        with self._places.take(peer), self.hand(call, peer) as hand:
            yield hand

    @contextmanager
    def hand(self, call: Call, peer: str) -> Iterator[Hand]:
        """Give a call of several requests, which ends by itself, its hand within the `with`."""
        with self._allowance.held(requests_per_stream(self._core), owner_of(call, peer)) as hand:
            yield hand
