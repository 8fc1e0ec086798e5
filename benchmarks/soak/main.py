"""A mixed soak at 80 % of capacity: nothing may be lost, no slot leak, nothing grow, and no answer change.

    python -m benchmarks.soak --data data/multi30k [--minutes 10]

One server. Two `dragoman load`s send unary calls, streams and batches, greedy, beams and samples, cancelled calls, short deadlines,
slow readers and malformed requests; callers of our own score, send what is no message, and break connections; reference sentences
are translated all the while. The exit code is 1 if a promise was not kept.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.load_command import LoadCommand
from benchmarks.harness.replica import Replica
from benchmarks.harness.report import environment, figure_name, write
from benchmarks.soak.callers import Callers, Count
from benchmarks.soak.plot import draw
from benchmarks.soak.references import References
from benchmarks.soak.watch import MEASURES, Reading, Trend, Watch, trend
from dragoman.load.result import Result
from dragoman.load.scrape import parse, read_url
from dragoman.model.corpus import read_lines

LOAD = 0.8
NUM_CALLERS = 48
BATCH_SIZE, BATCH_SHARE = 4, 0.1
MIX = f"--mix=unary=0.6,stream=0.3,batch={BATCH_SHARE}"
LOADS: dict[str, tuple[float, tuple[str, ...]]] = {
    "greedy and beams": (0.85, ("--num-beams=1=0.7,4=0.3",)),
    "samples": (0.15, ("--sample", "--top-p=0.9", "--num-return-sequences=2")),
}
"""Share of the callers that measure the capacity, and the searches."""
WRONG = ("--cancel-share=0.05", "--deadline-share=0.05", "--slow-share=0.05", "--malformed-share=0.05")
REQUESTS_A_CALL = 1 - BATCH_SHARE + BATCH_SHARE * BATCH_SIZE
IDLE_SECONDS = 15.0
# The watched gauges that must be zero once nothing is asked any more, and the count that must never move.
IDLE = ("dragoman_num_requests_running", "dragoman_num_requests_waiting", "dragoman_slots_in_use")
RESTARTS, ANSWERED = "dragoman_engine_restarts_total", "dragoman_request_success_total"


@dataclass(slots=True)
class Soaked:
    """What came of it.

    Attributes:
        capacity: Requests a second of each load with callers that wait, everything else going on beside.
        loads: Reports of the load generator.
        counts: Of our own callers.
        num_different: Reference answers that were not the first one's bytes.
        num_compared: Reference answers.
        reference_failures: Reference sentences without an answer, by status.
        trends: By process and measure; empty where too little was read.
        readings: Of the server's processes, by name.
        watch_failures: Readings that failed.
        before: Metrics of the server before.
        after: The same, after everything had ended.
    """

    capacity: dict[str, float]
    loads: dict[str, Result] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    num_different: int = 0
    num_compared: int = 0
    reference_failures: dict[str, int] = field(default_factory=dict)
    trends: dict[tuple[str, str], Trend] = field(default_factory=dict)
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    watch_failures: list[str] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: how the requests of each kind ended."""
        rows = []
        for title, result in self.loads.items():
            for name, group in result.groups.items():
                counts = group.counts
                ended = {"OK": counts.num_ok, **counts.intended, **counts.failures}
                rows.append(_row(f"{name}, {title}", counts.num, ended, counts.failures))
        for name, count in self.counts.items():
            rows.append(_row(name, count.num_begun, count.ended, count.unexpected, count.num_lost))
        return rows

    def num_lost(self) -> int:
        """Return how many requests never ended, or did without a status."""
        of_loads = sum(
            group.counts.num - group.counts.num_ok - sum(group.counts.intended.values()) - sum(group.counts.failures.values())
            for result in self.loads.values()
            for group in result.groups.values()
        )
        return of_loads + sum(count.num_lost for count in self.counts.values())

    def num_unexpected(self) -> int:
        """Return how many ended otherwise than they may."""
        of_loads = sum(result.total.num_failed for result in self.loads.values())
        of_callers = sum(sum(count.unexpected.values()) for count in self.counts.values())
        return of_loads + of_callers + sum(self.reference_failures.values())


def _row(kind: str, num: int, ended: dict[str, int] | Any, unexpected: dict[str, int], num_lost: int = 0) -> dict[str, Any]:
    listed = ", ".join(f"{count} {code}" for code, count in sorted(ended.items()) if count)
    wrong = ", ".join(f"{count} {code}" for code, count in sorted(unexpected.items()))
    return {"requests": kind, "sent": num, "ended": listed, "unexpected": wrong or "none", "lost": num_lost}


def verdicts(soaked: Soaked) -> list[tuple[bool, str]]:
    """Say of each promise whether it was kept."""
    left = {name: soaked.after.get(name) for name in IDLE}
    restarts = soaked.after.get(RESTARTS, -1.0)
    answered, least, most = answers(soaked)
    found = [
        (not soaked.num_lost(), f"requests that never ended: {soaked.num_lost()}"),
        (not soaked.num_unexpected(), f"requests that ended with an unexpected status: {soaked.num_unexpected()}"),
        (least <= answered <= most, f"answers by the server's count: {answered}, by the callers' {least} to {most}"),
        (
            all(value == 0 for value in left.values()),
            "left over: " + ", ".join(f"{k.removeprefix('dragoman_')} {v}" for k, v in left.items()),
        ),
        (restarts == 0, f"engine restarts: {restarts:.0f}"),
        (
            not soaked.num_different and soaked.num_compared > 0,
            f"reference answers that differed: {soaked.num_different} of {soaked.num_compared}",
        ),
        (not soaked.watch_failures and bool(soaked.trends), f"failed readings of processes: {len(soaked.watch_failures)}"),
    ]
    for (process, measure), each in soaked.trends.items():
        text = f"{process}, {measure}: {each.before:.1f} to {each.after:.1f} (growth of at most {each.allowed:.1f})"
        found.append((each.is_flat, text))
    return found


def answers(soaked: Soaked) -> tuple[int, int, int]:
    """Return answers that the server counted, and the fewest and the most it may have, by the callers' counts.

    A call that was cancelled, late or cut off may have been answered all the same.
    """
    counted = round(soaked.after.get(ANSWERED, 0.0) - soaked.before.get(ANSWERED, 0.0))
    groups = [group.counts for result in soaked.loads.values() for group in result.groups.values()]
    least = sum(group.num_ok for group in groups) + sum(count.ended["OK"] for count in soaked.counts.values())
    least += soaked.num_compared
    open_ended = sum(sum(group.failures.values()) + sum(group.intended.values()) for group in groups)
    open_ended += sum(count.num_begun - count.ended["OK"] for count in soaked.counts.values())
    return counted, least, least + open_ended


def read_metrics(replica: Replica) -> dict[str, float]:
    """Return the server's metrics, summed over labels."""
    return parse(read_url(f"http://{replica.metrics_address}/metrics"))


def wait_idle(replica: Replica) -> dict[str, float]:
    """Return the metrics as soon as nothing is left, or after a while as they are then."""
    until = time.monotonic() + IDLE_SECONDS
    while any(found.get(name) != 0 for found in [read_metrics(replica)] for name in IDLE) and time.monotonic() < until:
        time.sleep(0.2)
    return read_metrics(replica)


async def soak(replica: Replica, lines: Sequence[str], texts: Path, seconds: float) -> Soaked:
    """Measure the capacity, and put everything on the server at once for so long."""
    references = References(replica.address, lines[:6])
    address = (f"--server={replica.address}", f"--in={texts}", "--warmup=0", MIX, f"--batch-size={BATCH_SIZE}")
    watch = Watch({"front end": replica.front_pid, "engine": replica.engine_pid}, max(1.0, seconds / 600))
    async with references:
        await references.translate()
        short = min(30.0, max(5.0, seconds / 10))
        waiting = {
            title: [*address, *flags, f"--concurrency={round(NUM_CALLERS * share)}"] for title, (share, flags) in LOADS.items()
        }
        results = await _together(replica, references, waiting, lines, short)
        soaked = Soaked({title: result.total.requests_per_second for title, result in results[0].items()})
        await asyncio.sleep(1)
        soaked.before, num_before = wait_idle(replica), references.num_translated
        rates = {title: soaked.capacity[title] * LOAD / REQUESTS_A_CALL for title in LOADS}
        sending = {title: [*address, *WRONG, *flags, f"--rate={rates[title]:g}"] for title, (_, flags) in LOADS.items()}
        with watch:
            soaked.loads, soaked.counts = await _together(replica, references, sending, lines, seconds)
        await references.translate()
    soaked.num_compared = references.num_translated - num_before
    soaked.num_different, soaked.reference_failures = references.num_different, dict(references.failures)
    soaked.after, soaked.readings, soaked.watch_failures = wait_idle(replica), watch.readings, watch.failures
    soaked.trends = {(name, measure): trend(own, measure) for name, own in watch.readings.items() for measure in MEASURES}
    return soaked


async def _together(
    replica: Replica, references: References, loads: dict[str, list[str]], lines: Sequence[str], seconds: float
) -> tuple[dict[str, Result], dict[str, Count]]:
    """Run some loads, our own callers and the references beside each other; return what came of the loads and the callers."""
    callers, stopping = Callers(replica.address, lines), asyncio.Event()
    with ExitStack() as stack:
        commands = [stack.enter_context(LoadCommand(*flags, f"--duration={seconds:g}")) for flags in loads.values()]
        others = [asyncio.create_task(each) for each in (callers.run(1.0, stopping), references.run(3.0, stopping))]
        results = await asyncio.gather(*(asyncio.to_thread(command.wait, seconds + 150) for command in commands))
        stopping.set()
        await asyncio.gather(*others)
    return dict(zip(loads, results, strict=True)), callers.counts


def main() -> None:
    """Soak and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1, help="Of the engine.")
    arguments = parser.parse_args()
    lines = read_lines(arguments.data / "test_2016_flickr.en.gz")
    about = environment("onnxruntime", "grpcio") | {"minutes": arguments.minutes, "load": LOAD, "threads": arguments.threads}
    with tempfile.TemporaryDirectory() as folder, Replica(arguments.bundle, f"--num-threads={arguments.threads}") as replica:
        texts = Path(folder) / "texts"
        texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        replica.start()
        soaked = asyncio.run(soak(replica, lines, texts, arguments.minutes * 60))
        code = replica.terminate()
    promises = [*verdicts(soaked), (code == 0, f"exit code after SIGTERM: {code}")]
    about |= {"capacity": soaked.capacity, "resources": _resources(soaked)}
    report.RESULTS.mkdir(exist_ok=True)
    draw(report.RESULTS / figure_name("soak"), soaked.readings)
    write("soak", "Soak", about, soaked.rows(), _notes(arguments, soaked, promises))
    sys.exit(not all(is_kept for is_kept, _ in promises))


def _resources(soaked: Soaked) -> dict[str, Any]:
    return {
        process: {
            "at": [round(reading.at, 1) for reading in readings],
            **{measure: [round(reading.values[measure], 1) for reading in readings] for measure in MEASURES},
            "per_hour": {measure: soaked.trends[process, measure].per_hour for measure in MEASURES},
        }
        for process, readings in soaked.readings.items()
    }


def _notes(arguments: argparse.Namespace, soaked: Soaked, promises: Sequence[tuple[bool, str]]) -> list[str]:
    table = ["| process | measure | first third | last third | slope an hour |", "|---|---|---|---|---|"]
    for (process, measure), each in soaked.trends.items():
        table.append(f"| {process} | {measure} | {each.before:.1f} | {each.after:.1f} | {each.per_hour:+.1f} |")
    capacity = sum(soaked.capacity.values())
    return [
        f"`{arguments.bundle.name}`, {arguments.threads} thread, {arguments.minutes:g} minutes at {LOAD:.0%} of the {capacity:.0f} "
        f"requests/s that {NUM_CALLERS} callers who wait got, everything else going on beside; the senders on the same cores. "
        "Requests of a batch count by themselves. A request that misbehaved may be answered all the same; what must not be is "
        "unexpected.",
        "",
        "After the first quarter of the time; of each third the low end, which a tenth of the readings do not exceed:",
        "",
        *table,
        "",
        f"![]({figure_name('soak')})",
        "",
        *(f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises),
    ]
