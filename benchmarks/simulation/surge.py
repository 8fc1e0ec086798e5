"""A load that grows to a multiple of itself and falls again, and what of it was answered in time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.cluster import History

WIDTH = 5
"""Seconds that a point of a curve stands for."""


@dataclass(frozen=True, slots=True)
class Surge:
    """Requests a second over time.

    Attributes:
        base: Before and after.
        factor: Of the height.
        calm_seconds: Before, long enough for the controller to settle.
        rise_seconds: Of a linear growth; 0 for all at once.
        hold_seconds: At the height.
        after_seconds: Back at the base.
    """

    base: float
    factor: float
    calm_seconds: float
    rise_seconds: float
    hold_seconds: float
    after_seconds: float

    @property
    def begin(self) -> float:
        """When it begins to grow."""
        return self.calm_seconds

    @property
    def end(self) -> float:
        """When it falls back."""
        return self.calm_seconds + self.rise_seconds + self.hold_seconds

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.end + self.after_seconds

    def rate(self, at: float) -> float:
        """Return the requests a second at a time."""
        if not self.begin <= at < self.end:
            return self.base
        share = min(1.0, (at - self.begin) / self.rise_seconds) if self.rise_seconds else 1.0
        return self.base * (1 + (self.factor - 1) * share)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a surge.

    Attributes:
        share_good: Of the requests due in the surge, those answered within the objective.
        p95_seconds: Latency that 95 % of them did not exceed; infinite where too many were refused.
        share_refused: Of them, refused.
        bad_seconds: Seconds of the surge in which less than 95 % of the requests due were answered within the objective.
        pods_before: Mean of the ready pods in the last half of the calm.
        pods_most: Most ready pods.
        pod_hours: From the beginning of the surge to the end of the run.
    """

    share_good: float
    p95_seconds: float
    share_refused: float
    bad_seconds: int
    pods_before: float
    pods_most: int
    pod_hours: float


@dataclass(frozen=True, slots=True)
class Curve:
    """What is drawn of a surge.

    Attributes:
        num_ready: Ready pods, by second.
        latencies: Seconds at 95 %, by when the requests were due; a point for every `WIDTH` seconds.
    """

    num_ready: list[int]
    latencies: dict[int, float]


def curve(history: History) -> Curve:
    """Return what is drawn of what happened."""
    points = by_second(history, 0.0, WIDTH)
    return Curve([ready for _, ready in history.num_pods], {at: seconds for at, (_, _, seconds) in points.items()})


def judge(surge: Surge, history: History, objective: float) -> Outcome:
    """Say what came of it."""
    latencies = sorted(end - due for due, end in history.requests if surge.begin <= due < surge.end)
    seconds = by_second(history, objective)
    bad = sum(good < 0.95 * num for at, (num, good, _) in seconds.items() if surge.begin <= at < surge.end)
    ready = [number for _, number in history.num_pods]
    calm = ready[int(surge.begin / 2) : int(surge.begin)]
    return Outcome(
        share_good=sum(latency <= objective for latency in latencies) / len(latencies),
        p95_seconds=percentile(latencies, 95),
        share_refused=sum(math.isinf(latency) for latency in latencies) / len(latencies),
        bad_seconds=bad,
        pods_before=sum(calm) / len(calm),
        pods_most=max(ready[int(surge.begin) :]),
        pod_hours=sum(ready[int(surge.begin) :]) / 3600,
    )


def by_second(history: History, objective: float, width: int = 1) -> dict[int, tuple[int, int, float]]:
    """Return requests, those answered within the objective, and the latency at 95 %, by the second they were due in, or so many."""
    gathered: dict[int, list[float]] = {}
    for due, end in history.requests:
        gathered.setdefault(int(due // width) * width, []).append(end - due)
    return {
        at: (len(latencies), sum(latency <= objective for latency in latencies), percentile(sorted(latencies), 95))
        for at, latencies in sorted(gathered.items())
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest of rising values that so many percent of them do not exceed."""
    return values[max(0, -(-len(values) * percent // 100) - 1)]
