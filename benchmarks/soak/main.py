"""A mixed soak at 80 % of capacity: nothing may be lost, no slot leak, nothing grow, and no answer change.

    python -m benchmarks.soak --data data/multi30k [--minutes 10] [--replicas 2 --front-ends 2 --kill]

One server. Two `dragoman load`s send unary calls, streams and batches, greedy, beams and samples, cancelled calls, short deadlines,
slow readers and malformed requests; callers of our own score, send what is no message, and break connections; reference sentences
are translated all the while. With `--kill` one of several engines and one of several front ends are killed meanwhile. The exit
code is 1 if a promise was not kept.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines.table import commit
from benchmarks.harness import report
from benchmarks.harness.load_command import LoadCommand
from benchmarks.harness.replica import Replica
from benchmarks.harness.report import environment, figure_name, write
from benchmarks.harness.setting import Setting
from benchmarks.soak.callers import Callers, Count
from benchmarks.soak.kills import RETRIES, kill, victims, wait_until_back, watched
from benchmarks.soak.plot import draw
from benchmarks.soak.references import References
from benchmarks.soak.soaked import IDLE, Soaked, verdicts
from benchmarks.soak.watch import MEASURES, Watch, trend
from dragoman.load.result import Result
from dragoman.load.scrape import parse, read_url
from dragoman.model.corpus import read_lines

LOAD = 0.8
NUM_CALLERS = 48
SLOTS = 64
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


def read_metrics(replica: Replica) -> dict[str, float]:
    """Return the server's metrics, summed over labels."""
    return parse(read_url(f"http://{replica.metrics_address}/metrics"))


def wait_idle(replica: Replica) -> dict[str, float]:
    """Return the metrics as soon as nothing is left, or after a while as they are then."""
    until = time.monotonic() + IDLE_SECONDS
    while any(found.get(name) != 0 for found in [read_metrics(replica)] for name in IDLE) and time.monotonic() < until:
        time.sleep(0.2)
    return read_metrics(replica)


async def soak(replica: Replica, lines: Sequence[str], texts: Path, seconds: float, *, has_kills: bool = False) -> Soaked:
    """Measure the capacity, and put everything on the server at once for so long; kill processes meanwhile if told to."""
    processes = replica.processes()
    doomed = victims(processes, replica.front_pid) if has_kills else []
    retries = (f"--retries={RETRIES}",) if doomed else ()
    references = References(replica.address, lines[:6])
    address = (f"--server={replica.address}", f"--in={texts}", "--warmup=0", MIX, f"--batch-size={BATCH_SIZE}", *retries)
    watch = Watch(watched(processes, doomed), max(1.0, seconds / 600))
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
            killing = asyncio.create_task(kill(doomed, seconds))
            soaked.loads, soaked.counts = await _together(replica, references, sending, lines, seconds)
            await killing
        soaked.killed = doomed
        soaked.is_whole = wait_until_back(replica, {role: len(pids) for role, pids in processes.items()})
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
    parser.add_argument("--threads", type=int, default=1, help="Of each engine.")
    parser.add_argument("--replicas", type=int, default=1, help="Engines.")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="Kill one of several engines, and one of several front ends.")
    arguments = parser.parse_args()
    setting = Setting(arguments.replicas, arguments.threads, SLOTS, arguments.front_ends)
    name = "soak" if (arguments.replicas, arguments.front_ends) == (1, 1) else f"soak-{arguments.replicas}x{arguments.front_ends}"
    lines = read_lines(arguments.data / "test_2016_flickr.en.gz")
    about = environment("onnxruntime", "grpcio") | {"minutes": arguments.minutes, "load": LOAD, "flags": setting.flags()}
    about["commit"] = commit()
    with tempfile.TemporaryDirectory() as folder, Replica(arguments.bundle, *setting.flags()) as replica:
        texts = Path(folder) / "texts"
        texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        replica.start()
        soaked = asyncio.run(soak(replica, lines, texts, arguments.minutes * 60, has_kills=arguments.kill))
        code = replica.terminate()
    promises = [*verdicts(soaked), (code == 0, f"exit code after SIGTERM: {code}")]
    about |= {"capacity": soaked.capacity, "resources": _resources(soaked)}
    report.RESULTS.mkdir(exist_ok=True)
    draw(report.RESULTS / figure_name(name), soaked.readings)
    write(name, "Soak", about, soaked.rows(), _notes(arguments, soaked, promises, setting, name))
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


def _notes(
    arguments: argparse.Namespace, soaked: Soaked, promises: Sequence[tuple[bool, str]], setting: Setting, name: str
) -> list[str]:
    table = ["| process | measure | first third | last third | slope an hour |", "|---|---|---|---|---|"]
    for (process, measure), each in soaked.trends.items():
        table.append(f"| {process} | {measure} | {each.before:.1f} | {each.after:.1f} | {each.per_hour:+.1f} |")
    capacity = sum(soaked.capacity.values())
    return [
        f"`{arguments.bundle.name}`, {setting}, {arguments.minutes:g} minutes at {LOAD:.0%} of the {capacity:.0f} "
        f"requests/s that {NUM_CALLERS} callers who wait got, everything else going on beside; the senders on the same cores. "
        "Requests of a batch count by themselves. A request that misbehaved may be answered all the same; what must not be is "
        "unexpected.",
        "",
        "After the first quarter of the time; of each third the low end, which a tenth of the readings do not exceed:",
        "",
        *table,
        "",
        f"![]({figure_name(name)})",
        "",
        *(f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises),
    ]
