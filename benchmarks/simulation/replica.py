"""One simulated replica: a queue, slots, and an engine that admits between two steps and decodes everything that runs in each.

Time goes in leaps from one change to the next: between two admissions or endings all steps are alike.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable

from benchmarks.simulation.costs import Costs, Job
from dragoman.server.engine.forecast import Average

Ended = Callable[[float, float], None]
"""Takes when a request was due and when it was answered; infinity for one that was refused."""


class SimulatedReplica:
    """A replica that is offered requests and told how far time has gone.

    Attributes:
        now: Time up to which it has been computed; an iteration may end after what was asked for.
        busy_seconds: Time in iterations, the front end's share included.
        num_offered: Requests, those that were refused too.
    """

    def __init__(self, costs: Costs, ended: Ended, now: float = 0.0) -> None:
        self._costs, self._ended = costs, ended
        self.now = now
        self.busy_seconds = 0.0
        self.num_offered = 0
        self._arrivals: deque[tuple[float, Job]] = deque()
        self._waiting: deque[tuple[float, Job]] = deque()
        self._running: list[tuple[int, int, float, float]] = []
        self._running_seconds = Average()
        self._num_steps = self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with slots."""
        return len(self._running)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing left to do."""
        return not (self._arrivals or self._waiting or self._running)

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the requests so far."""
        costs = self._costs
        engine_seconds = self.busy_seconds - self._num_admitted * costs.taken_seconds
        return engine_seconds * costs.engine_cores + self.num_offered * costs.front_cpu_seconds

    @property
    def queue_seconds(self) -> float:
        """What `dragoman_estimated_queue_seconds` says, see `dragoman.server.engine.forecast`."""
        costs = self._costs
        num_missing = (self.num_running + self.num_waiting) * costs.num_rows + 1 - costs.max_rows
        return max(num_missing - 0.5, 0.0) * self._running_seconds.value / costs.max_rows

    def offer(self, at: float, job: Job) -> None:
        """Take a request that comes at a time which has not been computed yet; offer them in order."""
        self._arrivals.append((at, job))

    def advance(self, until: float) -> None:
        """Compute as far as that, and to the end of the iteration then under way."""
        while True:
            self._take_arrivals()
            if not self._running and not self._waiting:
                if not self._arrivals or self._arrivals[0][0] >= until:
                    self.now = self.now if math.isinf(until) else max(self.now, until)
                    return
                self.now = self._arrivals[0][0]
                continue
            if self.now >= until:
                return
            self._iterate(until)

    def _take_arrivals(self) -> None:
        costs = self._costs
        while self._arrivals and self._arrivals[0][0] <= self.now:
            at, job = self._arrivals.popleft()
            self.num_offered += 1
            num_free = costs.max_rows - len(self._running) * costs.num_rows
            if len(self._waiting) >= costs.max_waiting + num_free:
                self._ended(at, math.inf)
            else:
                self._waiting.append((at, job))

    def _iterate(self, until: float) -> None:
        """Admit, then make as many steps as are alike."""
        costs, begun = self._costs, self.now
        self.now += self._admit()
        step = costs.step(len(self._running))
        count = self._running[0][0] - self._num_steps
        if self._waiting and len(self._running) < costs.max_running:
            count = 1  # the encoder had enough for this iteration
        else:
            following = min(until, self._arrivals[0][0]) if self._arrivals else until
            count = max(1, math.ceil(min(count, (following - self.now) / step)))
        self.now += count * step
        self._num_steps += count
        self.busy_seconds += self.now - begun
        while self._running and self._running[0][0] <= self._num_steps:
            _, _, due, admitted = heapq.heappop(self._running)
            self._running_seconds.add(self.now - admitted)
            self._ended(due, self.now + costs.front_seconds)

    def _admit(self) -> float:
        """Give slots to the next in line; return the seconds of encoding them."""
        costs, admitted, num_tokens, num = self._costs, self.now, 0, 0
        while self._waiting and len(self._running) < costs.max_running:
            due, job = self._waiting[0]
            if num and num_tokens + job.num_tokens > costs.tokens_per_prefill:
                break
            self._waiting.popleft()
            self._num_admitted += 1
            num, num_tokens = num + 1, num_tokens + job.num_tokens
            heapq.heappush(self._running, (self._num_steps + job.num_steps, self._num_admitted, due, admitted))
        return costs.prefill(num_tokens, num) if num else 0.0


def capacity(costs: Costs, num_requests: int = 2000) -> float:
    """Return requests a second of a replica that always has as many as it can run."""
    ends: list[float] = []
    replica = SimulatedReplica(costs.but(max_waiting=2**31), lambda _, end: ends.append(end))
    for i in range(num_requests):
        replica.offer(0.0, costs.jobs[i % len(costs.jobs)])
    replica.advance(math.inf)
    first, last = ends[num_requests // 5], ends[num_requests * 4 // 5]
    return (num_requests * 4 // 5 - num_requests // 5) / (last - first)
