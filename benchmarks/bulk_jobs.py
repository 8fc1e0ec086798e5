"""Bulk jobs at length: a Ray cluster of four nodes, one of which ends and one comes, beside the same job without; and memory.

    python -m benchmarks.bulk_jobs [--parts cluster memory] [--cluster-rows 20000] [--memory-rows 1000000]

All nodes of the cluster are on this machine, with an engine of one thread each; the local job has an engine of one thread on each
core. Outputs are compared byte by byte. Memory is that of all processes of a local job on short lines that are all different.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bulk import MAX_NEW_TOKENS, lines
from benchmarks.harness.models import add_model_options, chosen_bundle
from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import memory_mib
from dragoman.bulk.job import MANIFEST_SUFFIX
from dragoman.server.system import available_cores

NUM_NODES, ROWS_PER_SHARD = 4, 500
KILLED_AT, ADDED_AT = 0.3, 0.6  # parts of the rows
MEMORY_SHARD, MEMORY_READINGS = 5000, 10

# Called with the part of the shards that are done.
Watch = Callable[[float], None]


def run(
    bundle: Path, source: Path, out: Path, num_rows: int, rows_per_shard: int, *options: object, watch: Watch | None = None
) -> float:
    """Run a job and return its seconds."""
    arguments = ["bulk", source, "--output", out, "--model", bundle, "--rows-per-shard", rows_per_shard, "--num-threads", 1]
    arguments += ["--max-new-tokens", MAX_NEW_TOKENS, *options]
    started = time.perf_counter()
    command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    num_shards = -(-num_rows // rows_per_shard)
    if watch is not None:
        while process.poll() is None:
            watch(sum(1 for _ in out.rglob(f"*{MANIFEST_SUFFIX}")) / num_shards)
            time.sleep(0.2)
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{errors[-2000:]}")
    return time.perf_counter() - started


def files(folder: Path) -> dict[str, bytes]:
    """Return a job's outputs and manifests."""
    found = [path for path in folder.rglob("part-*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@contextmanager
def cluster_of_nodes() -> Iterator[Any]:
    """Yield a Ray cluster on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(NUM_NODES - 1):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def disturbance(cluster: Any) -> Watch:
    """Return what ends a node without a warning, and adds one later."""
    left: list[tuple[float, Callable[[], object]]] = [
        (KILLED_AT, lambda: cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)),
        (ADDED_AT, lambda: cluster.add_node(num_cpus=1)),
    ]

    def watch(share: float) -> None:
        while left and share >= left[0][0]:
            left.pop(0)[1]()

    return watch


def measure_cluster(arguments: argparse.Namespace, bundle: Path, source: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the seconds of jobs in turns: without a cluster, with one, and with one that loses and gains a node."""
    job = bundle, source
    sides = ("local", "cluster", "cluster, disturbed")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    same = dict.fromkeys(sides, 0)
    expected: dict[str, bytes] = {}
    for number, side in itertools.product(range(arguments.rounds), sides):
        out = folder / f"{side}-{number}"
        sizes = arguments.cluster_rows, ROWS_PER_SHARD
        if side == "local":
            seconds[side].append(run(*job, out, *sizes, "--engines", available_cores()))
        else:
            with cluster_of_nodes() as cluster:
                watch = disturbance(cluster) if "disturbed" in side else None
                seconds[side].append(run(*job, out, *sizes, "--ray", cluster.address, watch=watch))
        expected = expected or files(out)
        same[side] += files(out) == expected
        print(side, round(seconds[side][-1], 1), "same" if files(out) == expected else "DIFFERENT", flush=True)
    rows: list[dict[str, Any]] = []
    for side in sides:
        ratios = [own / local for own, local in zip(seconds[side], seconds["local"], strict=True)]
        each = {"job": side, "rows": f"{arguments.cluster_rows:,}", "seconds": f"{statistics.median(seconds[side]):.1f}"}
        rows.append(each | {"÷ local": f"{statistics.median(ratios):.2f}", "byte-identical": f"{same[side]} of {arguments.rounds}"})
    return rows


def measure_memory(arguments: argparse.Namespace, bundle: Path, source: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the memory of a job's processes over its rows."""
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()

    def watch(share: float) -> None:
        job, *others = [*sorted(_processes(os.getpid())), (0, 0.0)]
        if share * MEMORY_READINGS >= len(rows) + 1 and len(others) > available_cores():
            row = {"rows": f"{share * arguments.memory_rows:,.0f}", "seconds": f"{time.perf_counter() - started:.0f}"}
            row |= {"job, MiB": f"{job[1]:.0f}", "engines, MiB": ", ".join(f"{mib:.0f}" for _, mib in others if mib > 50)}
            rows.append(row)
            print(row, flush=True)

    run(bundle, source, folder / "memory", arguments.memory_rows, MEMORY_SHARD, "--engines", available_cores(), watch=watch)
    return rows


def _processes(parent: int) -> Iterator[tuple[int, float]]:
    """Yield identifier and resident MiB of a process's descendants."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in map(int, (task / "children").read_text(encoding="ascii").split()):
            try:
                yield child, memory_mib(child)["rss"]
                yield from _processes(child)
            except (OSError, KeyError):  # it has just ended
                continue


def main() -> None:
    """Measure the chosen parts and write the page."""
    found = parser(__doc__)
    add_model_options(found, "en-de-base", "int8")
    found.add_argument("--parts", nargs="+", choices=("cluster", "memory"), default=["cluster", "memory"])
    found.add_argument("--cluster-rows", type=int, default=20_000)
    found.add_argument("--memory-rows", type=int, default=1_000_000)
    found.add_argument("--rounds", type=int, default=1, help="Of the cluster's jobs.")
    arguments = found.parse_args()
    if arguments.quick:
        arguments.cluster_rows, arguments.memory_rows = 4 * ROWS_PER_SHARD, 2 * MEMORY_SHARD
    bundle = chosen_bundle(arguments)
    page = Page("bulk-jobs", "Jobs", output(arguments), ("onnxruntime", "ray"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "lines.txt"
        if "cluster" in arguments.parts:
            texts = itertools.islice(lines(arguments.data), arguments.cluster_rows)
            source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            rows = measure_cluster(arguments, bundle, source, Path(folder))
            notes = [
                f"{NUM_NODES} nodes of one CPU each on {available_cores()} cores, so the cluster has more engines to load than the "
                f"local job, beside Ray's own processes; starts are in the times. The disturbed cluster loses a node at "
                f"{KILLED_AT:.0%} and gets one at {ADDED_AT:.0%} of the rows. Shards of {ROWS_PER_SHARD} rows."
            ]
            page.write("cluster", rows, notes)
        if "memory" in arguments.parts:
            source.write_text("".join(f"a dog {number}\n" for number in range(arguments.memory_rows)), encoding="utf-8")
            notes = [
                "Resident memory, mapped files included. Every engine keeps up to 64 MiB of answers for equal rows; none are here."
            ]
            page.write("memory", measure_memory(arguments, bundle, source, Path(folder)), notes)


if __name__ == "__main__":
    main()
