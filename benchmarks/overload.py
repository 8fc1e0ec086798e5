"""What a server does with more work than it can do: arrivals at 1, 2 and 5 times its capacity, most of which it has to refuse.

    python -m benchmarks.overload --data data/multi30k [--seconds 60]

A real server with one model and a short queue, and the load from a process of its own, on the same machine. Capacity is measured
first, with callers that wait for their answers; then arrivals come as a Poisson process, whatever has been answered. Latency counts
from the moment a request was due, so that a sender that is late hides nothing. There are no retries and no deadlines.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.table import commit
from benchmarks.harness.load import UNFINISHED, Load, Record, run
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel, cpu_seconds
from benchmarks.harness.setting import Setting
from dragoman.model.corpus import read_lines

BUNDLE = Path("bundles/en-de")
LOADS = (1, 2, 5)
MIN_COMPLETED, MAX_REJECTION_SECONDS = 0.9, 0.05
REJECTED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True, slots=True)
class Cores:
    """Processor time over wall time: of the sender, of all front ends, and of all engines."""

    sender: float
    front: float
    engine: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of one load.

    Attributes:
        factor: Arrivals in units of the capacity.
        offered: Arrivals a second.
        completed: Answers a second, those that came while requests were sent.
        rejected: Refusals a second.
        num_sent: Calls.
        codes: How many ended with which status.
        accepted_seconds: Latencies of the answers, rising.
        rejection_seconds: Latencies of the refusals, rising.
        lateness_seconds: How late requests were sent, rising.
        cores: See there.
    """

    factor: float
    offered: float
    completed: float
    rejected: float
    num_sent: int
    codes: Counter[str]
    accepted_seconds: list[float]
    rejection_seconds: list[float]
    lateness_seconds: list[float]
    cores: Cores

    @property
    def num_lost(self) -> int:
        """Calls that were neither answered nor refused: without a status, or with another one."""
        return self.num_sent - self.codes["OK"] - self.codes[REJECTED]

    def row(self, completed_at_capacity: float) -> dict[str, Any]:
        """Return the figures for the table."""
        others = {code: count for code, count in sorted(self.codes.items()) if code not in ("OK", REJECTED)}
        return {
            "load": f"{self.factor:g}×",
            "offered/s": f"{self.offered:.1f}",
            "completed/s": f"{self.completed:.1f}",
            "of 1×": f"{self.completed / completed_at_capacity:.1%}",
            "rejected/s": f"{self.rejected:.1f}",
            "sent": self.num_sent,
            "completed": self.codes["OK"],
            "rejected": self.codes[REJECTED],
            "lost": self.num_lost,
            "other codes": ", ".join(f"{code} {count}" for code, count in others.items()) or "none",
            "accepted p50 ms": _ms(self.accepted_seconds, 50),
            "p95 ms": _ms(self.accepted_seconds, 95),
            "p99 ms": _ms(self.accepted_seconds, 99),
            "rejection p50 ms": _ms(self.rejection_seconds, 50),
            "rejection p99 ms": _ms(self.rejection_seconds, 99),
            "sent late p99 ms": _ms(self.lateness_seconds, 99),
            "cores: sender": f"{self.cores.sender:.2f}",
            "front end": f"{self.cores.front:.2f}",
            "engine": f"{self.cores.engine:.2f}",
        }


def summarise(factor: float, seconds: float, record: Record, cores: Cores) -> Summary:
    """Count what came of a load."""
    outcomes = record.outcomes
    return Summary(
        factor=factor,
        offered=len(outcomes) / seconds,
        completed=sum(outcome.code == "OK" and outcome.ended <= seconds for outcome in outcomes) / seconds,
        rejected=sum(outcome.code == REJECTED for outcome in outcomes) / seconds,
        num_sent=len(outcomes),
        codes=Counter(outcome.code for outcome in outcomes),
        accepted_seconds=sorted(outcome.ended - outcome.due for outcome in outcomes if outcome.code == "OK"),
        rejection_seconds=sorted(outcome.ended - outcome.due for outcome in outcomes if outcome.code == REJECTED),
        lateness_seconds=sorted(outcome.sent - outcome.due for outcome in outcomes),
        cores=cores,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest of rising values that so many percent of them do not exceed."""
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def verdicts(summaries: Sequence[Summary], bound_seconds: float) -> list[str]:
    """Say of each promise whether it was kept.

    Args:
        summaries: By rising load.
        bound_seconds: The longest that a request may take that the queue had a place for.
    """
    first, last = summaries[0], summaries[-1]
    share = last.completed / first.completed
    rejection = max((percentile(s.rejection_seconds, 99) for s in summaries if s.rejection_seconds), default=0.0)
    accepted = max((percentile(s.accepted_seconds, 99) for s in summaries if s.accepted_seconds), default=0.0)
    num_lost = sum(summary.num_lost for summary in summaries)
    promises = [
        (share >= MIN_COMPLETED, f"completed at {last.factor:g}×: {share:.1%} of 1× (at least {MIN_COMPLETED:.0%})"),
        (
            rejection <= MAX_REJECTION_SECONDS,
            f"rejections: p99 {rejection * 1000:.1f} ms at the worst load (at most {MAX_REJECTION_SECONDS * 1000:.0f} ms)",
        ),
        (not num_lost, f"requests neither answered nor refused: {num_lost} (none)"),
        (
            accepted <= bound_seconds,
            f"accepted: p99 {accepted * 1000:.0f} ms at the worst load (at most {bound_seconds * 1000:.0f} ms, "
            "twice what a full queue and full slots take at capacity)",
        ),
    ]
    return [f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises]


def measure(server: ServedModel, load: Load) -> tuple[Record, Cores]:
    """Put one load on the server."""
    pids = server.processes()
    before = {name: cpu_seconds(*own) for name, own in pids.items()}
    record = run(load)
    used = [cpu_seconds(*own) - before[name] for name, own in pids.items()]
    return record, Cores(*(seconds / record.wall_seconds for seconds in (record.cpu_seconds, *used)))


def find_capacity(server: ServedModel, texts: list[str], num_beams: int, concurrency: int, seconds: float) -> float:
    """Return answers a second with `concurrency` callers; the first fifth of the time does not count."""
    record, _ = measure(server, Load(server.address, texts, num_beams, seconds, concurrency=concurrency))
    refused = Counter(outcome.code for outcome in record.outcomes if outcome.code != "OK")
    if refused:
        raise RuntimeError(f"with {concurrency} callers nothing should be refused: {dict(refused)}")
    num_counted = sum(seconds / 5 <= outcome.ended <= seconds for outcome in record.outcomes)
    if not num_counted:
        raise RuntimeError(f"nothing was answered within {seconds:g} s")
    return num_counted / (seconds * 4 / 5)


def _ms(values: Sequence[float], percent: int) -> str:
    return f"{percentile(values, percent) * 1000:.1f}" if values else "—"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="The result of another one has its name.")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="Of each load.")
    parser.add_argument("--max-slots", type=int, default=64)
    parser.add_argument("--max-waiting-requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="Of the engine; 0 leaves it to the server.")
    parser.add_argument("--pin", action="store_true", help="Give the engine cores of its own (pin_engines); needs --threads.")
    parser.add_argument("--replicas", type=int, default=1, help="Engines, which share the slots.")
    parser.add_argument("--front-ends", type=int, default=1)
    arguments = parser.parse_args()
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    num_beams, num_waiting = arguments.num_beams, arguments.max_waiting_requests
    num_running = arguments.max_slots // num_beams
    setting = Setting(arguments.replicas, arguments.threads, arguments.max_slots // arguments.replicas, arguments.front_ends)
    flags = [*setting.flags(), f"--max-waiting-requests={num_waiting}", f"--pin-engines={str(arguments.pin).lower()}"]
    about = environment("onnxruntime", "grpcio") | {"device": "cpu", "num_beams": num_beams, "seconds": arguments.seconds}
    about |= {"flags": flags, "commit": commit()}
    summaries: list[Summary] = []
    with ServedModel(arguments.bundle, *flags) as server:
        concurrency = num_running + num_waiting // 2
        capacity = find_capacity(server, texts, num_beams, concurrency, max(5.0, arguments.seconds / 3))
        for factor in LOADS:
            load = Load(server.address, texts, num_beams, arguments.seconds, rate=factor * capacity, seed=factor)
            summaries.append(summarise(factor, arguments.seconds, *measure(server, load)))
    about["capacity"] = capacity
    bound_seconds = 2 * (num_waiting + num_running) / capacity
    notes = [
        f"`{arguments.bundle.name}`, beam {num_beams} on cpu, {setting}, a queue of {num_waiting} requests; "
        f"capacity {capacity:.1f} requests/s, with {concurrency} callers. {arguments.seconds:g} s of each load, sender and "
        "server on the same cores. Latency counts from when a request was due; `lost` is everything that was neither answered "
        f"nor refused (a call without a status would be {UNFINISHED}). `cores` is processor time over wall time.",
        "",
        *verdicts(summaries, bound_seconds),
    ]
    rows = [summary.row(summaries[0].completed) for summary in summaries]
    write(result_name(arguments.bundle.name, setting), "Arrivals beyond capacity", about, rows, notes)


def result_name(bundle: str, setting: Setting) -> str:
    """Return the name of the result: other bundles than the usual one, and several processes, have results of their own."""
    parts = ["overload"] if bundle == BUNDLE.name else ["overload", bundle]
    if (setting.replicas, setting.front_ends) != (1, 1):
        parts.append(f"{setting.replicas}x{setting.front_ends}")
    return "-".join(parts)


if __name__ == "__main__":
    main()
