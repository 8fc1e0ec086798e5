"""Who waits, who runs, who is next: policy over plain objects. No tensors, no clock of its own, no I/O."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dragoman.server.engine.messages import Request, ScoreRequest
from dragoman.server.engine.sequence import Key, Sequence

SECONDS_PER_PRIORITY = 1.0


class QueueIsFull(Exception):
    """Admitting one more request to the queue would exceed a limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler keeps to.

    Attributes:
        max_slots: Rows of the decode batch.
        max_waiting_requests: Requests in the queue, beyond those that free slots are about to take.
        max_waiting_tokens: Their source tokens; a single larger request still fits an empty queue.
        prefill_tokens_per_step: Source tokens encoded between two decode steps, which bounds how long running requests stall;
            a single larger source is still encoded, alone.
    """

    max_slots: int
    max_waiting_requests: int
    max_waiting_tokens: int
    prefill_tokens_per_step: int


class Scheduler:
    """The waiting queue and the set of running sequences.

    Order is by arrival, but one step of priority counts as `SECONDS_PER_PRIORITY` of waiting: a request of priority p overtakes
    what arrived less than p seconds before it, and nothing waits behind later arrivals for longer than that. The first in line is
    never passed over because it needs more slots than a later one, so wide requests do not starve.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_waiting_tokens = 0
        self.num_waiting_slots = 0
        self.num_used_slots = 0
        self._waiting: dict[Key, Sequence] = {}
        self._num_waiting_by_priority: Counter[int] = Counter()
        self._running: dict[Key, Sequence] = {}
        self._queue: list[tuple[float, int, Sequence]] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_submitted = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return len(self._running)

    @property
    def num_places(self) -> int:
        """Requests that the queue still takes, those counted that free slots are about to take."""
        limits = self.limits
        return limits.max_waiting_requests + limits.max_slots - self.num_used_slots - self.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self._running)

    def running(self) -> Iterator[Sequence]:
        """Yield running sequences in order of admission."""
        yield from self._running.values()

    def num_slots_ahead(self, request: Request) -> int:
        """Return the slots of the waiting requests that would be admitted before a new one."""
        if request.priority <= min(self._num_waiting_by_priority, default=request.priority):
            return self.num_waiting_slots  # all of them came earlier and have no less priority
        place = place_in_line(request)
        return sum(waiting.num_slots for waiting in self._waiting.values() if place_in_line(waiting.request) <= place)

    def submit(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
            QueueIsFull: If a limit of the queue would be exceeded.
        """
        limits = self.limits
        assert sequence.key not in self._waiting and sequence.key not in self._running, "a request id is used twice"
        assert sequence.num_slots <= limits.max_slots, "a request needs more slots than there are"
        tokens = self.num_waiting_tokens + sequence.num_source_tokens
        if self.num_places <= 0 or (self._waiting and tokens > limits.max_waiting_tokens):
            raise QueueIsFull
        self._waiting[sequence.key] = sequence
        self.num_waiting_tokens = tokens
        self.num_waiting_slots += sequence.num_slots
        self._num_waiting_by_priority[sequence.request.priority] += 1
        self._num_submitted += 1
        request = sequence.request
        self._drop_stale_entries()
        heapq.heappush(self._queue, (place_in_line(request), self._num_submitted, sequence))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._num_submitted, sequence))

    def admit(self) -> list[Sequence]:
        """Move the next sequences from waiting to running, as far as free slots and the prefill budget go."""
        admitted: list[Sequence] = []
        budget = self.limits.prefill_tokens_per_step
        while self._queue:
            sequence = self._queue[0][2]
            if self._waiting.get(sequence.key) is not sequence:
                heapq.heappop(self._queue)  # cancelled or expired while it waited
                continue
            is_over_budget = bool(admitted) and sequence.num_source_tokens > budget
            if is_over_budget or sequence.num_slots > self.limits.max_slots - self.num_used_slots:
                break
            heapq.heappop(self._queue)
            self._leave_queue(sequence)
            self._running[sequence.key] = sequence
            self.num_used_slots += sequence.num_slots
            budget -= sequence.num_source_tokens
            admitted.append(sequence)
        return admitted

    def shrink(self, sequence: Sequence, num_slots: int) -> None:
        """Let others have the slots that a running sequence will not need again."""
        assert self._running.get(sequence.key) is sequence and num_slots <= sequence.num_slots
        self.num_used_slots -= sequence.num_slots - num_slots
        sequence.num_slots = num_slots

    def remove(self, key: Key) -> Sequence | None:
        """Take a sequence out, whether it waits or runs; None if it is neither (it may just have finished)."""
        if (sequence := self._waiting.get(key)) is not None:
            self._leave_queue(sequence)
        elif (sequence := self._running.pop(key, None)) is not None:
            self.num_used_slots -= sequence.num_slots
        return sequence

    def expire(self, now: float) -> list[Sequence]:
        """Take out every sequence whose deadline has passed."""
        expired: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if self._has(sequence):
                self.remove(sequence.key)
                expired.append(sequence)
        return expired

    def remove_all(self, origin: bytes | None = None) -> list[Sequence]:
        """Take everything out, or everything one front end asked for."""
        keys = [key for key in (*self._running, *self._waiting) if origin is None or key[0] == origin]
        return [sequence for key in keys if (sequence := self.remove(key)) is not None]

    def _leave_queue(self, sequence: Sequence) -> None:
        del self._waiting[sequence.key]
        self.num_waiting_tokens -= sequence.num_source_tokens
        self.num_waiting_slots -= sequence.num_slots
        priority = sequence.request.priority
        self._num_waiting_by_priority[priority] -= 1
        if not self._num_waiting_by_priority[priority]:
            del self._num_waiting_by_priority[priority]

    def _drop_stale_entries(self) -> None:
        """Forget places in the queue and deadlines of what has left or ended, once they are the larger part."""
        if len(self._queue) > 2 * self.num_waiting + 64:
            self._queue = [entry for entry in self._queue if self._waiting.get(entry[2].key) is entry[2]]
            heapq.heapify(self._queue)
        if len(self._deadlines) > 2 * (self.num_waiting + self.num_running) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._has(entry[2])]
            heapq.heapify(self._deadlines)

    def _has(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.key) is sequence or self._running.get(sequence.key) is sequence


def place_in_line(request: Request | ScoreRequest) -> float:
    """Return what the queue is ordered by: when a request came, so many seconds earlier as its priority says."""
    return request.arrival - request.priority * SECONDS_PER_PRIORITY
