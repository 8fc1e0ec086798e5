"""Memory of a server's two processes after loading and along an hour's worth of requests of mixed lengths.

    python -m benchmarks.memory bundles/en-de --data data/multi30k [--requests 20000] [--threads 2] [--quick]

A real `dragoman serve`; sources are one to `MAX_JOINED` captions joined, so that prefills and steps have ever other shapes, and
searches are mixed. An hour counts as 20,000 requests, five or six a second; they are sent as fast as the server takes them.
Growth is against the memory after the first tenth, when every length has occurred.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel
from dragoman.client.aio import AsyncClient
from dragoman.client.search import Search
from dragoman.model.corpus import read_lines
from dragoman.server.cores import available_cores

NUM_REQUESTS = 20_000
NUM_PARTS = 10
MAX_JOINED = 5
CONCURRENCY = 48
SEARCHES = (Search(), Search(), Search(), Search(num_beams=4), Search(do_sample=True, top_p=0.9, seed=7), Search(top_log_probs=3))


def resident_mib(pid: int) -> float:
    """Return the memory of a process that is in RAM, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) / 1024
    raise RuntimeError(f"process {pid} has no memory: it has ended")


def cache_mib(pid: int) -> float:
    """Return how much of an engine's caches is in RAM, in MiB: mappings without huge pages, see `server/runtime/memory.py`."""
    total = resident = 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "Rss":
            resident = int(value.split()[0])
        elif name == "VmFlags" and "nh" in value.split():
            total += resident
    return total / 1024


class Traffic:
    """Requests with random sources and searches, the same ones each time."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._random = texts, random.Random(0)

    def request(self) -> tuple[str, Search]:
        """Return the next text and search."""
        count = self._random.randint(1, MAX_JOINED)
        return " ".join(self._random.choices(self._texts, k=count)), self._random.choice(SEARCHES)

    async def send(self, address: str, num_requests: int) -> int:
        """Send requests, so many at once, and return how many tokens came back."""
        num_left, num_tokens = num_requests, 0
        async with AsyncClient(address, timeout_seconds=300) as client:

            async def worker() -> None:
                nonlocal num_left, num_tokens
                while num_left:
                    num_left -= 1
                    text, search = self.request()
                    result = await client.generate(text, search=search, truncate=True)
                    num_tokens += result.usage.generated_tokens

            await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
        return num_tokens


def measure(bundle: Path, texts: Sequence[str], num_requests: int, num_threads: int) -> list[dict[str, Any]]:
    """Return a row for each point where memory was looked at."""
    traffic = Traffic(texts)
    rows: list[dict[str, Any]] = []
    with ServedModel(bundle, "--num-threads", str(num_threads)) as served:

        def look(when: str, num_sent: int, num_tokens: int, seconds: float) -> None:
            front, engine, caches = resident_mib(served.front_pid), resident_mib(served.engine_pid), cache_mib(served.engine_pid)
            sizes = {
                "front end MiB": front,
                "engine MiB": engine,
                "caches MiB": caches,
                "engine without caches MiB": engine - caches,
            }
            settled = rows[1] if len(rows) > 1 else None
            growth = {name: f"{value / float(settled[name]) - 1:+.1%}" if settled else "" for name, value in sizes.items()}
            rows.append(
                {
                    "when": when,
                    "requests": num_sent,
                    "tokens": num_tokens,
                    "seconds": f"{seconds:.0f}",
                }
                | {name: f"{value:.1f}" for name, value in sizes.items()}
                | {
                    "front end growth": growth["front end MiB"],
                    "engine growth": growth["engine MiB"],
                    "growth without caches": growth["engine without caches MiB"],
                }
            )

        look("loaded and warmed up", 0, 0, 0.0)
        started, num_sent, num_tokens = time.monotonic(), 0, 0
        for part in range(1, NUM_PARTS + 1):
            num_due = num_requests * part // NUM_PARTS - num_sent
            num_tokens += asyncio.run(traffic.send(served.address, num_due))
            num_sent += num_due
            when = "every length has occurred" if part == 1 else f"{part * 6} minutes' worth"
            look(when, num_sent, num_tokens, time.monotonic() - started)
    return rows


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--threads", type=int, default=available_cores(), help="Threads of ONNX Runtime.")
    parser.add_argument("--quick", action="store_true", help="A fiftieth of the requests, and nothing is written.")
    arguments = parser.parse_args()
    num_requests = NUM_REQUESTS // 50 if arguments.quick else arguments.requests
    if num_requests < NUM_PARTS:
        parser.error(f"--requests: {num_requests} is less than {NUM_PARTS}")
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    about = environment("onnxruntime", "grpcio", "numpy") | {"threads": arguments.threads, "requests": num_requests}
    rows = measure(arguments.bundle, texts, num_requests, arguments.threads)
    if arguments.quick:
        print(*rows, sep="\n")
        return
    notes = [
        f"`{arguments.bundle.name}` behind a real server, {CONCURRENCY} requests at a time, sources of 1 to {MAX_JOINED} captions "
        "joined (too long ones truncated), a sixth each of beam 4, top-p sampling and greedy with top lists, the rest greedy. "
        "Resident memory of each process, libraries and weights included; growth is against the second row. "
        "Caches take memory page by page, when a row is as long as that for the first time, and never more than "
        "`dragoman_cache_reserved_bytes`."
    ]
    write("memory", "Memory along an hour's worth of requests", about, rows, notes)


if __name__ == "__main__":
    main()
