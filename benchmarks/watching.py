"""What it costs to be looked at: the same load on one server while nobody, one or sixteen watch what its engine does.

    python -m benchmarks.watching --data data/multi30k [--bundle bundles/en-de] [--quick]

One sender keeps 32 requests under way over gRPC; those who look read `/console/engine` over HTTP in a process of their own. The
sides take turns; medians of the rounds count. Processor time is that of the engine alone, per answer, which other work on the
machine moves less than it moves the clock.
"""

import argparse
import asyncio
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from aiohttp import ClientSession, TCPConnector

from benchmarks.doors import GRPC, send
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel, cpu_seconds
from dragoman.model.corpus import read_lines
from dragoman.server.core.viewing import VIEW_SECONDS
from dragoman.server.engine.messages import Request, Share
from dragoman.server.engine.scheduler import Limits, Scheduler
from dragoman.server.engine.sequence import Sequence
from dragoman.server.engine.watched import Watched

NUM_VIEWERS = (0, 1, 16)
NUM_CALLERS = 32
NUM_SLOTS = (32, 256)


def look(address: str, num_viewers: int, seconds: float) -> int:
    """Have so many look for so long; return how many views they were told."""
    return asyncio.run(_look(address, num_viewers, seconds))


async def _look(address: str, num_viewers: int, seconds: float) -> int:
    num_views = 0

    async def read(session: ClientSession) -> None:
        nonlocal num_views
        async with session.get("/console/engine") as response:
            response.raise_for_status()
            async for line in response.content:
                num_views += line.startswith(b"data: ")

    async with ClientSession(f"http://{address}", connector=TCPConnector(limit=0)) as session:
        reading = [asyncio.create_task(read(session)) for _ in range(num_viewers)]
        await asyncio.sleep(seconds)
        for one in reading:
            one.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return num_views


def measure(served: ServedModel, model: str, texts: list[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each number of viewers."""
    found: dict[int, list[tuple[float, float, float, float]]] = {number: [] for number in NUM_VIEWERS}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for number in range(rounds + 1):
            for num_viewers in NUM_VIEWERS[:: 1 if number % 2 else -1]:
                looking = pool.submit(look, served.http_address, num_viewers, seconds) if num_viewers else None
                engine, front = cpu_seconds(served.engine_pid), cpu_seconds(served.front_pid)
                rate, latencies = pool.submit(send, GRPC, served.address, model, texts, NUM_CALLERS, seconds).result()
                engine, front = cpu_seconds(served.engine_pid) - engine, cpu_seconds(served.front_pid) - front
                num_views = 0 if looking is None else looking.result()
                if number:  # the first round warms up
                    per_second = num_views / seconds / max(num_viewers, 1)
                    found[num_viewers].append((rate, engine / len(latencies), front / len(latencies), per_second))
    base = [median(column) for column in zip(*found[0], strict=True)]
    rows = []
    for num_viewers, turns in found.items():
        rate, engine, front, per_second = (median(column) for column in zip(*turns, strict=True))
        rows.append(
            {
                "viewers": num_viewers,
                "views/s each": round(per_second, 2),
                "requests/s": round(rate, 1),
                "of nobody's": round(rate / base[0], 3),
                "engine ms/answer": round(engine * 1000, 3),
                "ratio": round(engine / base[1], 3),
                "front end ms/answer": round(front * 1000, 3),
            }
        )
    return rows


def snapshot_seconds(num_slots: int, num_times: int = 2000) -> float:
    """Return what an engine's answer to one who looks takes it, the message included, with all slots in use; a median."""
    scheduler = Scheduler(Limits(num_slots, num_slots, 10**6, 10**6))
    for number in range(2 * num_slots):
        scheduler.submit(Sequence(b"", Request(number, [5] * 20, 99, 0.0, share=Share(f"caller-{number % 8}"))))
    for row, sequence in enumerate(scheduler.admit()):
        sequence.rows = [row]
    watched, encoder = Watched(scheduler, lambda _: 7, time.monotonic), msgspec.msgpack.Encoder()
    taken = []
    for _ in range(num_times):
        began = time.perf_counter()
        encoder.encode(watched.snapshot((), []))
        taken.append(time.perf_counter() - began)
    return median(taken)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each side's turn.")
    parser.add_argument("--quick", action="store_true", help="One round of a second each, and nothing is written.")
    arguments = parser.parse_args()
    rounds, seconds = (1, 1.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    started = time.monotonic()
    with ServedModel(arguments.bundle, "--num-threads", "1", has_http=True) as served:
        rows = measure(served, arguments.bundle.name, texts, rounds, seconds)
    if arguments.quick:
        print(*rows, sep="\n")
        return
    alone = {number: snapshot_seconds(number) for number in NUM_SLOTS}
    notes = [
        f"`{arguments.bundle.name}`, one engine of one thread, greedy, captions of test_2016, {NUM_CALLERS} callers, closed loop; "
        f"medians of {rounds} rounds of {seconds:g} s a side, in turns, everything on the same cores. "
        f"{time.monotonic() - started:.0f} s to make.",
        "",
        "What a look takes the engine itself, measured alone: "
        + ", ".join(
            f"{seconds * 1e6:.0f} µs with {number} slots in use, {seconds / VIEW_SECONDS:.3%} of its time"
            for number, seconds in alone.items()
        )
        + ". Those who look take their own time on the same cores, which is what requests/s show.",
    ]
    about = environment("onnxruntime", "grpcio", "aiohttp") | {"rounds": rounds, "seconds": seconds}
    write("watching", "What it costs to be looked at", about, rows, notes)


if __name__ == "__main__":
    main()
