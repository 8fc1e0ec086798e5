"""Where the front end's processor time goes: µs a request by part, for each way to ask, before a change and after it.

    python -m benchmarks.front_end --data data/multi30k --bundle bundles/en-de [--before CHECKOUT] [--quick]

Real servers with a small model, one of each checkout, looked at while they work (`benchmarks.harness.sampled`); the sides take
turns, and of each the turn with the least processor time a request counts. What no file of ours is in is gRPC's, asyncio's and the
kernel's; its threads beside the first have a line of their own.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness.bulk_load import BulkLoad, Way, run
from benchmarks.harness.models import SHIPPED, bundle_by
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import START_SECONDS, STOP_SECONDS, cpu_seconds, environment_of, wait_for_event
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_lines

ROOT = Path(__file__).parents[1]
WAYS: Sequence[Way] = ("Generate", "GenerateBatch", "GenerateBulk")
POLL_SECONDS = 0.05
THREADS, WAITING = "gRPC's threads", "waiting"


class SampledServer:
    """The server of a checkout, with a sampler in its front end; a context manager.

    Attributes:
        address: Of its gRPC port.
        pid: Of the front end.
    """

    def __init__(self, checkout: Path, bundle: Path) -> None:
        """Describe it."""
        self._checkout, self._bundle = checkout.resolve(), bundle.resolve()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "models").mkdir()
        (folder / "models" / self._bundle.name).symlink_to(self._bundle)
        self._counts, log = folder / "counts", folder / "log"
        sampler = [sys.executable, str(ROOT / "benchmarks/harness/sampled.py"), str(self._counts)]
        flags = [
            *("serve", "--models", str(folder / "models"), "--host", "127.0.0.1", "--port", "0"),
            *("--http", "false", "--metrics-host", "127.0.0.1", "--metrics-port", "0", "--num-threads", "1"),
        ]
        with log.open("wb") as stream:
            environ = environment_of(self._checkout)
            self._process = subprocess.Popen([*sampler, *flags], stderr=stream, cwd=self._checkout, env=environ)
        try:
            self.address = f"127.0.0.1:{wait_for_event(self._process, log, 'serving', START_SECONDS)['port']}"
        except BaseException:
            self._stop(signal.SIGKILL)
            raise
        self.pid = self._process.pid
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop(signal.SIGTERM)

    def counts(self) -> dict[str, int]:
        """Return how often each part was met since the last time."""
        self._counts.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        while not self._counts.exists():
            time.sleep(POLL_SECONDS)
        parts: dict[str, int] = json.loads(self._counts.read_text())["parts"]
        return parts

    def main_seconds(self) -> float:
        """Return the processor time of the first thread."""
        fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stop(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side did in one turn: µs of processor time a request, all of it and by part, and requests a second."""

    total: float
    parts: Mapping[str, float]
    rate: float


def turn(server: SampledServer, texts: list[str], way: Way, seconds: float) -> Turn:
    """Put one load on a server."""
    server.counts()
    cpu, main = cpu_seconds(server.pid), server.main_seconds()
    record = run(BulkLoad(server.address, texts, way, seconds))
    total = (cpu_seconds(server.pid) - cpu) / record.num_answers * 1e6
    first = (server.main_seconds() - main) / record.num_answers * 1e6
    counts = {part: count for part, count in server.counts().items() if part != WAITING}
    parts = {part: first * count / sum(counts.values()) for part, count in counts.items()}
    return Turn(total, parts | {THREADS: total - first}, record.num_answers / record.wall_seconds)


def table(turns: Mapping[str, Turn]) -> list[dict[str, Any]]:
    """Return a row for each part, the largest first, and then all of it and the requests a second; a column for each side."""
    parts = {part for each in turns.values() for part in each.parts}
    ordered = sorted(parts, key=lambda part: -max(each.parts.get(part, 0.0) for each in turns.values()))
    rows: list[dict[str, Any]] = [
        {"part": part} | {side: round(each.parts.get(part, 0.0), 1) for side, each in turns.items()} for part in ordered
    ]
    rows.append({"part": "all"} | {side: round(each.total, 1) for side, each in turns.items()})
    rows.append({"part": "requests/s"} | {side: round(each.rate) for side, each in turns.items()})
    return rows


def measure(checkouts: Mapping[str, tuple[Path, Path]], texts: list[str], num_rounds: int, seconds: float) -> dict[str, Turn]:
    """Return the best turn of each checkout, which has a bundle, and way; a way that an older one may lack is left out."""
    best: dict[str, Turn] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(SampledServer(*checkout)) for name, checkout in checkouts.items()}
        sides = [(name, way) for name in servers for way in WAYS if name == "now" or way != "GenerateBulk"]
        for number in range(num_rounds + 1):
            for name, way in sides:
                done, side = turn(servers[name], texts, way, seconds), f"{name}: {way}"
                if number and (side not in best or done.total < best[side].total):  # the first round warms up
                    best[side] = done
    return best


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--before", type=Path, help="Another checkout, with en-de by its own exporter.")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each turn.")
    parser.add_argument("--quick", action="store_true", help="One round of two seconds each, and nothing is written.")
    arguments = parser.parse_args()
    num_rounds, seconds = (1, 2.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    texts = list(read_lines(arguments.data / "test_2016_flickr.en.gz"))
    checkouts = {"now": (ROOT, arguments.bundle)}
    if arguments.before:
        before = arguments.before.resolve()
        checkouts = {"before": (before, bundle_by(before, Checkpoint.load(SHIPPED), arguments.cache))} | checkouts
    rows = table(measure(checkouts, texts, num_rounds, seconds))
    if arguments.quick:
        print(*rows, sep="\n")
        return
    about = environment("grpcio", "protobuf", "pyzmq", "structlog", "prometheus-client")
    notes = [
        f"`{arguments.bundle.name}`, greedy, real captions, 64 requests under way, 16 a stream where there are streams; µs of the "
        f"front end's processor time a request. Of {num_rounds} turns of {seconds:g} s, the sides one after the other on the same "
        "cores as engine and sender, the one with the least counts. Parts are the first thread's, by samples.",
    ]
    write("front_end", "Where the front end's time goes", about, rows, notes)


if __name__ == "__main__":
    main()
