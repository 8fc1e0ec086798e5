"""What one replica's work costs, as measured: plain data that the simulation computes with."""

from bisect import bisect_left
from typing import Self

import msgspec


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One request.

    Attributes:
        num_tokens: Of its source.
        num_steps: Decode steps from admission to its answer.
    """

    num_tokens: int
    num_steps: int


class Costs(msgspec.Struct, frozen=True):
    """Seconds and processor time of one replica.

    Attributes:
        num_rows: Rows that each request holds.
        max_rows: Rows there are.
        num_requests: Numbers of running requests that a step was measured with, rising from 1.
        step_seconds: Of an iteration with so many requests, median.
        prefill_seconds: Of encoding anything at all.
        token_seconds: More, for each source token.
        tokens_per_prefill: Most source tokens encoded between two steps.
        max_waiting: Requests that may wait.
        jobs: Requests as they occur.
        engine_cores: Processor time of the engine over wall time while it has work.
        front_cpu_seconds: Processor time of the front end for a request.
        cores: That the replica has; where the engine computes on all of them, the front end's time is taken from the engine's.
        front_seconds: What a request takes beside its time in the engine, calibrated with one light load.
        idle_cores: Processor time over wall time without requests.
    """

    num_rows: int
    max_rows: int
    num_requests: list[int]
    step_seconds: list[float]
    prefill_seconds: float
    token_seconds: float
    tokens_per_prefill: int
    max_waiting: int
    jobs: list[Job]
    engine_cores: float = 1.0
    front_cpu_seconds: float = 0.0
    cores: float = 1.0
    front_seconds: float = 0.0
    idle_cores: float = 0.0

    @property
    def max_running(self) -> int:
        """Requests that may run at once."""
        return self.max_rows // self.num_rows

    @property
    def taken_seconds(self) -> float:
        """Time that the front end takes from the engine for each request, because they share the cores."""
        return self.front_cpu_seconds * self.engine_cores / self.cores

    def step(self, num_running: int) -> float:
        """Return the seconds of an iteration with so many requests: linear between what was measured, and flat beyond."""
        place = bisect_left(self.num_requests, num_running)
        if place == len(self.num_requests):
            return self.step_seconds[-1]
        if self.num_requests[place] == num_running or place == 0:
            return self.step_seconds[place]
        low, high = self.num_requests[place - 1], self.num_requests[place]
        share = (num_running - low) / (high - low)
        return self.step_seconds[place - 1] * (1 - share) + self.step_seconds[place] * share

    def prefill(self, num_tokens: int, num_admitted: int) -> float:
        """Return the seconds of admitting requests with so many source tokens together, the front end's share included."""
        return self.prefill_seconds + self.token_seconds * num_tokens + self.taken_seconds * num_admitted

    def but(self, **values: float) -> Self:
        """Return these costs with other values."""
        return msgspec.structs.replace(self, **values)


def fit_line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Return intercept and slope of the line of least squares, neither below 0."""
    middle, mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = max(0.0, sum((x - middle) * (y - mean) for x, y in zip(xs, ys, strict=True)) / spread) if spread else 0.0
    return max(0.0, mean - slope * middle), slope
