"""Goodput of a server: one measurement at one rate, the search for the highest rate that meets the objective, and a peer's tuning.

Rates are rungs of one ladder, so that every server meets the same arrivals.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.harness.load import Record, percentile
from benchmarks.peers.server import Settings

STEP = 1.08
"""A rung's rate over that of the rung below."""
GOAL_PERCENT = 95
BATCH_SIZES, DELAYS_MS = (16, 64), (0, 20)


@dataclass(frozen=True, slots=True)
class Point:
    """One rate and its outcomes.

    Attributes:
        rung: Of the ladder.
        goodput: Requests a second that were answered within the objective.
        goal_seconds: Latency at `GOAL_PERCENT` of all requests; infinite where too many were not answered.
        median_seconds: Latency in the middle.
        late_seconds: How late requests were sent, at 99 %.
        failures: How many ended with which status other than an answer.
        sender_cores: Processor time of the sender over wall time.
    """

    rung: int
    goodput: float
    goal_seconds: float
    median_seconds: float
    late_seconds: float
    failures: Counter[str]
    sender_cores: float

    @property
    def offered(self) -> float:
        """Requests a second that the arrivals were drawn for."""
        return rate_of(self.rung)


def rate_of(rung: int) -> float:
    """Return a rung's requests a second."""
    return STEP**rung


def rung_below(rate: float) -> int:
    """Return the highest rung that does not exceed a rate."""
    return math.floor(math.log(rate) / math.log(STEP) + 1e-9)


def summarise(rung: int, seconds: float, objective: float, record: Record) -> Point:
    """Return the point of a record; a request that failed counts as one that was never answered.

    Raises:
        ValueError: If nothing was sent.
    """
    outcomes = record.outcomes
    if not outcomes:
        raise ValueError(f"no request was due within {seconds:g} s at {rate_of(rung):.2f} a second")
    latencies = sorted(outcome.ended - outcome.due if outcome.code == "OK" else math.inf for outcome in outcomes)
    return Point(
        rung=rung,
        goodput=sum(latency <= objective for latency in latencies) / seconds,
        goal_seconds=percentile(latencies, GOAL_PERCENT),
        median_seconds=percentile(latencies, 50),
        late_seconds=percentile(sorted(outcome.sent - outcome.due for outcome in outcomes), 99),
        failures=Counter(outcome.code for outcome in outcomes if outcome.code != "OK"),
        sender_cores=record.cpu_seconds / record.wall_seconds,
    )


class Ladder:
    """Rates that one started server has been given, and the search for its knee among them.

    Attributes:
        points: Of every rate so far, in the order of measuring.
    """

    def __init__(self, measure: Callable[[int], Point], objective: float) -> None:
        """Begin with nothing measured; `measure` puts a rung's rate on the server, the objective is in seconds."""
        self._measure, self._objective = measure, objective
        self.points: dict[int, Point] = {}

    def keeps(self, rung: int) -> bool:
        """Return whether a rate meets the objective; it is measured once."""
        if rung not in self.points:
            self.points[rung] = self._measure(rung)
        return self.points[rung].goal_seconds <= self._objective

    def find_knee(self, start: int, lowest: int, stride: int = 1) -> Point | None:
        """Return the highest rate that meets the objective, with the next rung above it not doing so.

        Args:
            start: Rung to begin at; from one that is too much already, the search goes down.
            lowest: Rung that it gives up below.
            stride: Rungs that are taken at once, until the knee lies between two; the interval is then halved.

        Returns:
            Its point, or None if even the lowest rate is too much.
        """
        low = high = max(start, lowest)
        if self.keeps(low):
            while self.keeps(high := high + stride):
                low = high
        else:
            while low > lowest and not self.keeps(low := max(lowest, low - stride)):
                high = low
            if not self.keeps(low):
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.keeps(middle) else (low, middle)
        return self.points[low]


Trial = Callable[[Settings, int, int, int], tuple[Point | None, dict[int, Point]]]
"""Starts a peer with settings and looks for its knee, with `Ladder.find_knee`'s arguments; returns it, and all points."""


def first_settings(num_cores: int) -> Settings:
    """Return the settings that the search starts from: a batch for each core."""
    return Settings(num_instances=num_cores, num_parts=1, num_threads=1, max_batch_size=32, delay_ms=5)


def latency_settings(num_cores: int) -> Settings:
    """Return the settings that answer a single request soonest: all cores for it, and no delay."""
    return Settings(num_instances=1, num_parts=1, num_threads=num_cores, max_batch_size=32, delay_ms=0)


def challengers(best: Settings, stage: int, num_cores: int) -> list[Settings]:
    """Return what a stage of the search tries: other divisions of the cores, other batch sizes, other delays."""
    if stage == 0:
        ways = dict.fromkeys([(1, 1, num_cores), (1, num_cores, 1)])
        found = [replace(best, num_instances=count, num_parts=parts, num_threads=threads) for count, parts, threads in ways]
        return [settings for settings in found if settings != best]
    if stage == 1:
        return [replace(best, max_batch_size=size) for size in BATCH_SIZES]
    return [replace(best, delay_ms=delay) for delay in DELAYS_MS]


def tune(trial: Trial, num_cores: int, start: int, lowest: int, stride: int) -> tuple[Settings, int]:
    """Return a peer's best settings, and the rung that they kept up with.

    A challenger is measured at the rate that was too much for the best so far. It wins by keeping up with it, or by answering more
    requests in time although it does not.

    Raises:
        RuntimeError: If the first settings keep up with no rate.
    """
    settings = first_settings(num_cores)
    knee, points = trial(settings, start, lowest, stride)
    if not knee:
        raise RuntimeError(f"no rate is slow enough for {settings}")
    beyond = points[knee.rung + 1]
    for stage in range(3):
        for challenger in challengers(settings, stage, num_cores):
            found, points = trial(challenger, beyond.rung, beyond.rung, 1)
            if found:
                settings, knee, beyond = challenger, found, points[found.rung + 1]
            elif points[beyond.rung].goodput > beyond.goodput:
                settings, beyond = challenger, points[beyond.rung]
    return settings, knee.rung
