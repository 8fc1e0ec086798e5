"""Pairs that have not ended: those that wait to be scored, in a queue that is fair among callers, and those whose turn it is.

Policy over plain objects, as `scheduler.py` is for requests: no clock, no thread, and nothing is told to anybody.
"""

from dataclasses import dataclass

from dragoman.server.engine import crowding
from dragoman.server.engine.expiry import Expiry
from dragoman.server.engine.fair_queue import FairQueue
from dragoman.server.engine.messages import ScoreRequest
from dragoman.server.engine.scheduler import Limits, QueueIsFull, place_in_line

Key = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class Pair:
    """A request and where it came from.

    Attributes:
        origin: The front end.
        request: What is to be scored.
        is_waiting: Whether its turn has not come.
    """

    origin: bytes
    request: ScoreRequest
    is_waiting: bool = True

    @property
    def key(self) -> Key:
        """Unique among all front ends."""
        return self.origin, self.request.id

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides."""
        return len(self.request.source_ids) + len(self.request.target_ids)


class Pairs:
    """See above. Limits are those of `Scheduler`, with the tokens of both sides counted.

    Attributes:
        num_tokens: Of both sides of all pairs.
    """

    def __init__(self, limits: Limits) -> None:
        self.num_tokens = 0
        self._limits = limits
        self._pairs: dict[Key, Pair] = {}
        self._queue: FairQueue[Pair] = FairQueue()
        self._expiry: Expiry[Pair] = Expiry(self.__contains__, self.__len__)

    def __len__(self) -> int:
        """Return how many have not ended."""
        return len(self._pairs)

    def __contains__(self, pair: Pair) -> bool:
        """Return whether a pair has not ended."""
        return self._pairs.get(pair.key) is pair

    @property
    def num_waiting(self) -> int:
        """Those whose turn has not come."""
        return len(self._queue)

    @property
    def next_deadline(self) -> float:
        """When `expire` may find something; infinity for never."""
        return self._expiry.next

    def all(self) -> list[Pair]:
        """Return all."""
        return list(self._pairs.values())

    def find(self, key: Key) -> Pair | None:
        """Return a pair; None if there is none, or none any more."""
        return self._pairs.get(key)

    def submit(self, pair: Pair) -> list[Pair]:
        """Let a pair wait.

        Returns:
            What had to leave for it.

        Raises:
            QueueIsFull: If it would exceed a limit.
        """
        assert pair.key not in self._pairs, "a request id is used twice"
        pushed_out = self._make_room(pair)
        for other in pushed_out:
            self.remove(other)
        request, tokens = pair.request, pair.num_tokens
        self._pairs[pair.key] = pair
        self.num_tokens += tokens
        self._queue.push(pair, request.share, place_in_line(request), priority=request.priority, size=tokens)
        self._expiry.add(request.deadline, pair)
        return pushed_out

    def take_turn(self) -> list[Pair]:
        """Return those whose turn it is: as many as have `prefill_tokens_per_step` tokens, or one that has more."""
        pairs: list[Pair] = []
        budget = self._limits.prefill_tokens_per_step
        while (pair := self._queue.first()) is not None and (not pairs or pair.num_tokens <= budget):
            self._queue.take(pair, pair.request.share.caller)
            pair.is_waiting = False
            budget -= pair.num_tokens
            pairs.append(pair)
        return pairs

    def remove(self, pair: Pair) -> None:
        """Forget a pair, whether it waits or not."""
        del self._pairs[pair.key]
        self.num_tokens -= pair.num_tokens
        if pair.is_waiting:
            self._queue.remove(pair, pair.request.share.caller)

    def expire(self, now: float) -> list[Pair]:
        """Forget those whose deadline has passed, and return them."""
        expired = self._expiry.take(now)
        for pair in expired:
            self.remove(pair)
        return expired

    def _make_room(self, pair: Pair) -> list[Pair]:
        """Return what has to leave for a new pair to wait; see `submit`."""
        queue, limits, share = self._queue, self._limits, pair.request.share
        num_next = int(len(self._pairs) == len(queue))  # no turn is under way: the first does not really wait
        if share.max_waiting and crowding.is_at_limit(queue, share, num_next):
            raise QueueIsFull("max_waiting")
        num_over = len(queue) + 1 - num_next - limits.max_waiting_requests
        tokens_over = queue.num_tokens + pair.num_tokens - limits.max_waiting_tokens if len(queue) else 0
        if num_over <= 0 and tokens_over <= 0:
            return []
        pushed_out = crowding.pushed_out(queue, share, pair.num_tokens, max(num_over, 0), max(tokens_over, 0))
        if not pushed_out:
            raise QueueIsFull
        return pushed_out
