"""Usage of callers that frontend workers share: processes where that matters, tables of one process where it does not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.errors import InputError
from dragoman.server.buckets import Bucket
from dragoman.server.errors import LimitReached
from dragoman.server.service.callers import Caller, Callers
from dragoman.server.service.callers_file import read_book
from dragoman.server.telemetry.server_metrics import CallerMetrics
from dragoman.server.workers import shared_counters as tables
from dragoman.server.workers.shared_counters import UsageTable

ROOT = Path(__file__).resolve().parents[3]
NUM_FRONT_ENDS = 3


@pytest.fixture
def table() -> Iterator[UsageTable]:
    made = UsageTable.open(NUM_FRONT_ENDS)
    yield made
    made.close()


class World:
    """The callers of a file at each of the workers, and the time."""

    def __init__(self, table: UsageTable, path: Path) -> None:
        self.seconds = 1000.0
        self.path = path
        self.tables = [UsageTable(os.dup(table.descriptor), NUM_FRONT_ENDS, number) for number in range(NUM_FRONT_ENDS)]
        self.callers: list[Callers] = []

    def write(self, limits: str) -> None:
        self.path.write_text(f'[callers.web]\ntoken = "s3cret"\n{limits}\n[callers.other]\ntoken = "0ther"\n')
        self.callers = self.callers or [self.start(number) for number in range(NUM_FRONT_ENDS)]
        for callers in self.callers:
            callers.replace(read_book(self.path))

    def start(self, number: int) -> Callers:
        clock = lambda: self.seconds  # noqa: E731
        metrics = CallerMetrics()
        return Callers(read_book(self.path), metrics, clock=clock, wall_clock=clock, usage_of=self.tables[number].of)

    def at(self, number: int, token: str = "s3cret") -> Caller:
        return self.callers[number].identify([("authorization", f"Bearer {token}")])

    def limit(self, number: int, *, is_stream: bool = False) -> str | None:
        """Return the limit that keeps a request or a stream out at a worker; None if it was let in."""
        caller = self.at(number)
        try:
            caller.enter_stream() if is_stream else caller.enter()
        except LimitReached as error:
            return error.limit
        return None


@pytest.fixture
def world(table: UsageTable, tmp_path: Path) -> Iterator[World]:
    made = World(table, tmp_path / "callers.toml")
    yield made
    for each in made.tables:
        each.close()


# Limits, events at workers by number, and the limits that keep them out: `e` enters, `l` leaves, `s` and `S` a stream, `+` seconds.
SCENARIOS = [
    ("max_requests = 3", "e0 e1 e2 e0 l1 e2 e1", "- - - max_requests - max_requests"),
    ("max_requests = 1", "s0 s1 S0 s1", "- max_requests -"),
    ("requests_per_second = 2\nrequests_burst = 4", "e0 e1 e2 e0 e1 e2", "- - - - requests_per_second requests_per_second"),
    ("requests_per_second = 2\nrequests_burst = 2", "e0 e1 e2 +1 e0 e1 e2", "- - requests_per_second - - requests_per_second"),
    ("tokens_per_second = 10", "e0 t0 e1 +1.9 e2 +0.6 e2", "- tokens_per_second tokens_per_second -"),
    (
        "max_requests = 2\nrequests_per_second = 1\nrequests_burst = 3",
        "e1 s1 e0 e2 d1 e1 +1 e1 e2",
        "- - - max_requests requests_per_second - max_requests",
    ),
]


@pytest.mark.parametrize(("limits", "events", "outcomes"), SCENARIOS)
def test_limits_hold_for_all_workers_together(world: World, table: UsageTable, limits: str, events: str, outcomes: str) -> None:
    world.write(limits)
    found = []
    for event, value in ((each[0], each[1:]) for each in events.split()):
        if event == "+":
            world.seconds += float(value)
            continue
        number = int(value)
        if event in "es":
            found.append(world.limit(number, is_stream=event == "s") or "-")
        elif event == "l":
            world.at(number).leave(0)
        elif event == "S":
            world.at(number).leave_stream()
        elif event == "t":
            world.at(number).read(5)
            world.at(number).leave(25)
        else:  # a worker dies, and another one takes its place
            table.clear(number)
            world.callers[number] = world.start(number)
    assert found == outcomes.split()
    world.at(0, "0ther").enter()


def test_callers_have_a_record_each_up_to_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_CALLERS", 200)
    table = UsageTable.open(2)
    other = UsageTable(os.dup(table.descriptor), 2, 1)
    for number in range(200):
        with table.of(f"caller-{number}") as usage:
            usage.num_running += number
    for number in range(200):
        with other.of(f"caller-{number}") as usage:
            assert usage.num_running == number
    assert table.num_callers == 200
    with pytest.raises(InputError, match="more than 200 callers"):
        table.of("c")
    other.close()
    table.close()


PROGRAM = """
import sys
from dragoman.server.buckets import Bucket
from dragoman.server.workers.shared_counters import UsageTable

descriptor, num_front_ends, number, times = map(int, sys.argv[1:])
usage = UsageTable(descriptor, num_front_ends, number).of("web")
usage.tokens = Bucket(1e-9, 1e9, lambda: 1.0)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    with usage:
        usage.num_running += 1
        usage.tokens.take(1.0)
with usage:
    usage.num_running += 1000
    print("within", flush=True)
    sys.stdin.readline()
    usage.num_running -= 1000
"""


@contextmanager
def front_end(table: UsageTable, number: int, times: int = 0) -> Iterator[Any]:
    """Run a process that waits for a line, takes so many times, and waits for another line with the record locked."""
    arguments = [str(value) for value in (table.descriptor, NUM_FRONT_ENDS, number, times)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[table.descriptor], text=True, **pipes) as process:
        yield process
        process.stdin.close()


def test_nothing_is_lost_between_processes_and_a_killed_one_releases_its_lock(table: UsageTable) -> None:
    with front_end(table, 1) as process:
        process.stdin.write("go\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "within\n"]
        process.kill()
        process.wait(60)
        with table.of("web") as usage:
            assert usage.num_running == 0, "the process has not released it"
    times = 1000
    with ExitStack() as stack:
        processes = [stack.enter_context(front_end(table, number, times)) for number in range(NUM_FRONT_ENDS)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * NUM_FRONT_ENDS
        for process in processes:
            process.stdin.write("go\ngo on\n")
            process.stdin.flush()
        assert [process.stdout.readline() for process in processes] == ["within\n"] * NUM_FRONT_ENDS
    assert [process.wait(60) for process in processes] == [0] * NUM_FRONT_ENDS
    usage = table.of("web")
    usage.tokens = Bucket(1e-9, 1e9, lambda: 1.0)
    with usage:
        assert usage.num_running == NUM_FRONT_ENDS * times
        assert usage.tokens.level == pytest.approx(1e9 - NUM_FRONT_ENDS * times, abs=1e-3)
