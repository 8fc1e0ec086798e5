"""Goodput of a server: one measurement at one rate, the search for the highest rate that meets the objective, and a peer's tuning.

Rates are powers of `STEP`, numbered as levels, so that all servers get the same arrivals.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.harness.load import Record, percentile
from benchmarks.peers.server import Settings

STEP = 1.08
"""Ratio of a level's rate to that of the level below."""
GOAL_PERCENT = 95
BATCH_SIZES, DELAYS_MS = (16, 64), (0, 20)


@dataclass(frozen=True, slots=True)
class Point:
    """One rate and its outcomes."""

    level: int  # number of the rate
    goodput: float  # requests a second that were answered within the objective
    goal_seconds: float  # latency at `GOAL_PERCENT` of all requests; infinite where too many were not answered
    median_seconds: float  # median latency
    late_seconds: float  # delay of sending, at 99 %
    failures: Counter[str]  # number of requests by status, but for answers
    sender_cores: float  # processor time of the sender over wall time

    @property
    def offered(self) -> float:
        """Mean arrivals a second."""
        return rate_of(self.level)


def rate_of(level: int) -> float:
    """Return a level's requests a second."""
    return STEP**level


def level_below(rate: float) -> int:
    """Return the highest level that does not exceed a rate."""
    return math.floor(math.log(rate) / math.log(STEP) + 1e-9)


def summarise(level: int, seconds: float, objective: float, record: Record) -> Point:
    """Return the point of a record; a failed request counts as never answered.

    Raises:
        ValueError: If nothing was sent.
    """
    outcomes = record.outcomes
    if not outcomes:
        raise ValueError(f"no request was due within {seconds:g} s at {rate_of(level):.2f} a second")
    latencies = sorted(outcome.ended - outcome.due if outcome.code == "OK" else math.inf for outcome in outcomes)
    return Point(
        level=level,
        goodput=sum(latency <= objective for latency in latencies) / seconds,
        goal_seconds=percentile(latencies, GOAL_PERCENT),
        median_seconds=percentile(latencies, 50),
        late_seconds=percentile(sorted(outcome.sent - outcome.due for outcome in outcomes), 99),
        failures=Counter(outcome.code for outcome in outcomes if outcome.code != "OK"),
        sender_cores=record.cpu_seconds / record.wall_seconds,
    )


class RateSearch:
    """Rates measured with one started server, and the search for its knee among them.

    Attributes:
        points: Measured points by level, in the order of measuring.
    """

    def __init__(self, measure: Callable[[int], Point], objective: float) -> None:
        """Begin without measurements; `measure` sends a level's rate to the server, the objective is in seconds."""
        self._measure, self._objective = measure, objective
        self.points: dict[int, Point] = {}

    def meets(self, level: int) -> bool:
        """Return whether a level meets the objective; each is measured once."""
        if level not in self.points:
            self.points[level] = self._measure(level)
        return self.points[level].goal_seconds <= self._objective

    def find_knee(self, start: int, lowest: int, stride: int = 1) -> Point | None:
        """Return the highest rate that meets the objective while the next level does not.

        Args:
            start: First level; if it misses the objective, the search goes down.
            lowest: Level below which the search ends.
            stride: Levels of a step until the knee lies between two; the interval is then halved.

        Returns:
            Its point, or None if the lowest level misses the objective.
        """
        low = high = max(start, lowest)
        if self.meets(low):
            while self.meets(high := high + stride):
                low = high
        else:
            while low > lowest and not self.meets(low := max(lowest, low - stride)):
                high = low
            if not self.meets(low):
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.meets(middle) else (low, middle)
        return self.points[low]


Trial = Callable[[Settings, int, int, int], tuple[Point | None, dict[int, Point]]]
"""Starts a peer with settings and finds its knee, with `RateSearch.find_knee`'s arguments; returns it, and all points."""


def first_settings(num_cores: int) -> Settings:
    """Return the settings at the start of the search: a batch for each core."""
    return Settings(num_instances=num_cores, num_parts=1, num_threads=1, max_batch_size=32, delay_ms=5)


def latency_settings(num_cores: int) -> Settings:
    """Return the settings with the lowest latency of a single request: all cores for it, and no delay."""
    return Settings(num_instances=1, num_parts=1, num_threads=num_cores, max_batch_size=32, delay_ms=0)


def candidates(best: Settings, stage: int, num_cores: int) -> list[Settings]:
    """Return the settings of a stage of the search: other divisions of the cores, other batch sizes, other delays."""
    if stage == 0:
        ways = dict.fromkeys([(1, 1, num_cores), (1, num_cores, 1)])
        found = [replace(best, num_instances=count, num_parts=parts, num_threads=threads) for count, parts, threads in ways]
        return [settings for settings in found if settings != best]
    if stage == 1:
        return [replace(best, max_batch_size=size) for size in BATCH_SIZES]
    return [replace(best, delay_ms=delay) for delay in DELAYS_MS]


def tune(trial: Trial, num_cores: int, start: int, lowest: int, stride: int) -> tuple[Settings, int]:
    """Return a peer's best settings and their level.

    A candidate is measured at the lowest rate that the best settings so far missed. It is better if it meets the objective there,
    or has a higher goodput.

    Raises:
        RuntimeError: If the first settings meet the objective at no rate.
    """
    settings = first_settings(num_cores)
    knee, points = trial(settings, start, lowest, stride)
    if not knee:
        raise RuntimeError(f"no rate is slow enough for {settings}")
    beyond = points[knee.level + 1]
    for stage in range(3):
        for candidate in candidates(settings, stage, num_cores):
            found, points = trial(candidate, beyond.level, beyond.level, 1)
            if found:
                settings, knee, beyond = candidate, found, points[found.level + 1]
            elif points[beyond.level].goodput > beyond.goodput:
                settings, beyond = candidate, points[beyond.level]
    return settings, knee.level
