"""A run: sender processes and scrapers started together, their counts added up, and the result with its warnings."""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import ClassVar

import msgspec

from dragoman.client.errors import CallError
from dragoman.load.histogram import Histogram
from dragoman.load.plan import KINDS, Injections, Plan
from dragoman.load.result import Result, SenderResult, TimelineResult, summarise, summarise_group
from dragoman.load.scrape import Scraper
from dragoman.load.show import duration, share
from dragoman.load.tally import UNSENT, Group, Tally, Timeline
from dragoman.load.worker import MAX_LINE_BYTES, Message, Progress
from dragoman.model.errors import InputError

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

LEAD_SECONDS = 0.2
REFRESH_SECONDS = 0.25
END_SECONDS = 5.0
FEWEST_REQUESTS = 100
# In the order they are shown.
GROUPS = (*KINDS, *Injections().shares())
# A sender imports from where this process does, in the same order, whatever its own environment would add. Not by PYTHONPATH: a
# folder with a colon in its name cannot stand there, nor can an empty one, which is the working directory.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from dragoman.load.worker import main; main()"


class SenderFailed(CallError):
    """A sender process ended before its work; its own words are on standard error."""

    default_code: ClassVar[str] = "ABORTED"


class Run:
    """A run of a plan.

    Attributes:
        plan: What is sent.
        tally: Counts so far; those of slices are in `timeline`.
        timeline: Counts by time.
        latest: Last report of each process, without its counts.
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
        self._processes: list[Process] = []
        self._num_stops = 0
        self._start = 0.0
        self._wall_seconds = 0.0
        self._scrapers = [Scraper(url, lambda: self.elapsed) for url in metrics]

    @property
    def elapsed(self) -> float:
        """Seconds since the start; negative before."""
        return time.monotonic() - self._start if self._start else 0.0

    def stop(self) -> None:
        """Send no more; said again, give up what is under way."""
        self.is_interrupted = True
        self._num_stops += 1
        if self._start:
            self._send_stop()

    async def run(self, refresh: Callable[["Run"], None]) -> None:
        """Carry the plan out, and call `refresh` four times a second.

        Raises:
            InputError: If a file cannot be read, or a call cannot be put in a message.
            CallError: If there is no connection.
            SenderFailed: If a sender process ends before its time.
        """

        async def refresh_often() -> None:
            while True:
                refresh(self)
                await asyncio.sleep(REFRESH_SECONDS)

        async with self._started():
            ended = asyncio.Event()
            scraping = [asyncio.create_task(scraper.run(ended)) for scraper in self._scrapers]
            refreshing = asyncio.create_task(refresh_often())
            self._start = time.monotonic() + LEAD_SECONDS
            for process in self._processes:
                _tell(process, repr(self._start).encode())
            for _ in range(self._num_stops):  # said while they were being started, when they could not have understood it
                self._send_stop()
            try:
                async with asyncio.TaskGroup() as group:
                    for number, process in enumerate(self._processes):
                        group.create_task(self._listen(number, process))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                refreshing.cancel()
                self._wall_seconds = max(self.elapsed, 1e-9)
                ended.set()
                await asyncio.gather(*scraping)
        refresh(self)

    def add(self, number: int, progress: Progress) -> None:
        """Add the report of a sender process."""
        self.timeline.add(number, progress.tally.slices)
        progress.tally.slices = {}
        self.tally.merge(progress.tally)
        progress.tally = Tally()
        self.latest[number] = progress

    def result(self, settings: dict[str, str], versions: dict[str, str]) -> Result:
        """Return the result, with the options and the versions of the sender."""
        plan, tally, latest = self.plan, self.tally, self.latest.values()
        seconds = min(plan.seconds, max((progress.end for progress in latest), default=0.0))
        counted = max(0.0, seconds - plan.warmup_seconds)
        total = Group()
        for name, group in tally.groups.items():  # times are of those only that did not misbehave
            total.merge(group if name in KINDS else msgspec.structs.replace(group, times={}))
        cpu_seconds = max((progress.cpu_seconds for progress in latest), default=0.0)
        sender = SenderResult(
            num_processes=plan.num_processes,
            num_sent=sum(progress.num_sent for progress in latest),
            lag=summarise(tally.lag),
            loop_lag=summarise(tally.loop_lag),
            cpu_cores=cpu_seconds / max(self._wall_seconds, 1e-9),
        )
        return Result(
            created=self._created.isoformat(timespec="seconds"),
            settings=settings,
            versions=versions,
            models=[],
            seconds=seconds,
            warmup_seconds=plan.warmup_seconds,
            is_interrupted=self.is_interrupted,
            slos=plan.slos,
            total=summarise_group(total, counted),
            groups={name: summarise_group(tally.groups[name], counted) for name in GROUPS if name in tally.groups},
            timeline=TimelineResult(self.timeline.width, self.timeline.list()),
            sender=sender,
            server=[scraper.series for scraper in self._scrapers],
            errors=tally.failures.most_frequent(),
            warnings=self._warnings(total, sender.cpu_cores, counted),
        )

    def _warnings(self, total: Group, cpu_cores: float, counted: float) -> list[str]:
        texts = []
        if self.is_interrupted:
            texts.append("the run was ended before its time")
        if counted <= 0:
            texts.append("it ended before the warm-up was over: nothing was counted")
        if total.num < FEWEST_REQUESTS:
            texts.append(f"{total.num} requests were counted: high percentiles mean nothing")
        gap = counted * self.plan.num_processes / self.tally.lag.num if self.tally.lag.num else 0.0
        slow = slow_sender(self.tally.lag, self.tally.loop_lag, gap, cpu_cores)
        if slow is not None:
            texts.append(slow)
        if any(progress.is_cut for progress in self.latest.values()):
            texts.append("the sender fell so far behind that it stopped when the time was over: not all that was due was sent")
        if unsent := total.failures.get(UNSENT, 0):
            texts.append(f"{unsent} requests were not sent, because too many calls were under way")
        for scraper in self._scrapers:
            if scraper.series.num_failures and not scraper.series.points:
                texts.append(f"--metrics: {scraper.series.url} could not be read: {scraper.last_failure}")
        return texts

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        """Start the sender processes and wait for their connections; at the end kill those that do not end by themselves."""
        try:
            for plan in self.plan.parts():
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", _START, json.dumps(sys.path)),
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=MAX_LINE_BYTES,
                    start_new_session=True,  # Ctrl-C in a terminal is for us
                )
                self._processes.append(process)
                _tell(process, msgspec.json.encode(plan))
            for process in self._processes:
                await _read(process)
            yield
        finally:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.close()
            for process in self._processes:
                try:
                    await asyncio.wait_for(process.wait(), END_SECONDS)
                except TimeoutError:
                    process.kill()
                    await process.wait()

    async def _listen(self, number: int, process: Process) -> None:
        is_last = False
        while not is_last:
            message = await _read(process)
            if message.progress is not None:
                is_last = message.progress.is_last
                self.add(number, message.progress)

    def _send_stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                _tell(process, b"stop")


def slow_sender(lag: Histogram, loop_lag: Histogram, gap_seconds: float, cpu_cores: float) -> str | None:
    """Return why the figures are the sender's as much as the server's; None where they are not.

    Args:
        lag: Delay of calls after they were due; empty in a closed loop, where none is due.
        loop_lag: Delay of the event loop, which counts in a closed loop: answers are noticed so late, too.
        gap_seconds: Time between two calls of a process, on average.
        cpu_cores: Processor time over wall time of the busiest process.
    """
    limit = min(max(LEAST_LATE_SECONDS, LATE_PART * gap_seconds), MOST_LATE_SECONDS) if lag.num else LEAST_LATE_SECONDS
    samples = lag if lag.num else loop_lag
    late_share = 1.0 - (samples.share_within(limit) or 0.0)
    reasons = []
    if samples.num >= FEWEST_SAMPLES and late_share > MOST_LATE_SHARE:
        who = "of its calls left" if lag.num else "of the time its event loop was"
        worst = duration(samples.percentile(99))
        reasons.append(f"{share(late_share)} {who} more than {duration(limit)} late (p99 {worst})")
    if cpu_cores > MOST_CPU_CORES and max(lag.num, loop_lag.num) >= FEWEST_SAMPLES:  # in less time starting is all it shows
        reasons.append(f"its busiest process used {cpu_cores:.2f} cores, of the one that it can use")
    if not reasons:
        return None
    return f"{SLOW_SENDER}: {' and '.join(reasons)}; latencies have that in them: use more --processes, or another machine"


async def _read(process: Process) -> Message:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise SenderFailed(f"a sender process ended with exit code {await process.wait()}")
    message = msgspec.json.decode(line, type=Message)
    if message.error:
        raise CallError(message.error, code=message.code) if message.code else InputError(message.error)
    return message


def _tell(process: Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
