"""How long a lone short request takes beside a full load of long ones: what whoever asks for little pays for what others ask.

    python -m benchmarks.lone --data data/multi30k [--source ../older]

Callers that each wait for their answer keep more long requests with beam search under way than there are slots for; beside them one
caller sends short greedy requests, one after the other. With `--source` an older checkout's server takes turns with ours, so that a
change which fills slots better is seen to cost a lone request nothing. Latency counts from sending to the answer.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.table import commit
from benchmarks.harness.load import Load, run
from benchmarks.harness.models import SHIPPED, bundle_by, bundle_of
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel
from benchmarks.harness.setting import Setting
from benchmarks.overload import percentile
from benchmarks.widened import widened_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_lines

NOW, BEFORE = "now", "before"
TOTAL_SLOTS, NUM_BEAMS = 64, 4
NUM_CALLERS = 2 * TOTAL_SLOTS // NUM_BEAMS
LONG_CAPTIONS = 3
NUM_SHORT = 200
SETTLE_SECONDS = 1.0
"""From the start of the full load, in which lone requests do not count."""
MAX_RATIO = 1.05
"""Of p99 now by p99 before that counts as not worse."""


@dataclass(slots=True)
class Side:
    """One server's figures, of all rounds.

    Attributes:
        seconds: Latencies of lone requests.
        rates: Answers a second of the full load, of each round.
        failures: Calls that were not answered.
    """

    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    failures: int = 0

    def row(self, name: str) -> dict[str, Any]:
        """Return the figures for the table."""
        rising = sorted(self.seconds)
        figures = {f"p{percent} ms": f"{percentile(rising, percent) * 1000:.1f}" for percent in (50, 95, 99)}
        row = {"server": name, "lone requests": len(rising), **figures}
        return row | {"full load/s": f"{median(self.rates):.1f}", "not answered": self.failures}


def texts(captions: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the full load's texts, several captions each, and the lone caller's, the shortest captions."""
    long = [" ".join(captions[i : i + LONG_CAPTIONS]) for i in range(0, len(captions), LONG_CAPTIONS)]
    return long, sorted(captions, key=len)[:NUM_SHORT]


def turn(side: Side, address: str, long: list[str], short: list[str], seconds: float, seed: int) -> None:
    """Put both loads on a server at the same time, and take in what came of them."""
    loads = (
        Load(address, long, NUM_BEAMS, seconds + SETTLE_SECONDS, concurrency=NUM_CALLERS, seed=seed),
        Load(address, short, 1, seconds + SETTLE_SECONDS, concurrency=1, seed=seed),
    )
    with ThreadPoolExecutor(len(loads)) as pool:
        full, lone = (record.outcomes for record in pool.map(run, loads))
    side.failures += sum(outcome.code != "OK" for outcome in [*full, *lone])
    side.seconds += [each.ended - each.sent for each in lone if each.code == "OK" and each.sent >= SETTLE_SECONDS]
    side.rates.append(sum(SETTLE_SECONDS <= each.ended <= seconds + SETTLE_SECONDS for each in full) / seconds)


def verdict(sides: Mapping[str, Side]) -> str:
    """Say whether a lone request is served no worse than before."""
    if BEFORE not in sides:
        return "There was no older server to compare with."
    now, before = (percentile(sorted(sides[name].seconds), 99) for name in (NOW, BEFORE))
    word = "kept" if now <= MAX_RATIO * before and not sides[NOW].failures else "MISSED"
    return f"- {word}: p99 is {now / before:.2f} times what it was (at most {MAX_RATIO:g})"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--model", choices=("en-de", "en-de-base"), default="en-de-base")
    parser.add_argument("--precision", choices=("int8", "fp32"), default="int8")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="Of all replicas.")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--source", type=Path, help="Older checkout whose server takes part, with a bundle by its own exporter.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="Of a turn.")
    arguments = parser.parse_args()
    long, short = texts(read_lines(arguments.data / "test_2016_flickr.en.gz"))
    checkpoint = Checkpoint.load(SHIPPED) if arguments.model == "en-de" else widened_checkpoint()
    count = arguments.replicas
    setting = Setting(count, arguments.threads // count, TOTAL_SLOTS // count, arguments.front_ends)
    servers = {NOW: ServedModel(bundle_of(checkpoint, arguments.cache, arguments.precision), *setting.flags())}
    if arguments.source:
        source = arguments.source.resolve()
        flags = Setting(1, arguments.threads, TOTAL_SLOTS).flags(source)
        servers[BEFORE] = ServedModel(bundle_by(source, checkpoint, arguments.cache, arguments.precision), *flags, source=source)
    sides = {name: Side() for name in servers}
    with ExitStack() as stack:
        running = {name: stack.enter_context(server) for name, server in servers.items()}
        for number in range(arguments.rounds):
            for name in running if number % 2 else reversed(running):
                turn(sides[name], running[name].address, long, short, arguments.seconds, number)
    about = environment("onnxruntime", "grpcio") | {"setting": str(setting), "rounds": arguments.rounds, "commit": commit()}
    about["latencies"] = {name: [round(seconds, 4) for seconds in side.seconds] for name, side in sides.items()}
    notes = [
        f"`{arguments.model}`, {arguments.precision}, {setting}: {NUM_CALLERS} callers with beam {NUM_BEAMS} on {LONG_CAPTIONS} "
        f"joined captions, twice what {TOTAL_SLOTS} slots decode at once, and beside them one caller with short captions, greedy. "
        f"{arguments.rounds} rounds of {arguments.seconds:g} s a side, in turns; sender and server on the same cores.",
        "",
        verdict(sides),
    ]
    if arguments.source:
        notes[0] += f" `{BEFORE}` is the server of commit {commit(arguments.source)}, with one engine and one front end."
    write("lone", "A lone short request beside a full load", about, [side.row(name) for name, side in sides.items()], notes)


if __name__ == "__main__":
    main()
