"""Bulk work beside other things: jobs on a Ray cluster that loses and gains a node, memory, batch files beside other requests.

    python -m benchmarks.bulk_jobs [--parts cluster memory batch] [--cluster-rows 20000] [--memory-rows 1000000] [--rounds 1]

- `cluster`: all nodes are on this machine, with an engine of one thread each; the local job has one for each core, or as many as
  the cluster. Outputs are compared byte by byte.
- `memory`: of all processes of a local job on short lines that are all different.
- `batch`: latency of requests at Poisson arrivals alone and beside a batch of 50,000 lines (`POST /v1/batches`), in turns.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.bulk import MAX_NEW_TOKENS, lines
from benchmarks.harness.load import Load, percentile
from benchmarks.harness.models import add_model_options, chosen_bundle
from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import Dragoman, dragoman, memory_mib
from dragoman.bulk.job import MANIFEST_SUFFIX
from dragoman.server.system import available_cores
from tests.system.harness.server import descendants, is_running

NUM_NODES, ROWS_PER_SHARD = 4, 500
KILLED_AT, ADDED_AT = 0.3, 0.6  # parts of the rows
MEMORY_SHARD, MEMORY_READINGS, MEMORY_TOKENS = 5000, 10, 8
PARTS = ("cluster", "memory", "batch")
BATCH_LINES, RATES, HTTP = 50_000, (3, 10), "HTTP/JSON"

# Called with the part of the shards that are done.
Watch = Callable[[float], None]


def run(
    bundle: Path, source: Path, out: Path, num_rows: int, rows_per_shard: int, *options: object, watch: Watch | None = None
) -> float:
    """Run a job and return its seconds."""
    arguments = ["bulk", source, "--output", out, "--model", bundle, "--rows-per-shard", rows_per_shard, "--num-threads", 1]
    arguments += options
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
    engines = {"local": available_cores(), f"local, {NUM_NODES} engines": NUM_NODES}
    job = bundle, source
    common = "--max-new-tokens", MAX_NEW_TOKENS
    sides = (*engines, "cluster", "cluster, disturbed")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    same = dict.fromkeys(sides, 0)
    expected: dict[str, bytes] = {}
    for number, side in itertools.product(range(arguments.rounds), sides):
        out = folder / f"{side}-{number}"
        sizes = arguments.cluster_rows, ROWS_PER_SHARD
        if side in engines:
            seconds[side].append(run(*job, out, *sizes, *common, "--engines", engines[side]))
        else:
            with cluster_of_nodes() as cluster:
                watch = disturbance(cluster) if "disturbed" in side else None
                seconds[side].append(run(*job, out, *sizes, *common, "--ray", cluster.address, watch=watch))
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
        if share * MEMORY_READINGS < len(rows) + 1:
            return
        with suppress(OSError, KeyError):  # at the end, when one has just ended
            _, job, *others = (memory_mib(pid)["rss"] for pid in descendants(os.getpid()) if is_running(pid))
            if not (engines := [mib for mib in others if mib > 50]):
                return
            row = {"rows": f"{share * arguments.memory_rows:,.0f}", "seconds": f"{time.perf_counter() - started:.0f}"}
            row |= {"job, MiB": f"{job:.0f}", "engines, MiB": ", ".join(f"{mib:.0f}" for mib in engines)}
            rows.append(row)
            print(row, flush=True)

    options = "--max-new-tokens", MEMORY_TOKENS, "--engines", available_cores()
    run(bundle, source, folder / "memory", arguments.memory_rows, MEMORY_SHARD, *options, watch=watch)
    return rows


def measure_batch(arguments: argparse.Namespace, bundle: Path, folder: Path) -> list[dict[str, Any]]:
    """Return latencies of requests alone and beside a batch, by their rate."""
    texts = list(itertools.islice(lines(arguments.data), BATCH_LINES))
    rows: list[dict[str, Any]] = []
    flags = f"--batch-folder={folder / 'batches'}", "--result-cache-mib=0"
    with dragoman(bundle, *flags, has_http=True) as server:
        client = OpenAI(base_url=f"{server.address(HTTP)}/v1", api_key="none")
        for rate in RATES:
            found: dict[bool, list[float]] = {False: [], True: []}
            num_lines = 0
            for number in range(2 * arguments.batch_rounds):
                is_beside = number % 4 in (1, 2)  # alone first in one round, last in the next
                load = Load(texts, seconds=arguments.batch_seconds, rate=rate, seed=number // 2)
                batch = begin_batch(client, server, texts) if is_beside else None
                record, _ = server.run(load, HTTP)
                found[is_beside] += record.check().latencies()
                if batch is not None:
                    num_lines += counts.completed if (counts := client.batches.retrieve(batch).request_counts) else 0
                    client.batches.cancel(batch)
                    while client.batches.retrieve(batch).status != "cancelled":
                        time.sleep(0.2)
            row: dict[str, Any] = {"requests a second": rate, "requests": len(found[False])}
            for percent in (50, 90, 99):
                alone, beside = (1000 * percentile(sorted(each), percent) for each in found.values())
                row |= {f"p{percent} alone, ms": f"{alone:.1f}", f"p{percent} beside ÷": f"{beside / alone:.2f}"}
            rows.append(row | {"lines a second": f"{num_lines / arguments.batch_seconds / arguments.batch_rounds:.1f}"})
            print(rows[-1], flush=True)
    return rows


def begin_batch(client: OpenAI, server: Dragoman, texts: Sequence[str]) -> str:
    """Create a batch and return its id once it runs."""
    requests = ({"model": server.model, "prompt": text, "max_tokens": MAX_NEW_TOKENS} for text in texts)
    common = {"method": "POST", "url": "/v1/completions"}
    content = "".join(f"{json.dumps({'custom_id': str(i), **common, 'body': body})}\n" for i, body in enumerate(requests))
    file = client.files.create(file=("lines.jsonl", content.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id
    while client.batches.retrieve(batch).status == "validating":
        time.sleep(0.2)
    return batch


def main() -> None:
    """Measure the chosen parts and write the page."""
    found = parser(__doc__)
    add_model_options(found, "en-de-base", "int8")
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--cluster-rows", type=int, default=20_000)
    found.add_argument("--memory-rows", type=int, default=1_000_000)
    found.add_argument("--rounds", type=int, default=1, help="Of the cluster's jobs.")
    found.add_argument("--batch-seconds", type=float, default=60.0, help="Of each turn alone and beside a batch.")
    found.add_argument("--batch-rounds", type=int, default=4)
    arguments = found.parse_args()
    if arguments.quick:
        arguments.batch_seconds, arguments.batch_rounds = 2.0, 1
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
        if "batch" in arguments.parts:
            notes = [
                f"Captions over {HTTP}, {arguments.batch_rounds} turns of {arguments.batch_seconds:.0f} s alone and beside "
                "a batch, with the same arrivals; percentiles of all turns. Lines of the batch are captions, too."
            ]
            page.write(f"batch, {bundle.name}", measure_batch(arguments, bundle, Path(folder)), notes)


if __name__ == "__main__":
    main()
