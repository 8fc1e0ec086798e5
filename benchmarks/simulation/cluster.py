"""A simulated deployment: pods that come and go, requests spread over them, metrics that come late, a controller that reads them.

Time goes by ticks of a second; within a tick replicas do not see each other.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.balancing import Balancer
from benchmarks.simulation.controller import SYNC_SECONDS, Behaviour, Controller, Metric
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.pod import Pod
from benchmarks.simulation.replica import SimulatedReplica

TICK_SECONDS = 1.0
SCRAPE_SECONDS = 15.0
"""Of Prometheus, and of metrics-server."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What the controller looks at; None for nothing.

    Attributes:
        name: How it is called.
        queue_seconds: Target of the estimated queue, seconds a pod.
        num_waiting: Target of waiting requests a pod.
        num_slots: Target of slots in use a pod.
        cpu_percent: Target of processor use, of what a pod requested.
    """

    name: str
    queue_seconds: float | None = None
    num_waiting: float | None = None
    num_slots: float | None = None
    cpu_percent: float | None = None

    def metrics(self, pods: Sequence[Pod], costs: Costs) -> list[Metric]:
        """Return what the controller sees of the pods; those that do not serve yet have no value."""

        def metric(target: float, values: list[float | None]) -> Metric:
            known = [value for value in values if value is not None]
            return Metric(target, known, len(pods) - len(known))

        found = []
        if self.queue_seconds is not None:
            found.append(metric(self.queue_seconds, [pod.queue_seconds for pod in pods]))
        if self.num_waiting is not None:
            found.append(metric(self.num_waiting, [pod.num_waiting for pod in pods]))
        if self.num_slots is not None:
            found.append(metric(self.num_slots, [pod.num_slots for pod in pods]))
        if self.cpu_percent is not None:
            found.append(metric(self.cpu_percent / 100 * costs.cores, [pod.cpu_cores for pod in pods]))
        return found


@dataclass(slots=True)
class History:
    """What happened.

    Attributes:
        requests: When each was due, and when it was answered.
        num_pods: Pods that there should be, and those ready, by tick.
    """

    requests: list[tuple[float, float]] = field(default_factory=list)
    num_pods: list[tuple[int, int]] = field(default_factory=list)


class Cluster:
    """A deployment under a load.

    Args:
        costs: Of each replica.
        behaviour: Of the controller.
        rule: What it looks at.
        start_seconds: From the decision for a pod until it takes requests.
        balancer: Who spreads requests.
        draws: Where chance comes from.
    """

    def __init__(
        self, costs: Costs, behaviour: Behaviour, rule: Rule, start_seconds: float, balancer: Balancer, draws: random.Random
    ) -> None:
        self._costs, self._rule, self._balancer, self._draws = costs, rule, balancer, draws
        self._start_seconds = start_seconds
        self._controller = Controller(behaviour, behaviour.least)
        self._pods: list[Pod] = []
        self._leaving: list[Pod] = []
        self.history = History()
        self._scale(0.0, behaviour.least, is_first=True)

    def run(self, rate: Callable[[float], float], seconds: float) -> History:
        """Let so much time pass under a rate of requests by time; then let everything end."""
        jobs = self._costs.jobs
        for tick in range(math.ceil(seconds)):
            now = tick * TICK_SECONDS
            ready = [pod for pod in self._pods if pod.ready_at <= now]
            self._balancer.update(now, ready)
            for at in _arrivals(rate(now), now, self._draws):
                self._balancer.choose().replica.offer(at, self._draws.choice(jobs))
            for pod in (*ready, *self._leaving):
                pod.replica.advance(now + TICK_SECONDS)
            self._leaving = [pod for pod in self._leaving if not pod.replica.is_empty]
            self._observe(tick + 1, ready)
            self.history.num_pods.append((len(self._pods), len(ready)))
        for pod in (*self._pods, *self._leaving):
            pod.replica.advance(math.inf)
        return self.history

    def _observe(self, tick: int, ready: Sequence[Pod]) -> None:
        now = tick * TICK_SECONDS
        for pod in ready:
            if (tick + pod.phase) % SCRAPE_SECONDS == 0:
                pod.read(now, self._costs)
        if tick % SYNC_SECONDS == 0:
            self._scale(now, self._controller.sync(now, self._rule.metrics(self._pods, self._costs)))

    def _scale(self, now: float, wanted: int, is_first: bool = False) -> None:
        """Make pods, or let the newest go, those that do not serve yet first."""
        while len(self._pods) < wanted:
            replica = SimulatedReplica(self._costs, self._end, now if is_first else now + self._start_seconds)
            ready_at = now if is_first else now + self._start_seconds
            self._pods.append(Pod(replica, ready_at, self._draws.randrange(int(SCRAPE_SECONDS))))
        while len(self._pods) > wanted:
            leaving = max(self._pods, key=lambda pod: pod.ready_at)
            self._pods.remove(leaving)
            self._leaving.append(leaving)

    def _end(self, due: float, ended: float) -> None:
        self.history.requests.append((due, ended))


def _arrivals(rate: float, now: float, draws: random.Random) -> list[float]:
    """Return the times of a Poisson process within the tick that begins now."""
    times = []
    at = now + draws.expovariate(rate) if rate > 0 else math.inf
    while at < now + TICK_SECONDS:
        times.append(at)
        at += draws.expovariate(rate)
    return times
