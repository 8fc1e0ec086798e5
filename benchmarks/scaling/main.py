"""How step time, time to first token and memory grow with rows, with the length of sources and with that of answers.

    python -m benchmarks.scaling [--only fp32 int8] [--quick]

A random model of the size of Transformer-base, whose answers are as long as wanted, in engines that each have a process of their
own; precisions run in turns. A figure for each of the three goes beside the table.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.apart import Apart
from benchmarks.harness.models import base_checkpoint, bundle_of
from benchmarks.harness.report import environment, figure_name, write
from benchmarks.scaling.plot import draw
from benchmarks.scaling.probe import Probe, Trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.cores import available_cores

PRECISIONS = ("fp32", "int8")
WINDOW = 16
"""Steps that a figure of step time is the median of."""
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """One place of a sweep.

    Attributes:
        rows: Requests at once.
        source_tokens: Of each, end-of-sequence included.
        target_tokens: Of each answer.
    """

    rows: int
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is varied.

    Attributes:
        name: Of the field of `Point` that is varied.
        label: Of the axis.
        points: Rising, so that memory is at each what that point needs.
    """

    name: str
    label: str
    points: tuple[Point, ...]


def sweeps(is_quick: bool) -> list[Sweep]:
    """Return what to measure."""
    rows = (1, 8, 64) if is_quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    lengths = (16, 128) if is_quick else (16, 32, 64, 128, 256, 512)
    num_rows = 8 if is_quick else 32
    return [
        Sweep("rows", "rows", tuple(Point(count, 16, 32) for count in rows)),
        Sweep("source_tokens", "source tokens", tuple(Point(num_rows, length, 32) for length in lengths)),
        Sweep("target_tokens", "target tokens", tuple(Point(num_rows, 16, length) for length in lengths)),
    ]


def figures(traces: Sequence[Trace], point: Point) -> dict[str, float]:
    """Return what the rounds say of a point: medians, but memory as it was when the point was reached first."""
    steps = [trace.step_seconds[point.target_tokens - WINDOW : point.target_tokens] for trace in traces]
    return {
        "step ms": statistics.median(seconds for window in steps for seconds in window) * 1000,
        "first token ms": statistics.median(trace.first_token_seconds for trace in traces) * 1000,
        "memory MB": traces[0].resident_bytes[point.target_tokens - 1] / MEGABYTE,
    }


def measure(probes: Mapping[str, Apart], sweep: Sweep, num_rounds: int) -> list[dict[str, Any]]:
    """Measure one sweep; every precision in turns."""
    found: dict[tuple[str, Point], list[Trace]] = {(name, point): [] for point in sweep.points for name in probes}
    # A longer answer passes all the shorter ones' places: one run measures them all.
    runs = sweep.points[-1:] if sweep.name == "target_tokens" else sweep.points
    for _ in range(num_rounds):
        for run in runs:
            for name, probe in probes.items():
                trace: Trace = probe.call("trace", run.rows, run.source_tokens, run.target_tokens)
                for point in sweep.points if len(runs) == 1 else (run,):
                    found[name, point].append(trace)
    rows = []
    for (name, point), traces in found.items():
        about = {"varied": sweep.label, "precision": name, "rows": point.rows}
        about |= {"source tokens": point.source_tokens, "target tokens": point.target_tokens}
        rows.append(about | figures(traces, point))
    return sorted(rows, key=lambda row: (PRECISIONS.index(row["precision"]), row[sweep.label]))


def run(
    checkpoint: Checkpoint, precisions: Sequence[str], cache: Path, num_threads: int, num_rounds: int, is_quick: bool
) -> list[Any]:
    """Measure every sweep, each in fresh processes, so that memory of one is not counted in another; draw; return all rows."""
    bundles = {precision: bundle_of(checkpoint, cache, precision) for precision in precisions}
    rows: list[dict[str, Any]] = []
    for sweep in sweeps(is_quick):
        max_rows = max(point.rows for point in sweep.points)
        with ExitStack() as stack:
            probes = {name: stack.enter_context(Apart(Probe, bundle, max_rows, num_threads)) for name, bundle in bundles.items()}
            found = measure(probes, sweep, num_rounds)
        draw(report.RESULTS / figure_name(f"scaling_{sweep.name}"), sweep.label, found)
        for row in found:
            print(row, flush=True)
        rows += found
    return rows


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--threads", type=int, default=available_cores(), help="Threads of ONNX Runtime.")
    parser.add_argument("--only", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="Precisions.")
    parser.add_argument("--rounds", type=int, help="How often each point is measured.")
    parser.add_argument("--quick", action="store_true", help="Few points: to see that it works.")
    arguments = parser.parse_args()
    report.RESULTS.mkdir(exist_ok=True)
    num_rounds = arguments.rounds or (1 if arguments.quick else 3)
    about = environment("onnxruntime", "numpy") | {"threads": arguments.threads, "rounds": num_rounds, "is quick": arguments.quick}
    rows = run(base_checkpoint(), arguments.only, arguments.cache, arguments.threads, num_rounds, arguments.quick)
    write("scaling", "Growth of step time, time to first token and memory", about | {"figures": rows}, table(rows), notes(about))


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Round the figures."""
    formats = {"step ms": ".2f", "first token ms": ".1f", "memory MB": ".0f"}
    return [{key: format(value, formats[key]) if key in formats else value for key, value in row.items()} for row in rows]


def notes(about: Mapping[str, Any]) -> list[str]:
    """Say how to read the table."""
    return [
        f"Greedy search with {about['threads']} threads, all requests at once in an engine driven directly; medians of "
        f"{about['rounds']} rounds. `step ms` is a whole engine step at the last {WINDOW} target tokens; `first token ms` is from "
        "the moment all are submitted until the last one has its first token, so it holds the encoder's time for all of them; "
        "`memory MB` is by how much the process has grown since its model was loaded.",
        "",
        *(f"![{sweep.label}]({figure_name(f'scaling_{sweep.name}')})" for sweep in sweeps(is_quick=False)),
    ]
