"""A session of `dragoman load`: probe, run or sweep, print, write, exit code."""

import asyncio
import contextlib
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import msgspec

from dragoman.client.errors import CallError
from dragoman.load.conditions import Condition, share_good
from dragoman.load.live import watching
from dragoman.load.plan import Plan
from dragoman.load.probe import Findings, list_models, probe
from dragoman.load.result import Result, Step, Sweep, write_result
from dragoman.load.run import SLOW_SENDER, Run, versions
from dragoman.load.scrape import UNREADABLE, read_url
from dragoman.load.show import number, one_line
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

    A first rate that fails is lowered in large steps. It ends when the gap is within the tolerance, or after so many steps.

    Args:
        first: Rate to begin with.
        tolerance: Gap at the end, as a part of the rate that held.
        max_steps: Rates to try at the most.
    """

    def __init__(self, first: float, tolerance: float = TOLERANCE, max_steps: int = MAX_STEPS) -> None:
        self._first = first
        self._tolerance = tolerance
        self._steps_left = max_steps
        self._held: float | None = None
        self._failed: float | None = None

    @property
    def knee(self) -> float | None:
        """Highest rate that held so far; None where none did."""
        return self._held

    @property
    def is_bracketed(self) -> bool:
        """Whether a rate failed; otherwise the knee may be higher."""
        return self._failed is not None

    def next_rate(self) -> float | None:
        """Return the rate to try; None when the search is over."""
        if not self._steps_left:
            return None
        if self._held is None:
            lower = self._first if self._failed is None else self._failed / DROP
            return lower if lower >= self._first * LEAST_PART else None
        if self._failed is None:
            return self._held * GROWTH
        if self._failed - self._held <= self._tolerance * self._held:
            return None
        return (self._held + self._failed) / 2

    def record(self, rate: float, is_passed: bool) -> None:
        """Say how the rate did; noise may have a rate hold above one that failed, and then the failure stands."""
        self._steps_left -= 1
        if not is_passed:
            self._failed = rate if self._failed is None else min(self._failed, rate)
        elif self._held is None or rate > self._held:
            self._held = rate


FAILED_CODE = 3
NOTHING_CODE = 1
INTERRUPTED_CODE = 130
NOTHING_SUCCEEDED = "nothing succeeded"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a session beside the plan."""

    metrics: tuple[str, ...] = ()  # addresses of the server's metrics
    is_sweep: bool = False  # search the knee instead of running once
    share: float = 0.99  # for a sweep: part of the requests that has to be good
    conditions: list[Condition] = field(default_factory=list)  # conditions that make the run fail
    output: Path | None = None  # where the JSON goes; None for nowhere
    report: Path | None = None  # where the HTML goes; None for nowhere
    settings: dict[str, str] = field(default_factory=dict)  # options, by flag, for the report
    is_probed: bool = True  # make single calls first, and none where they fail


class Session:
    """Runs a plan, once or at many rates.

    Args:
        plan: What to send.
        options: What to do beside.
        screen: Where progress is shown, if it is a terminal.
    """

    def __init__(self, plan: Plan, options: SessionOptions, screen: TextIO | None = None) -> None:
        self._plan = plan
        self._options = options
        self._screen = screen or sys.stderr
        self._run: Run | None = None
        self._title = ""
        self._findings = Findings([], [])
        self._asking: asyncio.Task[Findings] | None = None
        self.is_interrupted = False

    def perform(self, out: TextIO) -> int:
        """Do it all, print the result and return the exit code.

        Raises:
            InputError: If a server refuses what is to be sent, or a file or an address of metrics cannot be used.
            CallError: If a server cannot be reached, or fails before the run.
            SenderFailed: If a sender process ends before its time.
            ModuleNotFoundError: If the packages of a report are not installed.
        """
        if self._options.report is not None:
            importlib.import_module("dragoman.load.report")
        with (
            _writable(self._options.output, "--output"),
            _writable(self._options.report, "--report"),
        ):  # known now, not after an hour
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
        result = msgspec.structs.replace(result, checks=[condition.check(result) for condition in self._options.conditions])
        try:
            print_result(result, out)
        finally:  # also where nobody reads to the end
            if self._options.output is not None:
                _write(self._options.output, write_result, result)
            if self._options.report is not None:
                from dragoman.load.report import write_report

                _write(self._options.report, write_report, result)
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
            self._asking = asyncio.create_task(probe(self._plan) if self._options.is_probed else self._list())
            await asyncio.wait([self._asking])
            if self.is_interrupted:
                return None
            self._findings = self._asking.result()
            if self._options.is_probed:
                await asyncio.gather(*(asyncio.to_thread(_check_metrics, url) for url in self._options.metrics))
            with watching(self._screen, lambda: self._title) as refresh:
                if self._options.is_sweep:
                    return await self._sweep(refresh)
                self._title = f"load on {self._plan.server.target}"
                return await self._once(self._plan, refresh)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _list(self) -> Findings:
        """Ask what the servers have; those that do not answer now may do so in the run."""
        try:
            return Findings(await list_models(self._plan.server), [])
        except CallError as error:
            return Findings([], [f"the servers were not asked what they have: {error}"])

    async def _once(self, plan: Plan, refresh: Callable[[Run], None]) -> Result:
        self._run = Run(plan, self._options.metrics)
        await self._run.run(refresh)
        result = self._run.result(self._options.settings, versions(), self._findings.models)
        return msgspec.structs.replace(result, warnings=[*self._findings.warnings, *result.warnings])

    async def _sweep(self, refresh: Callable[[Run], None]) -> Result | None:
        """Try rates until the knee is known; return the result of the knee's run, of the first where no rate held."""
        assert self._plan.arrivals is not None
        search = KneeSearch(self._plan.arrivals.rate)
        steps: list[Step] = []
        shown: Result | None = None
        slow: list[str] = []
        while not self.is_interrupted and (rate := search.next_rate()) is not None:
            self._title = f"sweep on {self._plan.server.target}, step {len(steps) + 1}: {number(rate)} calls/s"
            arrivals = msgspec.structs.replace(self._plan.arrivals, rate=rate)
            plan = msgspec.structs.replace(self._plan, arrivals=arrivals, run_id=f"{self._plan.run_id}-{len(steps)}")
            result = await self._once(plan, refresh)
            if self.is_interrupted and shown is not None:
                break
            good = share_good(result) or 0.0
            is_passed = good >= self._options.share and not result.is_interrupted
            search.record(rate, is_passed)
            steps.append(_step(rate, is_passed, good, result))
            if shown is None or search.knee == rate:
                shown = result
            if not is_passed and _is_sender_slow(result):
                slow.append(number(rate))
        if shown is None:
            return None
        warnings = list(shown.warnings)
        if search.knee is None:
            warnings.append("no rate held the service levels; the figures are of the first one")
        elif not search.is_bracketed:
            warnings.append("no rate failed: the knee is higher than what was tried")
        if slow:
            warnings.append(f"the sender itself was slow at rates that failed ({', '.join(slow)} calls/s): the knee may be higher")
        sweep = Sweep(steps, search.knee, self._options.share)
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


def _write(path: Path, write: Callable[[Path, Result], None], result: Result) -> None:
    """Write a file; raises `InputError` naming it where it cannot be written to the end."""
    try:
        write(path, result)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def _step(rate: float, is_passed: bool, good: float, result: Result) -> Step:
    total = result.total
    rates = (total.requests_per_second, total.goodput)
    return Step(rate, is_passed, good, *rates, total.counts.failures, total.times)


def _is_sender_slow(result: Result) -> bool:
    return any(warning.startswith(SLOW_SENDER) for warning in result.warnings)


def _check_metrics(url: str) -> None:
    try:
        read_url(url)
    except UNREADABLE as error:
        raise InputError(f"--metrics: {url} cannot be read: {one_line(str(error), 200) or type(error).__name__}") from error
