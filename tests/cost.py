"""CPU seconds of each test, its set-up and its ended children included, listed at the end of a run. They judge nothing."""

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

NUM_SHOWN = 10
TOTAL = "cpu_seconds"


def cpu_seconds() -> float:
    """Return the time of this process and its ended children, in user and system mode."""
    return sum(os.times()[:4])


class Cost:
    """Measures where tests run and adds up where the run is reported; without workers that is one process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # CPU seconds of each phase of a test, by its node id, and of workers that have ended.
        self._phases: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._workers: list[float] = []
        self._spent = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        before = cpu_seconds()
        try:
            yield
        finally:
            self._spent = cpu_seconds() - before

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Let the report of a phase carry its cost, to another process too."""
        report = yield
        report.cpu_seconds = self._spent
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases[report.nodeid][report.when] = getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[TOTAL] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers.append(getattr(node, "workeroutput", {}).get(TOTAL, 0.0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        costs = sorted(((sum(phases.values()), name) for name, phases in self._phases.items()), reverse=True)
        # A worker has told its own time; as an ended child of this process it would count twice.
        total = sum(self._workers) + sum(os.times()[:2]) if self._workers else cpu_seconds()
        of_tests = sum(cost for cost, _ in costs)
        terminalreporter.section(f"{total:.0f} CPU seconds, of which {of_tests:.0f} in {len(costs)} tests")
        for cost, name in costs[: int(self._config.getoption("--costs"))]:
            phases = ", ".join(f"{when} {spent:.1f}" for when, spent in self._phases[name].items() if spent >= 0.1)
            terminalreporter.line(f"{cost:7.1f}  {name}  {phases}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=int, default=NUM_SHOWN, metavar="N", help="name the N tests that took the most CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cost(config), "cost")
