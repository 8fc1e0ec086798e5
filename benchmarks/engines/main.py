"""Dragoman beside CTranslate2 and Transformers: the same weights, the same threads, the same requests, in turns.

    python -m benchmarks.engines [--data data/multi30k] [--quick] [--parts requests throughput captions] [--source ../older]

`requests`: a random model of the size of Transformer-base, answers of exactly 32 tokens, so many requests at a time. `throughput`:
the same with as many requests at once as each side likes. `captions`: the shipped en-de model, and the same widened to
Transformer-base's size, on test_2016, with BLEU beside the speed. Each is measured in the best of its settings; Dragoman's are
replicas, slots and front ends. What is not measured keeps its rows. docs/benchmarks.md tells what is fair about it.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines import captions as engine_captions
from benchmarks.engines import requests as engine_requests
from benchmarks.engines import throughput as engine_throughput
from benchmarks.engines.stage import Plan, Stage, peer_versions
from benchmarks.engines.table import commit
from benchmarks.harness.models import SHIPPED, base_checkpoint
from benchmarks.harness.report import environment
from benchmarks.harness.setting import Setting, settings
from benchmarks.widened import widened_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.server.cores import available_cores

PARTS = ("requests", "throughput", "captions")
Results = engine_requests.Results | engine_throughput.Results | engine_captions.Results

SEARCHES = {"greedy": 1, "beam 4": 4}
PRECISIONS = ("fp32", "int8")
MODELS = ("en-de", "en-de-base")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        num_rounds: How often every side runs.
        seconds: How long a run takes, or as long as the smallest number of requests takes.
        concurrency: Requests at a time.
        source_tokens: Lengths of sources.
        batch_rows: What CTranslate2 may choose its batch size from, in hypotheses decoded together.
        num_captions: Of test_2016, at the most.
        caption_seconds: How long a run of captions takes about, at the most.
    """

    num_rounds: int
    seconds: float
    concurrency: tuple[int, ...]
    source_tokens: tuple[int, ...]
    batch_rows: tuple[int, ...]
    num_captions: int
    caption_seconds: float


FULL = Size(3, 1.5, (1, 8, 32, 64), (16, 128), (32, 64, 128), 1000, 8.0)
QUICK = Size(1, 0.5, (1, 64), (16,), (64, 128), 128, 1.0)
MAX_ROWS = 256
"""Slots of all replicas where so many requests at a time are all decoded at once."""
SLOTS, ENGINE_SLOTS = (64, 128), (32, 64, 128)
"""Of each replica where throughput counts: what servers, and engines alone, are tried with."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"), help="Folder of Multi30k, for `captions`.")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--threads", type=int, default=available_cores(), help="Threads that every side computes with.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="Precisions.")
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="Of `captions`.")
    parser.add_argument("--concurrency", nargs="+", type=int, help="Of `requests`.")
    parser.add_argument("--source-tokens", nargs="+", type=int, help="Of `requests` and `throughput`.")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="Of one run, at least.")
    parser.add_argument("--captions", type=int, help="Sentences of test_2016.")
    parser.add_argument("--replicas", nargs="+", type=int, help="Of Dragoman, each tried; by default one, and one for each thread.")
    parser.add_argument("--front-ends", nargs="+", type=int, default=(1,), help="Of Dragoman, each tried.")
    parser.add_argument("--slots", nargs="+", type=int, default=SLOTS, help="Of each replica, each tried, where throughput counts.")
    parser.add_argument("--serve-flags", default="", help="More of `dragoman serve`'s, as one argument.")
    parser.add_argument("--source", type=Path, help="Older checkout whose server takes part, with a bundle by its own exporter.")
    parser.add_argument("--quick", action="store_true", help="Little of everything, and nothing is written.")
    return parser.parse_args()


def size(arguments: argparse.Namespace) -> Size:
    """Return how much to measure."""
    base = QUICK if arguments.quick else FULL
    return Size(
        arguments.rounds or base.num_rounds,
        arguments.seconds or base.seconds,
        tuple(arguments.concurrency or base.concurrency),
        tuple(arguments.source_tokens or base.source_tokens),
        base.batch_rows,
        arguments.captions or base.num_captions,
        base.caption_seconds,
    )


def plan(arguments: argparse.Namespace, slots: Sequence[int], source_slots: int, *, has_transformers: bool = False) -> Plan:
    """Return what is put on a stage, with servers of so many slots a replica."""
    return Plan(
        arguments.cache,
        arguments.threads,
        settings(arguments.threads, slots, arguments.replicas, arguments.front_ends),
        shlex.split(arguments.serve_flags),
        arguments.source.resolve() if arguments.source else None,
        source_slots,
        has_transformers,
    )


def engine_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Return the settings of engines alone: whatever the server can, several engines are several processes."""
    return settings(arguments.threads, ENGINE_SLOTS, arguments.replicas or sorted({1, arguments.threads}))


def run_requests(arguments: argparse.Namespace, chosen: Size) -> engine_requests.Results:
    """Measure `requests`."""
    results, max_slots = engine_requests.Results(), max(*chosen.concurrency, 1) * max(map(SEARCHES.__getitem__, arguments.searches))
    for precision in arguments.only:
        with Stage(base_checkpoint(), precision, plan(arguments, (max_slots,), max_slots, has_transformers=True)) as stage:
            for case in cases(arguments, chosen):
                for concurrency in chosen.concurrency:
                    results.measure(stage, case, concurrency, chosen.num_rounds, chosen.seconds)
    return results


def run_throughput(arguments: argparse.Namespace, chosen: Size) -> engine_throughput.Results:
    """Measure `throughput`."""
    results = engine_throughput.Results(engine_settings(arguments))
    for precision in arguments.only:
        most = max(engine_throughput.CONCURRENCY) * max(map(SEARCHES.__getitem__, arguments.searches))
        with Stage(base_checkpoint(), precision, plan(arguments, arguments.slots, most)) as stage:
            for case in cases(arguments, chosen):
                results.measure(stage, case, chosen.batch_rows, chosen.num_rounds, chosen.seconds)
    return results


def cases(arguments: argparse.Namespace, chosen: Size) -> list[engine_requests.Case]:
    """Return what models that never end are asked."""
    return [
        engine_requests.Case(search, SEARCHES[search], num_tokens)
        for search in arguments.searches
        for num_tokens in chosen.source_tokens
    ]


def run_captions(arguments: argparse.Namespace, chosen: Size) -> engine_captions.Results:
    """Measure `captions`."""
    files = [arguments.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de")]
    sources, references = (lines[: chosen.num_captions] for lines in read_parallel(*files))
    results = engine_captions.Results(sources, references, engine_settings(arguments))
    for model in arguments.models:
        checkpoint = Checkpoint.load(SHIPPED) if model == "en-de" else widened_checkpoint()
        for precision in arguments.only:
            with Stage(checkpoint, precision, plan(arguments, arguments.slots, MAX_ROWS)) as stage:
                for search in arguments.searches:
                    sizes = chosen.batch_rows, chosen.num_rounds, chosen.caption_seconds
                    results.measure(stage, search, SEARCHES[search], *sizes)
    return results


RUNNERS: dict[str, Callable[[argparse.Namespace, Size], Results]] = {
    "requests": run_requests,
    "throughput": run_throughput,
    "captions": run_captions,
}


def main() -> None:
    """Measure and write the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped
    arguments = parse()
    chosen = size(arguments)
    about = environment("onnxruntime", "grpcio", "torch")
    about["versions"] |= peer_versions()
    about |= {"threads": arguments.threads, "rounds": chosen.num_rounds, "commit": commit()}
    if arguments.source:
        about["before"] = commit(arguments.source)
    for part in arguments.parts:
        results = RUNNERS[part](arguments, chosen)
        if not arguments.quick:
            results.write(about)
