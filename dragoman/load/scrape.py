"""The server's own metrics, read beside the run: a few series of `/metrics` once a second, in a bounded number of points."""

import asyncio
import contextlib
import http.client
import math
import re
import time
import urllib.request
from collections.abc import Callable, Iterator

import msgspec

from dragoman.load.show import one_line
from dragoman.model.errors import InputError

PERIOD_SECONDS = 1.0
TIMEOUT_SECONDS = 2.0
MAX_POINTS = 600
_MAX_BYTES = 16 * 1024 * 1024
_METRIC = re.compile(r"([^\s{]*)(?:\{.*\})?\s+(\S+)")  # a time stamp may follow

# The process that was started, and those that it started.
_PROCESSES = ("process", "dragoman_engine")
# Series of the report: how they are called, the metrics that are added up, and whether their value is shown, their growth a second,
# or for a pair of a histogram's sum and count the mean of what was observed since the last time.
GAUGES = {
    "waiting": ("dragoman_num_requests_waiting",),
    "running": ("dragoman_num_requests_running",),
    "slots_in_use": ("dragoman_slots_in_use",),
    "rss_bytes": tuple(f"{name}_resident_memory_bytes" for name in _PROCESSES),
    "open_fds": ("process_open_fds",),
}
RATES = {
    "cpu_cores": tuple(f"{name}_cpu_seconds_total" for name in _PROCESSES),
    "tokens_per_second": ("dragoman_generation_tokens_total",),
}
MEANS = {
    "step_seconds": "dragoman_step_duration_seconds",
    "rows_per_step": "dragoman_step_batch_size",
    "queue_seconds": "dragoman_request_queue_time_seconds",
}


class Point(msgspec.Struct):
    """One reading."""

    at: float  # seconds of the run
    values: dict[str, float]  # by the name of the series; what the server does not tell is missing


class ServerSeries(msgspec.Struct):
    """Readings of one address."""

    url: str  # where
    points: list[Point] = []  # in order of time
    num_failures: int = 0  # readings that failed


class Scraper:
    """Reads one address once a second while a run goes on.

    `clock` returns seconds of the run, `read` the text of an address.

    Attributes:
        series: The readings.
        last_failure: Why the last reading that failed did.
    """

    def __init__(self, url: str, clock: Callable[[], float], read: Callable[[str], str] | None = None) -> None:
        self.series = ServerSeries(url)
        self.last_failure = ""
        self._clock = clock
        self._read = read or read_url
        self._last: tuple[float, dict[str, float]] | None = None
        self._num_read, self._stride = 0, 1  # every `stride`th reading is kept

    async def run(self, ended: asyncio.Event) -> None:
        """Read until the run has ended, and then once more."""
        while not ended.is_set():
            due = time.monotonic() + PERIOD_SECONDS
            await asyncio.to_thread(self.scrape)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), due - time.monotonic())
        await asyncio.to_thread(self.scrape)

    def scrape(self) -> None:
        """Read once. What cannot be read is counted: a server that is being restarted has no metrics for a while."""
        try:
            totals = parse(self._read(self.series.url))
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last where something else than HTTP is spoken
            self.series.num_failures += 1
            self.last_failure = one_line(str(error), 200) or type(error).__name__
            self._last = None
            return
        now = self._clock()
        if self._num_read % self._stride == 0:
            self.series.points.append(Point(now, _values(totals, self._last, now)))
        self._num_read += 1
        self._last = now, totals
        if len(self.series.points) > MAX_POINTS:
            self.series.points = self.series.points[::2]
            self._stride *= 2


def parse(text: str) -> dict[str, float]:
    """Return every metric of the exposition format, summed over its labels; histogram buckets and comments are left out.

    Raises:
        ValueError: If a line is not of that format.
    """
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _METRIC.match(line)
        if match is None:
            raise ValueError(f"not a metric: {line[:80]}")
        name, value = match[1], float(match[2])
        if math.isfinite(value) and not name.endswith("_bucket"):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def read_url(url: str) -> str:
    """Return what an address serves."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        return str(response.read(_MAX_BYTES).decode("utf-8", errors="replace"))


def full_url(text: str) -> str:
    """Return the address of the metrics: `HOST:PORT` is short for `http://HOST:PORT/metrics`; only HTTP is read."""
    scheme, _, rest = text.partition("://") if "://" in text else ("http", "", text)
    if scheme not in ("http", "https") or not rest:
        raise InputError(f"--metrics: {text}: not an address of HTTP")
    return f"{scheme}://{rest}" if "/" in rest else f"{scheme}://{rest}/metrics"


def _values(totals: dict[str, float], last: tuple[float, dict[str, float]] | None, now: float) -> dict[str, float]:
    """Return the series of a reading; those of growth need the reading before."""
    values = {name: sum(totals[each] for each in metrics) for name, metrics in _present(GAUGES, totals)}
    if last is None or now <= last[0]:
        return values
    before, earlier = last

    def growth(metric: str) -> float:
        """Return how much a counter grew; a counter that fell was started anew."""
        grown = totals[metric] - earlier.get(metric, totals[metric])
        return grown if grown >= 0 else totals[metric]

    for name, metrics in _present(RATES, totals):
        values[name] = sum(map(growth, metrics)) / (now - before)
    for name, metric in MEANS.items():
        if f"{metric}_count" in totals and (count := growth(f"{metric}_count")) > 0:
            values[name] = growth(f"{metric}_sum") / count
    return values


def _present(series: dict[str, tuple[str, ...]], totals: dict[str, float]) -> Iterator[tuple[str, list[str]]]:
    """Yield each series that the server has, with the metrics of it that there are."""
    for name, metrics in series.items():
        if present := [metric for metric in metrics if metric in totals]:
            yield name, present
