"""How fast engines step, from what their counts have grown by between two snapshots."""

from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.server.engine.snapshot import EngineSnapshot

LONGEST_SECONDS = 2.0
"""Between two snapshots that are compared: an engine that nobody has asked for longer may not have counted all of its steps."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one engine or of several together, between two snapshots.

    Attributes:
        num_steps: Steps.
        num_rows: Rows decoded in them.
        seconds: Their durations together.
        steps_per_second: Of time that passed.
        rows_per_second: Of time that passed.
    """

    num_steps: int = 0
    num_rows: int = 0
    seconds: float = 0.0
    steps_per_second: float = 0.0
    rows_per_second: float = 0.0

    @property
    def rows_per_step(self) -> float | None:
        """Mean; None without steps."""
        return self.num_rows / self.num_steps if self.num_steps else None

    @property
    def step_seconds(self) -> float | None:
        """Mean; None without steps."""
        return self.seconds / self.num_steps if self.num_steps else None


class PaceOfSteps:
    """Of one version of a model, from snapshot to snapshot."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._last: dict[int, tuple[EngineSnapshot, Pace]] = {}

    def update(self, engines: Sequence[EngineSnapshot]) -> Pace:
        """Take in the engines that there are; return how fast they have been since the last time, all together."""
        self._last = {engine.replica: (engine, self._pace(engine)) for engine in engines}
        paces = [pace for _, pace in self._last.values()]
        return Pace(
            sum(pace.num_steps for pace in paces),
            sum(pace.num_rows for pace in paces),
            sum(pace.seconds for pace in paces),
            sum(pace.steps_per_second for pace in paces),
            sum(pace.rows_per_second for pace in paces),
        )

    def _pace(self, engine: EngineSnapshot) -> Pace:
        if engine.replica not in self._last:
            return Pace()
        before, pace = self._last[engine.replica]
        seconds = engine.at - before.at
        if not seconds:  # it has not answered yet
            return pace
        num_steps = engine.totals.num_steps - before.totals.num_steps
        if not 0 < seconds <= LONGEST_SECONDS or num_steps < 0:  # it was started again, and began to count anew
            return Pace()
        num_rows = engine.totals.num_rows - before.totals.num_rows
        return Pace(num_steps, num_rows, engine.totals.seconds - before.totals.seconds, num_steps / seconds, num_rows / seconds)
