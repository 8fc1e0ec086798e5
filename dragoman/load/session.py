"""A session of `dragoman load`: probe, run or sweep, print, write, exit code."""

import asyncio
import contextlib
import importlib
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import grpc
import msgspec

from dragoman.client.errors import CallError
from dragoman.extras import own_version
from dragoman.load.conditions import Condition, share_good
from dragoman.load.live import watching
from dragoman.load.plan import Plan
from dragoman.load.probe import Findings, list_models, probe
from dragoman.load.result import Result, Step, Sweep, encode, write_file
from dragoman.load.run import SLOW_SENDER, Run
from dragoman.load.scrape import Scraper
from dragoman.load.show import number
from dragoman.load.table import print_result
from dragoman.model.errors import InputError

GROWTH = 1.6
DROP = 4.0
# Below this part of the first rate the search is given up.
LEAST_PART = 1e-3
TOLERANCE = 0.05
MAX_STEPS = 20


class KneeSearch:
    """Raises the rate geometrically until it fails, then halves the gap between the best that held and the least that did not.

    A first rate that fails is lowered in large steps. It ends when the gap is within `TOLERANCE`, or after `max_steps` rates.

    Attributes:
        knee: Highest rate that held so far; None where none did.
        failed: Lowest rate that failed; None where none did, so that the knee may be higher.
    """

    def __init__(self, first: float, max_steps: int = MAX_STEPS) -> None:
        self._first = first
        self._steps_left = max_steps
        self.knee: float | None = None
        self.failed: float | None = None

    def next_rate(self) -> float | None:
        """Return the rate to try; None when the search is over."""
        if not self._steps_left:
            return None
        if self.knee is None:
            lower = self._first if self.failed is None else self.failed / DROP
            return lower if lower >= self._first * LEAST_PART else None
        if self.failed is None:
            return self.knee * GROWTH
        return (self.knee + self.failed) / 2 if self.failed - self.knee > TOLERANCE * self.knee else None

    def record(self, rate: float, is_passed: bool) -> None:
        """Take the outcome of a rate; noise may have a rate hold above one that failed, and then the failure stands."""
        self._steps_left -= 1
        if is_passed:
            self.knee = max(rate, self.knee or rate)
        else:
            self.failed = min(rate, self.failed or rate)


FAILED_CODE = 3
NOTHING_CODE = 1
INTERRUPTED_CODE = 130
NOTHING_SUCCEEDED = "nothing succeeded"


@dataclass
class Session:
    """Runs a plan, once or at many rates."""

    plan: Plan
    metrics: tuple[str, ...] = ()  # addresses of the server's metrics
    is_sweep: bool = False  # search the knee instead of running once
    share: float = 0.99  # for a sweep: part of the requests that has to be good
    conditions: list[Condition] = field(default_factory=list)  # conditions that make the run fail
    output: Path | None = None  # where the JSON goes; None for nowhere
    report: Path | None = None  # where the HTML goes; None for nowhere
    settings: dict[str, str] = field(default_factory=dict)  # options, by flag, for the report
    is_probed: bool = True  # make single calls first, and none where they fail
    is_interrupted: bool = False
    _run: Run | None = None
    _title: str = ""
    _asking: asyncio.Task[Findings] | None = None

    def perform(self, out: TextIO) -> int:
        """Do it all, print the result and return the exit code.

        Raises:
            InputError: If a server refuses what is to be sent, or a file or an address of metrics cannot be used.
            CallError: If a server cannot be reached, or fails before the run.
            SenderFailed: If a sender process ends before its time.
            ModuleNotFoundError: If the packages of a report are not installed.
        """
        if self.report is not None:
            importlib.import_module("dragoman.load.report")
        with _writable(self.output, "--output"), _writable(self.report, "--report"):  # known now, not after an hour
            with asyncio.Runner() as runner:
                runner.get_loop()  # made first: Ctrl-C meanwhile would leave a coroutine that nobody awaits, which Python reports
                result = runner.run(self._perform())
            if result is None:
                print("ended before the first call: there is nothing to report", file=out)
                return INTERRUPTED_CODE
            return self._finish(result, out)

    def _finish(self, result: Result, out: TextIO) -> int:
        """Write and print the result; return the exit code."""
        if not result.has_success and not self.is_interrupted:
            reason = "no request ended as it should" if result.total.counts.num else "no request was counted"
            result = msgspec.structs.replace(result, warnings=[f"{NOTHING_SUCCEEDED}: {reason}", *result.warnings])
        result = msgspec.structs.replace(result, checks=[condition.check(result) for condition in self.conditions])
        try:
            print_result(result, out)
        finally:  # also where nobody reads to the end
            if self.output is not None:
                write_file(self.output, encode(result))
            if self.report is not None:
                from dragoman.load.report import report_page

                write_file(self.report, report_page(result).encode())
        if self.is_interrupted:
            return INTERRUPTED_CODE
        if not result.has_success:
            return NOTHING_CODE
        return FAILED_CODE if any(check.is_failed for check in result.checks) else 0

    def interrupt(self) -> None:
        """Send no more; said again, give up what is under way."""
        self.is_interrupted = True
        if self._run is not None:
            self._run.stop()
        elif self._asking is not None:
            self._asking.cancel()

    async def _perform(self) -> Result | None:
        """Probe and run; return None where it was interrupted before the first call that counts."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        try:
            self._asking = asyncio.create_task(self._ask())
            await asyncio.wait([self._asking])
            if self.is_interrupted:
                return None
            findings = self._asking.result()
            with watching(sys.stderr, lambda: self._title) as refresh:
                self._title = f"load on {self.plan.server.target}"
                result = await (self._sweep(refresh) if self.is_sweep else self._once(self.plan, refresh))
                warnings = [*findings.warnings, *result.warnings]
                return msgspec.structs.replace(result, models=findings.models, warnings=warnings)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _ask(self) -> Findings:
        """Probe servers and metrics; without probes, ask for models only: servers that do not answer now may do so in the run."""
        if self.is_probed:
            findings = await probe(self.plan)
            await asyncio.gather(*(asyncio.to_thread(_check_metrics, url) for url in self.metrics))
            return findings
        try:
            return Findings(await list_models(self.plan.server), [])
        except CallError as error:
            return Findings([], [f"the servers were not asked what they have: {error}"])

    async def _once(self, plan: Plan, refresh: Callable[[Run], None]) -> Result:
        self._run = Run(plan, self.metrics)
        await self._run.run(refresh)
        return self._run.result(self.settings, versions())

    async def _sweep(self, refresh: Callable[[Run], None]) -> Result:
        """Try rates until the knee is known; return the result of the knee's run, of the first where no rate held."""
        assert self.plan.arrivals is not None
        search = KneeSearch(self.plan.arrivals.rate)
        steps: list[Step] = []
        shown: Result | None = None
        slow: list[str] = []
        while not self.is_interrupted and (rate := search.next_rate()) is not None:
            self._title = f"sweep on {self.plan.server.target}, step {len(steps) + 1}: {number(rate)} calls/s"
            arrivals = msgspec.structs.replace(self.plan.arrivals, rate=rate)
            plan = msgspec.structs.replace(self.plan, arrivals=arrivals, run_id=f"{self.plan.run_id}-{len(steps)}")
            result = await self._once(plan, refresh)
            if self.is_interrupted and shown is not None:
                break
            good = share_good(result) or 0.0
            is_passed = good >= self.share and not result.is_interrupted
            search.record(rate, is_passed)
            total = result.total
            failures, times = total.counts.failures, total.times
            steps.append(Step(rate, is_passed, good, total.requests_per_second, total.goodput, failures, times))
            if shown is None or search.knee == rate:
                shown = result
            if not is_passed and any(warning.startswith(SLOW_SENDER) for warning in result.warnings):
                slow.append(number(rate))
        assert shown is not None  # the first rate is always tried
        warnings = list(shown.warnings)
        if search.knee is None:
            warnings.append("no rate held the service levels; the figures are of the first one")
        elif search.failed is None:
            warnings.append("no rate failed: the knee is higher than what was tried")
        if slow:
            warnings.append(f"the sender itself was slow at rates that failed ({', '.join(slow)} calls/s): the knee may be higher")
        sweep = Sweep(steps, search.knee, self.share)
        return msgspec.structs.replace(shown, sweep=sweep, warnings=warnings, is_interrupted=self.is_interrupted)


@contextlib.contextmanager
def _writable(path: Path | None, flag: str) -> Iterator[None]:
    """Raise `InputError` for a file that cannot be written; remove a new one that stayed empty."""
    if path is None:
        yield
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InputError(f"{flag}: {path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        if is_new and path.is_file() and not path.stat().st_size:
            path.unlink()


def _check_metrics(url: str) -> None:
    scraper = Scraper(url, time.monotonic)
    scraper.scrape()
    if scraper.last_failure:
        raise InputError(f"--metrics: {url} cannot be read: {scraper.last_failure}")


def versions() -> dict[str, str]:
    """Return the versions of the sender."""
    return {
        "dragoman": own_version(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
    }
