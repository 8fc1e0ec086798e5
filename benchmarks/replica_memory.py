"""Memory of several engines of one model: with a copy of its weights in each, and with one file that all of them map.

    python -m benchmarks.replica_memory bundles/en-de [BUNDLE ...] [--engines 1 2 4] [--quick]

Engines are real processes (`dragoman.server.engine.process`), without a front end. Each answers some requests and scores a pair
before anybody looks, so that every session is open and every weight has been read. A page that several processes have mapped counts
in each for its part (PSS), so that sums over processes are what the machine really lends.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.report import environment, write
from dragoman.export.bundle import Bundle
from dragoman.export.processor import processor_kind
from dragoman.server.engine.messages import Request, ScoreRequest
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.supervisor import RestartPolicy, SupervisedEngine
from dragoman.server.telemetry import logs

NUM_REQUESTS, SOURCE_TOKENS, NEW_TOKENS = 16, 20, 16
NUMBERS = (1, 2, 4)
FIRST_ID = 10


def memory_mib(pid: int) -> dict[str, float]:
    """Return what a process has in RAM: its part of all pages, pages that are its alone, and those that lie in no file."""
    found: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value = line.split()[:2]
        found[name.rstrip(":")] = int(value) / 1024
    return {"pss": found["Pss"], "private": found["Private_Clean"] + found["Private_Dirty"], "anonymous": found["Anonymous"]}


async def engines_memory(bundle: Path, num_engines: int, num_threads: int, folder: str) -> dict[str, float]:
    """Start engines, have each do some of everything, and return their memory together and how long they took to start.

    Args:
        bundle: Of the model.
        num_engines: Processes.
        num_threads: Of each.
        folder: Through which they share weights; empty for copies.
    """
    manifest = Bundle.open(bundle, is_checked=False).manifest
    async with AsyncExitStack() as stack:
        engines = [_engine(bundle, num_threads, folder) for _ in range(num_engines)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        started = time.monotonic()
        await asyncio.gather(*(engine.start() for engine in engines))
        seconds = time.monotonic() - started
        await asyncio.gather(*(_use(engine, manifest.source_vocab_size, manifest.eos_id) for engine in engines))
        pids = [engine.process_id for engine in engines]
        found = [memory_mib(pid) for pid in pids if pid is not None]
    assert len(found) == num_engines, "an engine is gone"
    return {name: sum(each[name] for each in found) for name in found[0]} | {"seconds": seconds}


def _engine(bundle: Path, num_threads: int, folder: str) -> SupervisedEngine:
    settings = EngineSettings(
        endpoint="",
        bundle=str(bundle),
        num_threads=num_threads,
        max_slots=64,
        max_waiting_requests=1024,
        max_waiting_tokens=65536,
        prefill_tokens_per_step=512,
        is_warmed_up=True,
        log_level="error",
        log_format="json",
        device=DeviceSettings(name="cpu", weights_cache=folder),
    )
    return SupervisedEngine(
        bundle.name,
        settings,
        RestartPolicy(),
        is_inline=False,
        on_statistics=lambda _: None,
        on_change=lambda: None,
        on_restart=lambda: None,
    )


async def _use(engine: SupervisedEngine, vocab_size: int, eos_id: int) -> None:
    """Have an engine answer, and score."""
    random = np.random.default_rng(0)
    sources = random.integers(FIRST_ID, vocab_size, (NUM_REQUESTS, SOURCE_TOKENS - 1)).tolist()
    now = time.monotonic()
    requests = [Request(engine.next_id(), [*source, eos_id], NEW_TOKENS, now) for source in sources]
    await asyncio.gather(*(engine.generate(request) for request in requests))
    while (await engine.score(ScoreRequest(engine.next_id(), [*sources[0], eos_id], [eos_id], time.monotonic()))).reason != "eos":
        await asyncio.sleep(0.1)  # its graph is loaded in the background


def rows(bundle: Path, numbers: Sequence[int], num_threads: int, folder: str) -> list[dict[str, Any]]:
    """Measure a bundle; return a row for each number of engines."""
    weights = sum(file.size for name, file in Bundle.open(bundle).manifest.files.items() if name.endswith(".weights")) / 2**20
    found: list[dict[str, Any]] = []
    first: dict[str, Mapping[str, float]] = {}
    for number in numbers:
        places = {"copies": "", "shared": folder}
        sides = {side: asyncio.run(engines_memory(bundle, number, num_threads, place)) for side, place in places.items()}
        row: dict[str, Any] = {"model": bundle.name, "weights MiB": f"{weights:.0f}", "engines": number}
        for side, memory in sides.items():
            first.setdefault(side, memory)
            more = (memory["pss"] - first[side]["pss"]) / (number - numbers[0]) if number > numbers[0] else 0.0
            row |= {
                f"{side}: MiB": f"{memory['pss']:.0f}",
                f"{side}: of it in no file": f"{memory['anonymous']:.0f}",
                f"{side}: a further engine": f"{more:.0f}" if more else "",
                f"{side}: ready in s": f"{memory['seconds']:.1f}",
            }
        found.append(row)
    return found


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--engines", type=int, nargs="+", default=list(NUMBERS))
    parser.add_argument("--threads", type=int, default=1, help="Of each engine.")
    parser.add_argument("--folder", type=Path, help="Where the files go; by default a temporary folder, which is removed.")
    parser.add_argument("--quick", action="store_true", help="One and two engines, and nothing is written.")
    arguments = parser.parse_args()
    numbers = sorted(set(NUMBERS[:2] if arguments.quick else arguments.engines))
    logs.configure_logging("error", "console")
    about = environment("onnxruntime", "numpy") | {"threads": arguments.threads, "kind": processor_kind()}
    with tempfile.TemporaryDirectory(prefix="replica-memory.", dir=arguments.folder) as folder:
        found = [row for bundle in arguments.bundles for row in rows(bundle, numbers, arguments.threads, folder)]
    if arguments.quick:
        print(*found, sep="\n")
        return
    notes = [
        f"Engine processes of {arguments.threads} thread(s) each on {about['kind']}, after {NUM_REQUESTS} greedy requests of "
        f"{SOURCE_TOKENS} source tokens and a pair that was scored. MiB are of all engines together, a page that several have "
        "mapped counted once (PSS); interpreter, libraries and caches of keys and values are in it. What lies in no file cannot be "
        "shared, nor dropped and read again. A further engine is what each one after the first adds. Ready is until the last one "
        "is, with the shared files made where the row is the model's first."
    ]
    write("replica_memory", "Memory of several engines of one model", about, found, notes)


if __name__ == "__main__":
    main()
