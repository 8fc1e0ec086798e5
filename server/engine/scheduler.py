"""Who waits, who runs, who is next: policy over plain objects. No tensors, no clock of its own, no I/O."""

from collections.abc import Iterator
from dataclasses import dataclass

from dragoman.server.engine import crowding
from dragoman.server.engine.expiry import Expiry
from dragoman.server.engine.fair_queue import FairQueue
from dragoman.server.engine.messages import Request, ScoreRequest, Share
from dragoman.server.engine.sequence import Key, Sequence
from dragoman.server.engine.snapshot import CallerUse

SECONDS_PER_PRIORITY = 1.0


class QueueIsFull(Exception):
    """One more request in the queue would exceed a limit.

    Attributes:
        limit: Its name in the caller's `Share`; empty for the queue's own.
    """

    def __init__(self, limit: str = "") -> None:
        super().__init__(limit)
        self.limit = limit


# Running requests stall no longer than encoding so many takes; with 2,048, throughput on the CPU was the same and stalls longer.
PREFILL_TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler keeps to.

    Attributes:
        max_slots: Rows of the decode batch.
        max_waiting_requests: Requests in the queue, beyond those that free slots are about to take.
        max_waiting_tokens: Their source tokens; a single larger request still fits an empty queue.
        prefill_tokens_per_step: Source tokens encoded, or read of prompts, between two decode steps, which bounds how long running
            requests stall; a single larger source is still encoded, alone, where it cannot be read in pieces.
        max_ahead: Requests in the queue whose sources may have been encoded already, see `ahead`.
    """

    max_slots: int
    max_waiting_requests: int
    max_waiting_tokens: int
    prefill_tokens_per_step: int = PREFILL_TOKENS_PER_STEP
    max_ahead: int = 0


class Scheduler:
    """The waiting queue and the set of running sequences.

    Callers are admitted by weighted fair queuing, see `FairQueue`. What a caller is charged is what the machine does for it: its
    source tokens when a request is admitted, and then a token for each slot and step, for as long as slots are held.

    A caller's own requests are in order of arrival, but one step of priority counts as `SECONDS_PER_PRIORITY` of waiting: a request
    of priority p overtakes what arrived less than p seconds before it, and nothing waits behind later arrivals for longer than
    that. Whose turn it is is never passed over because the first in line needs more slots than a later one, so wide requests do not
    starve; only who has reached its own `max_slots` is.

    The queue's limits are shared: once they are reached, a request of a caller who has less in the queue than another, by weight,
    pushes out what is last in the line of the caller who has most.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_used_slots = 0
        self._waiting: dict[Key, Sequence] = {}
        self._queue: FairQueue[Sequence] = FairQueue()
        self._running: dict[Key, Sequence] = {}
        self._expiry: Expiry[Sequence] = Expiry(self._has, lambda: self.num_waiting + self.num_running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Their source tokens."""
        return self._queue.num_tokens

    @property
    def num_waiting_slots(self) -> int:
        """Slots that they need."""
        return self._queue.num_slots

    @property
    def num_held_back_slots(self) -> int:
        """Those of them that limits of callers do not let them have now."""
        return self._queue.num_held_back

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return self.limits.max_slots - self.num_used_slots

    @property
    def num_places(self) -> int:
        """Requests that the queue still takes, those counted that free slots are about to take."""
        return self.limits.max_waiting_requests + self.num_free_slots - len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self._running)

    def running(self) -> Iterator[Sequence]:
        """Yield running sequences in order of admission."""
        yield from self._running.values()

    def waiting_by_caller(self) -> Iterator[CallerUse]:
        """Yield how much each caller has in the queue who has anything there."""
        for line in self._queue.crowd:
            yield CallerUse(line.share.caller, num_waiting=len(line))

    def next_in_line(self, count: int) -> list[Sequence]:
        """Return about those who will be admitted next, at most so many, the next one first; see `FairQueue.following`."""
        return self._queue.following(count)

    def num_slots_ahead(self, request: Request) -> int:
        """Return the slots of waiting requests that will be admitted before a new one at the least, see `crowding`."""
        return crowding.num_slots_ahead(self._queue, request.share, place_in_line(request), request.priority)

    def num_own_slots(self, request: Request) -> int:
        """Return the slots that a caller holds, and those that it will before a new request of its own is admitted."""
        line = self._queue.line(request.share.caller)
        return 0 if line is None else line.num_slots + crowding.num_own_ahead(line, place_in_line(request), request.priority)[0]

    def crowd_of(self, share: Share) -> tuple[int, float]:
        """Return how many requests of a caller wait, and the part of the admissions that is its own while everybody waits."""
        line = self._queue.line(share.caller)
        return 0 if line is None else len(line), crowding.part_of(self._queue, share)

    def without_claim(self) -> list[Share] | None:
        """Return the shares of those who wait and could push nobody out of a full queue; None if that takes too long to tell.

        It does where too many wait. It is also not told of several while the queue is not half full: nobody has to know yet.
        """
        if len(self._queue.crowd) > 1 and self.num_places > self.limits.max_waiting_requests // 2:
            return None
        return crowding.without_claim(self._queue)

    def at_their_limit(self) -> list[Share]:
        """Return the shares of those of whom no more may wait, as far as that is easy to tell."""
        return crowding.at_their_limit(self._queue, self.num_free_slots)

    def submit(self, sequence: Sequence) -> list[Sequence]:
        """Put a new sequence into the queue.

        Returns:
            What it has pushed out of a full queue.

        Raises:
            QueueIsFull: If a limit of its caller's, or of the queue, would be exceeded.
        """
        request = sequence.request
        assert sequence.key not in self._waiting and sequence.key not in self._running, "a request id is used twice"
        assert sequence.num_slots <= self.limits.max_slots, "a request needs more slots than there are"
        self._check_share(sequence)
        pushed_out = self._make_room(sequence)
        for other in pushed_out:
            self.remove(other.key)
        self._waiting[sequence.key] = sequence
        self._queue.push(
            sequence,
            request.share,
            place_in_line(request),
            priority=request.priority,
            size=sequence.num_source_tokens,
            num_slots=sequence.num_slots,
        )
        self._expiry.add(request.deadline, sequence)
        return pushed_out

    def admit(self, num_unread_tokens: int | None = None) -> list[Sequence]:
        """Move the next sequences from waiting to running, as far as free slots and the prefill budget go; then comes a step.

        Args:
            num_unread_tokens: Where sources are read in pieces, the tokens that are left of running ones: others are admitted while
                these are less than the budget, so that none holds a slot for long before it is its turn to be read. None where each
                source is encoded at once.
        """
        admitted: list[Sequence] = []
        budget = self.limits.prefill_tokens_per_step - (num_unread_tokens or 0)
        while (num_free := self.num_free_slots) and (sequence := self._queue.first()) is not None:
            num_least = min(sequence.num_source_tokens, 1) if num_unread_tokens is not None else sequence.num_source_tokens
            is_over_budget = bool(admitted or num_unread_tokens) and num_least > max(budget, 0)
            if is_over_budget or sequence.num_slots > num_free:
                break
            self._start(sequence)
            budget -= sequence.num_source_tokens
            admitted.append(sequence)
        self._queue.tick()
        return admitted

    def shrink(self, sequence: Sequence, num_slots: int) -> None:
        """Let others have the slots that a running sequence will not need again."""
        assert self._running.get(sequence.key) is sequence and num_slots <= sequence.num_slots
        self._give_back(sequence, sequence.num_slots - num_slots)
        sequence.num_slots = num_slots

    def remove(self, key: Key) -> Sequence | None:
        """Take a sequence out, whether it waits or runs; None if it is neither (it may just have finished)."""
        if (sequence := self._waiting.pop(key, None)) is not None:
            self._queue.remove(sequence, sequence.request.share.caller)
        elif (sequence := self._running.pop(key, None)) is not None:
            self._give_back(sequence, sequence.num_slots)
        return sequence

    def expire(self, now: float) -> list[Sequence]:
        """Take out every sequence whose deadline has passed."""
        expired = self._expiry.take(now)
        for sequence in expired:
            self.remove(sequence.key)
        return expired

    def remove_all(self, origin: bytes | None = None) -> list[Sequence]:
        """Take everything out, or everything one front end asked for."""
        keys = [key for key in (*self._running, *self._waiting) if origin is None or key[0] == origin]
        return [sequence for key in keys if (sequence := self.remove(key)) is not None]

    def _start(self, sequence: Sequence) -> None:
        """Move the first in line from waiting to running."""
        self._queue.take(sequence, sequence.request.share.caller)
        del self._waiting[sequence.key]
        self._running[sequence.key] = sequence
        self.num_used_slots += sequence.num_slots

    def _check_share(self, sequence: Sequence) -> None:
        """Raise if a limit of the caller's would be exceeded; what free slots are about to take does not wait."""
        share = sequence.request.share
        if share.max_slots and sequence.num_slots > share.max_slots:
            raise QueueIsFull("max_slots")
        if share.max_waiting and crowding.is_at_limit(self._queue, share, self.num_free_slots):
            raise QueueIsFull("max_waiting")

    def _make_room(self, sequence: Sequence) -> list[Sequence]:
        """Return what has to leave for a new sequence to have a place.

        Raises:
            QueueIsFull: If its caller has no less in the queue than anybody else.
        """
        tokens_over = self.num_waiting_tokens + sequence.num_source_tokens - self.limits.max_waiting_tokens if self._waiting else 0
        num_over = int(self.num_places <= 0)  # one for one, also where a wide request has taken more slots than its place was for
        if not num_over and tokens_over <= 0:
            return []
        pushed_out = crowding.pushed_out(self._queue, sequence.request.share, sequence.num_source_tokens, num_over, tokens_over)
        if not pushed_out:
            raise QueueIsFull
        return pushed_out

    def _give_back(self, sequence: Sequence, num_slots: int) -> None:
        self.num_used_slots -= num_slots
        self._queue.give_back(sequence.request.share.caller, num_slots)

    def _has(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.key) is sequence or self._running.get(sequence.key) is sequence


def place_in_line(request: Request | ScoreRequest) -> float:
    """Return what the queue is ordered by: when a request came, so many seconds earlier as its priority says."""
    return request.arrival - request.priority * SECONDS_PER_PRIORITY
