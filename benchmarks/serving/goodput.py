"""How much a server answers in time: one measurement at one rate, and the search for the highest rate that it keeps up with.

Rates are rungs of one ladder, so that every server meets the same arrivals.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.load import Record

STEP = 1.08
"""A rung's rate over that of the rung below."""

GOAL_PERCENT = 95


@dataclass(frozen=True, slots=True)
class Point:
    """What came of one rate.

    Attributes:
        rung: Of the ladder.
        goodput: Requests a second of those that were answered within the objective.
        goal_seconds: Latency at `GOAL_PERCENT` of all requests; infinite where too many were not answered.
        median_seconds: Latency in the middle.
        late_seconds: How late requests were sent, at 99 %.
        failures: How many ended with which status other than an answer.
        num_sent: Requests.
        sender_cores: Processor time of the sender over wall time.
    """

    rung: int
    goodput: float
    goal_seconds: float
    median_seconds: float
    late_seconds: float
    failures: Counter[str]
    num_sent: int
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


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest of rising values that so many percent of them do not exceed."""
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def summarise(rung: int, seconds: float, objective: float, record: Record) -> Point:
    """Say what came of a rate; a request that failed is one that was never answered.

    Args:
        rung: Of the rate.
        seconds: How long requests were due.
        objective: Latency, in seconds, that an answer is in time with.
        record: Of the sender.

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
        num_sent=len(outcomes),
        sender_cores=record.cpu_seconds / record.wall_seconds,
    )


class Ladder:
    """The rates that one started server has been given, and the search for the knee among them.

    Attributes:
        points: Of every rate so far, in the order of measuring.
    """

    def __init__(self, measure: Callable[[int], Point], objective: float) -> None:
        """Begin with nothing measured.

        Args:
            measure: Puts a rung's rate on the server.
            objective: Latency, in seconds, that `GOAL_PERCENT` of requests must not exceed.
        """
        self._measure, self._objective = measure, objective
        self.points: dict[int, Point] = {}

    def keeps(self, rung: int) -> bool:
        """Whether a rate meets the objective; it is measured once."""
        if rung not in self.points:
            self.points[rung] = self._measure(rung)
        return self.points[rung].goal_seconds <= self._objective

    def find_knee(self, start: int, lowest: int, stride: int = 1) -> Point | None:
        """Return the highest rate that meets the objective, with the next rung above it not doing so.

        Args:
            start: Rung to begin at; from one that is too much already, the search goes down.
            lowest: Rung that it gives up below.
            stride: Rungs that are taken at once, until the knee lies between two; what is between is then halved.

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


def middle(points: Iterable[Point], figure: Callable[[Point], float]) -> float:
    """Return the median of one figure."""
    return median(map(figure, points))


def by_rung(points: Iterable[Point]) -> dict[int, list[Point]]:
    """Gather measurements by their rate, rising."""
    gathered: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.rung):
        gathered.setdefault(point.rung, []).append(point)
    return gathered
