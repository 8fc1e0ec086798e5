"""Which pairs wait to be scored, and which replica scores which: policy over plain objects. No I/O, no clock of its own."""

from dataclasses import dataclass

from dragoman.server.engine.forecast import Average
from dragoman.server.engine.pairs import Key, Pair, Pairs
from dragoman.server.engine.scheduler import Limits


@dataclass(slots=True, eq=False)
class _Load:
    """The tokens of both sides of the pairs that one replica has been given and that have not ended."""

    index: int
    num_tokens: int = 0


class PairDispatcher:
    """One queue of pairs before several engines.

    A turn, see `Pairs`, goes to the replica with the fewest tokens to score, as soon as one has less than a turn's worth.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pairs = Pairs(limits)
        self._loads: dict[int, _Load] = {}
        self._places: dict[Pair, _Load] = {}
        self._seconds_between_ends = Average()
        self._last_end = 0.0

    @property
    def num_waiting(self) -> int:
        """Pairs that no replica has been given."""
        return self._pairs.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of both sides of those."""
        return self._pairs.num_tokens - sum(load.num_tokens for load in self._loads.values())

    @property
    def next_deadline(self) -> float:
        """When `expire` may find something; infinity for never."""
        return self._pairs.next_deadline

    def open(self, index: int) -> None:
        """Give pairs to a replica from now on."""
        self._loads[index] = _Load(index)

    def close(self, index: int) -> list[Pair]:
        """Give a replica nothing more; return what it had, which is gone from here too."""
        load = self._loads.pop(index)
        lost = [pair for pair, place in self._places.items() if place is load]
        for pair in lost:
            self.remove(pair)
        return lost

    def submit(self, pair: Pair, now: float) -> list[Pair]:
        """Let a pair wait; return what had to leave for it.

        Raises:
            QueueIsFull: If it would exceed a limit.
        """
        if not len(self._pairs):
            self._last_end = now  # an idle hour says nothing about how fast pairs are scored
        return self._pairs.submit(pair)

    def hand_over(self) -> list[tuple[int, Pair]]:
        """Give replicas what is next; return it in that order."""
        handed: list[tuple[int, Pair]] = []
        while self._loads and self._pairs.num_waiting:
            load = min(self._loads.values(), key=lambda load: (load.num_tokens, load.index))
            if load.num_tokens >= self._limits.prefill_tokens_per_step:
                break
            for pair in self._pairs.take_turn():
                self._places[pair] = load
                load.num_tokens += pair.num_tokens
                handed.append((load.index, pair))
        return handed

    def find(self, key: Key) -> Pair | None:
        """Return a pair that has not ended; None if there is none."""
        return self._pairs.find(key)

    def keys(self, origin: bytes) -> list[Key]:
        """Return the keys of what a front end has asked for and has not ended."""
        return [pair.key for pair in self._pairs.all() if pair.origin == origin]

    def remove_all(self) -> list[Pair]:
        """Forget all, and return them."""
        pairs = self._pairs.all()
        for pair in pairs:
            self.remove(pair)
        return pairs

    def replica_of(self, pair: Pair) -> int | None:
        """Return which replica has a pair; None if it waits here."""
        load = self._places.get(pair)
        return None if load is None else load.index

    def remove(self, pair: Pair) -> None:
        """Forget a pair."""
        self._pairs.remove(pair)
        self._leave(pair)

    def scored(self, pair: Pair, now: float) -> None:
        """Forget a pair that was scored."""
        self._seconds_between_ends.add(max(now - self._last_end, 1e-6))
        self._last_end = now
        self.remove(pair)

    def expire(self, now: float) -> list[Pair]:
        """Forget those whose deadline has passed, and return them; replicas that have some of them do so too."""
        expired = self._pairs.expire(now)
        for pair in expired:
            self._leave(pair)
        return expired

    def seconds_until_a_place(self) -> float:
        """Guess when the queue has a place: the time in which a tenth of it, at least one pair, is scored."""
        if not self._seconds_between_ends.count:
            return 1.0
        return min(max(max(1.0, len(self._pairs) / 10) * self._seconds_between_ends.value, 0.01), 30.0)

    def _leave(self, pair: Pair) -> None:
        if (load := self._places.pop(pair, None)) is not None:
            load.num_tokens -= pair.num_tokens
