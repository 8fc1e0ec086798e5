"""What a server's processes hold over time: memory, descriptors and threads; and whether that grew."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 1e6
WARMUP_SHARE = 0.25
"""The part of the time, from its start, in which caches and pools may still fill."""
MEASURES = {"resident MB": 0.05, "descriptors": 0.0, "threads": 0.0}
"""Growth that counts as none, as a share."""
SLACK = {"resident MB": 4.0, "descriptors": 4.0, "threads": 3.0}
"""The same, in units: connections that open and close have a descriptor meanwhile."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process held.

    Attributes:
        at: Seconds since the watch began.
        values: By `MEASURES`.
    """

    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Trend:
    """How one measure of one process developed after the warm-up.

    Attributes:
        before: Median of the first third.
        after: Median of the last third.
        per_hour: Slope of the line of least squares, units an hour.
        allowed: Growth that counts as none.
    """

    before: float
    after: float
    per_hour: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        """Whether it did not grow."""
        return self.after - self.before <= self.allowed


def read(pid: int, at: float) -> Reading:
    """Read what a process holds now.

    Raises:
        OSError: If there is no such process.
    """
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text(encoding="ascii").split()[1])
    values = {
        "resident MB": pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE,
        "descriptors": float(len(os.listdir(folder / "fd"))),
        "threads": float(len(os.listdir(folder / "task"))),
    }
    return Reading(at, values)


def trend(readings: Sequence[Reading], measure: str) -> Trend:
    """Return how a measure developed: by the low end of its first and its last third, so that what comes and goes is no growth.

    Caches have room for the longest text at hand and give it back later; a leak raises the low end, too.

    Raises:
        ValueError: If there are fewer than six readings after the warm-up.
    """
    end = readings[-1].at if readings else 0.0
    counted = [reading for reading in readings if reading.at >= WARMUP_SHARE * end]
    third = len(counted) // 3
    if third < 2:
        raise ValueError(f"{len(counted)} readings after the warm-up are too few")
    values = [reading.values[measure] for reading in counted]
    times = [reading.at for reading in counted]
    before, after = low_end(values[:third]), low_end(values[-third:])
    return Trend(before, after, slope(times, values) * 3600, max(before * MEASURES[measure], SLACK[measure]))


def low_end(values: Sequence[float]) -> float:
    """Return the value that a tenth of the values do not exceed."""
    return sorted(values)[(len(values) - 1) // 10]


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the line of least squares; 0 if all times are the same."""
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    return sum((time - middle) * (value - mean) for time, value in zip(times, values, strict=True)) / spread if spread else 0.0


class Watch:
    """Reads processes again and again on a thread of its own, from entering to leaving.

    Attributes:
        readings: By the name of the process.
        failures: Why readings failed.
    """

    def __init__(self, processes: Mapping[str, int], period_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Describe it; `processes` are ids by name."""
        self._processes, self._period_seconds, self._clock = processes, period_seconds, clock
        self.readings: dict[str, list[Reading]] = {name: [] for name in processes}
        self.failures: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._start = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for name, pid in self._processes.items():
                try:
                    self.readings[name].append(read(pid, self._clock() - self._start))
                except OSError as error:
                    self.failures.append(f"{name}: {error}")
            if self._stopped.wait(self._period_seconds):
                return
