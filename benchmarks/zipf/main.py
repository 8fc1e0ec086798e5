"""Many models of which few fit in memory, asked for by Zipf's law: is anything lost, who waits how long, is the bound kept?

    python -m benchmarks.zipf [--bundle bundles/en-de] [--models 20] [--fit 4] [--seconds 300]

One server whose models are loaded on demand and give way to each other. Requests of all kinds arrive at random, whatever the server
does. The exit code is 1 if a promise was not kept.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.engines.table import commit
from benchmarks.harness.report import environment, write
from benchmarks.zipf.asked import OK, Asked, Mix, ask
from benchmarks.zipf.copies import copy_models
from benchmarks.zipf.server import MIB, FolderServer, MemoryWatch
from dragoman.export.bundle import Bundle
from dragoman.model.corpus import read_lines
from dragoman.server.config import load
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings
from dragoman.server.repository.memory import needed_bytes

TEXTS = ("A dog runs over the grass.", "Two men stand on a ladder.", "A woman in a red coat waits in the snow next to a bus.")
WAITED_SECONDS = 0.5
"""Answers that took longer have waited for their model, on a machine that is not overloaded."""
SLOTS = 8
SEED = 20
CALL_SECONDS = 180.0
COUNTS = {
    "dragoman_model_wakes_total": "wakes",
    "dragoman_model_sleeps_total": "sleeps",
    "dragoman_engine_restarts_total": "restarts",
}


def need_of(bundle: Path, max_slots: int) -> int:
    """Return what the server reckons that an engine of a bundle takes, in bytes, before it has seen one."""
    opened = Bundle.open(bundle)
    config = load({"models": bundle, "max_slots": max_slots, "num_threads": 1})
    return needed_bytes(opened, engine_settings(config, opened, EnginePlan(1, ((),)))[0], 1)


def verdicts(asked: Asked, watch: MemoryWatch, bound_bytes: int, counts: Mapping[str, int], code: int) -> list[tuple[bool, str]]:
    """Return which promises were kept, each with what it says."""
    failed = {status: count for status, count in sorted(asked.ended.items()) if status != OK}
    return [
        (asked.num_lost == 0 and not failed, f"{asked.num_sent} requests, {asked.num_lost} lost, failed: {failed or 'none'}"),
        (
            watch.max_engine_bytes <= bound_bytes,
            f"engines have had {watch.max_engine_bytes / MIB:.0f} MiB at the most, of {bound_bytes / MIB:.0f} MiB",
        ),
        (counts["restarts"] == 0, f"{counts['restarts']} engines were started again"),
        (code == 0, f"exit code after SIGTERM: {code}"),
    ]


def main() -> None:
    """Ask and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zipf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="Folder of Multi30k; without it, a few sentences of our own.")
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--fit", type=int, default=4, help="Models for which there is memory.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=10.0, help="Requests a second.")
    parser.add_argument("--exponent", type=float, default=1.0, help="Of Zipf's law.")
    parser.add_argument("--front-ends", type=int, default=1)
    arguments = parser.parse_args()
    texts = TEXTS if arguments.data is None else read_lines(arguments.data / "test_2016_flickr.en.gz")
    bound_bytes = arguments.fit * need_of(arguments.bundle, SLOTS)
    flags = [f"--models-memory-gib={bound_bytes / 2**30:.6f}", "--keep-loaded=1h", "--num-threads=1", f"--max-slots={SLOTS}"]
    flags += ["--load-wait-seconds=120", f"--front-ends={arguments.front_ends}"]
    about = environment("onnxruntime", "grpcio") | {"flags": flags, "seconds": arguments.seconds, "commit": commit()}
    with tempfile.TemporaryDirectory(dir=arguments.bundle.parent) as folder:  # beside it, for links
        models = copy_models(arguments.bundle, Path(folder) / "models", arguments.models)
        mix = Mix(models, arguments.exponent, arguments.rate, arguments.seconds, CALL_SECONDS)
        with FolderServer(Path(folder) / "models", Path(folder) / "log", flags) as server:
            with MemoryWatch(server.pid) as watch:
                asked = asyncio.run(ask(server.address, mix, texts, SEED))
            metrics = server.metrics()
            code = server.terminate()
    counts = {name: round(metrics.get(metric, 0.0)) for metric, name in COUNTS.items()}
    promises = verdicts(asked, watch, bound_bytes, counts, code)
    about |= {"mix": {"exponent": mix.exponent, "rate": mix.rate}, "counts": counts, "ended": dict(asked.ended)}
    about["memory"] = {"bound": bound_bytes, "engines": watch.max_engine_bytes, "others": watch.max_other_bytes}
    rows = asked.rows(_groups(arguments.models, arguments.fit), WAITED_SECONDS)
    name = "zipf" if arguments.front_ends == 1 else f"zipf-{arguments.front_ends}"
    write(name, "Many models", about, rows, _notes(arguments, about, watch, promises, asked))
    sys.exit(not all(is_kept for is_kept, _ in promises))


def _groups(num_models: int, num_fit: int) -> list[range]:
    """Return the ranks, divided: the first alone, those that fit, and the rest in two halves."""
    bounds = sorted({0, 1, num_fit, (num_fit + num_models) // 2, num_models})
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def _notes(
    arguments: argparse.Namespace, about: Mapping[str, Any], watch: MemoryWatch, promises: list[tuple[bool, str]], asked: Asked
) -> list[str]:
    counts = about["counts"]
    return [
        f"{arguments.models} models of `{arguments.bundle.name}`, memory for {arguments.fit} of them as the server reckons"
        f" it ({watch.max_engines} processes of engines at once at the most), {arguments.rate:g} requests/s for"
        f" {arguments.seconds:g} s by Zipf's law with exponent {arguments.exponent:g}, {arguments.front_ends} front end(s);"
        " callers on the same cores.",
        "",
        f"Answered: {asked.ended[OK] / asked.wall_seconds:.1f} requests/s. Models loaded {counts['wakes']} times, unloaded"
        f" {counts['sleeps']} times. Beside the engines {about['memory']['others'] / MIB:.0f} MiB.",
        "",
        *(f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises),
    ]
