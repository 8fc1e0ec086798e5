"""A simulated pod: a replica, when it is ready, and what the collectors of metrics have last read of it."""

from dataclasses import dataclass

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.replica import SimulatedReplica


@dataclass(slots=True, eq=False)
class Pod:
    """One pod.

    Attributes:
        replica: Its server.
        ready_at: When it takes requests.
        phase: When in each period it is read.
        queue_seconds: As last read; None before it was.
        num_waiting: As last read.
        num_slots: In use, as last read.
        cpu_cores: Mean of the last full period, as last read; None before there was one.
    """

    replica: SimulatedReplica
    ready_at: float
    phase: int
    queue_seconds: float | None = None
    num_waiting: float | None = None
    num_slots: float | None = None
    cpu_cores: float | None = None
    _cpu_before: tuple[float, float] | None = None

    def read(self, now: float, costs: Costs) -> None:
        """Let the collectors read it."""
        self.queue_seconds, self.num_waiting = self.replica.queue_seconds, float(self.replica.num_waiting)
        self.num_slots = float(self.replica.num_running * costs.num_rows)
        if self._cpu_before is not None:
            at, seconds = self._cpu_before
            used = (self.replica.cpu_seconds - seconds) / (now - at) + costs.idle_cores
            self.cpu_cores = min(used, costs.cores)
        self._cpu_before = now, self.replica.cpu_seconds
