"""A run: sender processes and scrapers started together, their counts added up, and the result with its warnings."""

import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import grpc
import msgspec

from dragoman.load.histogram import Histogram
from dragoman.load.plan import KINDS, Injections, Plan
from dragoman.load.pool import SenderPool
from dragoman.load.result import GroupResult, Result, SenderResult, TimelineResult, summarise, summarise_group
from dragoman.load.scrape import Scraper
from dragoman.load.sender import Progress
from dragoman.load.show import duration, share
from dragoman.load.tally import UNSENT, Group, Tally, Timeline

SLOW_SENDER = "the sender itself was slow"
# On a machine that also serves, one wake-up in a hundred comes several milliseconds late whatever the sender does.
LEAST_LATE_SECONDS = 0.01
# However seldom calls are, a delay of this much is seen in their latencies.
MOST_LATE_SECONDS = 0.1
# The part of the time between two calls that one may be late.
LATE_PART = 0.1
MOST_LATE_SHARE = 0.1
# Of fewer no share is worth a warning.
FEWEST_SAMPLES = 100
MOST_CPU_CORES = 0.9


def late_seconds(gap_seconds: float) -> float:
    """Return from when on a call is late, for calls of a process that are due so far apart on average."""
    return min(max(LEAST_LATE_SECONDS, LATE_PART * gap_seconds), MOST_LATE_SECONDS)


def slow_sender(lag: Histogram, loop_lag: Histogram, gap_seconds: float, cpu_cores: float) -> str | None:
    """Say why the figures are the sender's as much as the server's; None where they are not.

    Args:
        lag: How much later than due calls left; empty in a closed loop, where none is due.
        loop_lag: How late the event loop was, which is what counts there: it is that late to see answers, too.
        gap_seconds: Time between two calls of a process, on average.
        cpu_cores: Processor time over wall time of the busiest process.
    """
    limit = late_seconds(gap_seconds) if lag.num else LEAST_LATE_SECONDS
    samples = lag if lag.num else loop_lag
    within = samples.share_within(limit)
    late_share = 0.0 if within is None or samples.num < FEWEST_SAMPLES else 1.0 - within
    reasons = []
    if late_share > MOST_LATE_SHARE:
        who = "of its calls left" if lag.num else "of the time its event loop was"
        worst = duration(samples.percentile(99))
        reasons.append(f"{share(late_share)} {who} more than {duration(limit)} late (p99 {worst})")
    if cpu_cores > MOST_CPU_CORES and max(lag.num, loop_lag.num) >= FEWEST_SAMPLES:  # in less time starting is all it shows
        reasons.append(f"its busiest process used {cpu_cores:.2f} cores, of the one that it can use")
    if not reasons:
        return None
    return f"{SLOW_SENDER}: {' and '.join(reasons)}; latencies have that in them: use more --processes, or another machine"


REFRESH_SECONDS = 0.25
FEWEST_REQUESTS = 100
# In the order they are shown.
GROUPS = (*KINDS, *Injections().shares())


class Run:
    """A run of a plan.

    Attributes:
        plan: What is sent.
        tally: What was counted so far; its slices are in `timeline`.
        timeline: By time.
        latest: What each process said last.
        is_interrupted: Whether it was told to stop.
    """

    def __init__(self, plan: Plan, metrics: tuple[str, ...] = ()) -> None:
        """Describe a run; `metrics` are the addresses to read beside it."""
        self.plan = plan
        self.tally = Tally()
        self.timeline = Timeline()
        self.latest: dict[int, Progress] = {}
        self.is_interrupted = False
        self._created = datetime.now(UTC)
        self._pool = SenderPool(plan, self._take)
        self._wall_seconds = 0.0
        self._scrapers = [Scraper(url, lambda: self.elapsed) for url in metrics]

    @property
    def elapsed(self) -> float:
        """Seconds since the start; negative before."""
        return time.monotonic() - self._pool.start if self._pool.start else 0.0

    def stop(self) -> None:
        """Send no more; said again, give up what is under way."""
        self.is_interrupted = True
        self._pool.stop()

    async def run(self, refresh: Callable[["Run"], None]) -> None:
        """Carry the plan out, and call `refresh` four times a second.

        Raises:
            InputError: If there is no connection, or a file cannot be read.
            SenderFailed: If a sender process ends before its time.
        """
        async with self._pool:
            for scraper in self._scrapers:
                scraper.start()
            refreshing = asyncio.create_task(self._refresh(refresh))
            try:
                await self._pool.run()
            finally:
                refreshing.cancel()
                self._wall_seconds = max(self.elapsed, 1e-9)
                await asyncio.gather(*(asyncio.to_thread(scraper.stop) for scraper in self._scrapers))
        refresh(self)

    def result(self, settings: dict[str, str], versions: dict[str, str], models: list[dict[str, str]]) -> Result:
        """Return what it came to."""
        plan = self.plan
        seconds = min(plan.seconds, max((progress.end for progress in self.latest.values()), default=0.0))
        counted = max(0.0, seconds - plan.warmup_seconds)
        groups = {name: summarise_group(self.tally.groups[name], counted) for name in GROUPS if name in self.tally.groups}
        total = summarise_group(self._total(), counted)
        sender = self._sender()
        return Result(
            created=self._created.isoformat(timespec="seconds"),
            settings=settings,
            versions=versions,
            models=models,
            seconds=seconds,
            warmup_seconds=plan.warmup_seconds,
            is_interrupted=self.is_interrupted,
            slos=plan.slos,
            total=total,
            groups=groups,
            timeline=TimelineResult(self.timeline.width, self.timeline.list()),
            sender=sender,
            server=[scraper.series for scraper in self._scrapers],
            errors=self.tally.failures.most_frequent(),
            warnings=self._warnings(total, sender, counted),
        )

    def _take(self, number: int, progress: Progress) -> None:
        for name, group in progress.tally.groups.items():
            self.tally.groups.setdefault(name, Group()).merge(group)
        self.tally.failures.merge(progress.tally.failures)
        self.tally.lag.merge(progress.tally.lag)
        self.tally.loop_lag.merge(progress.tally.loop_lag)
        self.timeline.add(number, progress.tally.slices)
        self.latest[number] = msgspec.structs.replace(progress, tally=Tally())

    def _total(self) -> Group:
        """Add the groups up; times are of those only that did not misbehave."""
        total = Group()
        for name, group in self.tally.groups.items():
            times: dict[str, Histogram] = group.times if name in KINDS else {}
            total.merge(msgspec.structs.replace(group, times=times))
        return total

    def _sender(self) -> SenderResult:
        return SenderResult(
            num_processes=self.plan.num_processes,
            num_sent=sum(progress.num_sent for progress in self.latest.values()),
            lag=summarise(self.tally.lag),
            loop_lag=summarise(self.tally.loop_lag),
            cpu_cores=max((p.cpu_seconds for p in self.latest.values()), default=0.0) / max(self._wall_seconds, 1e-9),
        )

    def _warnings(self, total: GroupResult, sender: SenderResult, counted: float) -> list[str]:
        texts = []
        if self.is_interrupted:
            texts.append("the run was ended before its time")
        if counted <= 0:
            texts.append("it ended before the warm-up was over: nothing was counted")
        if total.counts.num < FEWEST_REQUESTS:
            texts.append(f"{total.counts.num} requests were counted: high percentiles mean nothing")
        gap = counted * self.plan.num_processes / self.tally.lag.num if self.tally.lag.num else 0.0
        slow = slow_sender(self.tally.lag, self.tally.loop_lag, gap, sender.cpu_cores)
        if slow is not None:
            texts.append(slow)
        if any(progress.is_cut for progress in self.latest.values()):
            texts.append("the sender fell so far behind that it stopped when the time was over: not all that was due was sent")
        unsent = total.counts.failures.get(UNSENT, 0)
        if unsent:
            texts.append(f"{unsent} requests were not sent, because too many calls were under way")
        for scraper in self._scrapers:
            if scraper.series.num_failures and not scraper.series.points:
                texts.append(f"--metrics: {scraper.series.url} could not be read: {scraper.last_failure}")
        return texts

    async def _refresh(self, refresh: Callable[["Run"], None]) -> None:
        while True:
            refresh(self)
            await asyncio.sleep(REFRESH_SECONDS)


def versions() -> dict[str, str]:
    """Return what the sender is made of."""
    return {
        "dragoman": _version(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
    }


def _version() -> str:
    try:
        return version("dragoman")
    except PackageNotFoundError:  # run from a folder of its source
        return "unknown"
