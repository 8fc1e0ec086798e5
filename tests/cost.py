"""What the tests cost: the CPU seconds of each, set-up and ended children included, told at the end of a run.

It judges nothing. A suite grows slow a second at a time; whoever adds one sees it here, on however busy a machine.
"""

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

NUM_SHOWN = 10
TOTAL = "cpu_seconds"


def cpu_seconds() -> float:
    """Return what this process and its ended children have used, in user and system mode."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Cost:
    """Measures where tests run and adds up where the run is reported; without workers that is one process.

    Attributes:
        phases: CPU seconds of each test's set-up, call and tear-down, by its node id.
        workers: CPU seconds of workers that have ended.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.num_shown = int(config.getoption("--costs"))
        self.phases: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.workers: list[float] = []
        self._spent = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        yield from self._measure()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        yield from self._measure()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        yield from self._measure()

    def _measure(self) -> Generator[None, None, None]:
        before = cpu_seconds()
        try:
            yield
        finally:
            self._spent = cpu_seconds() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Let the report of a phase carry its cost, to another process too."""
        report = yield
        report.cpu_seconds = self._spent
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases[report.nodeid][report.when] = getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[TOTAL] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers.append(getattr(node, "workeroutput", {}).get(TOTAL, 0.0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costs = sorted(((sum(phases.values()), name) for name, phases in self.phases.items()), reverse=True)
        # A worker has told what it used; as an ended child of this process it would count twice.
        total = sum(self.workers) + sum(os.times()[:2]) if self.workers else cpu_seconds()
        of_tests = sum(cost for cost, _ in costs)
        terminalreporter.section(f"{total:.0f} CPU seconds, of which {of_tests:.0f} in {len(costs)} tests")
        for cost, name in costs[: self.num_shown]:
            phases = ", ".join(f"{when} {spent:.1f}" for when, spent in self.phases[name].items() if spent >= 0.1)
            terminalreporter.line(f"{cost:7.1f}  {name}  {phases}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=int, default=NUM_SHOWN, metavar="N", help="name the N tests that took the most CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cost(config), "cost")
