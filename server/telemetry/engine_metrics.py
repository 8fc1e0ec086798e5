"""One engine's series: whether it is there, what it has and what it did, by model and replica."""

import time
from collections.abc import Callable

from dragoman.server.engine import messages
from dragoman.server.telemetry.declarations import Declarations


class EngineMetrics:
    """One engine's series, looked up once."""

    def __init__(self, metrics: Declarations, model: str, replica: int, clock: Callable[[], float] = time.monotonic) -> None:
        labels = model, str(replica)
        self.restarts = metrics.engine_restarts.labels(*labels)
        self._clock = clock
        self._statistics = messages.Statistics()
        self._last_heard: float | None = None
        self._up = metrics.engine_up.labels(*labels)
        self._steps = metrics.engine_steps.labels(*labels)
        self._rows = metrics.engine_rows.labels(*labels)
        metrics.engine_silence.labels(*labels).set_function(self._silence_seconds)
        metrics.engine_slots_in_use.labels(*labels).set_function(lambda: self._statistics.num_slots)
        metrics.engine_cache_reserved.labels(*labels).set_function(lambda: self._statistics.cache_bytes_reserved)
        metrics.engine_cache_used.labels(*labels).set_function(lambda: self._statistics.cache_bytes_used)

    def set_up(self, is_up: bool) -> None:
        """Say whether the engine takes requests; one that does not has nothing, and is not expected to speak."""
        self._up.set(is_up)
        if is_up:
            self._last_heard = self._clock()
        else:
            self._last_heard = None
            self._statistics = messages.Statistics()

    def observe(self, statistics: messages.Statistics) -> None:
        """Keep an engine's statistics for the gauges; count its steps since the last ones."""
        self._statistics = statistics
        if self._last_heard is not None:
            self._last_heard = self._clock()
        if steps := statistics.steps:
            self._steps.inc(len(steps))
            self._rows.inc(sum(step.num_rows for step in steps))

    def _silence_seconds(self) -> float:
        heard = self._last_heard
        return 0.0 if heard is None else max(0.0, self._clock() - heard)
