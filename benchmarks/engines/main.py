"""Dragoman beside CTranslate2 and Transformers: the same weights, the same threads, the same requests, in turns.

    python -m benchmarks.engines [--data data/multi30k] [--quick] [--parts requests throughput captions]

`requests`: a random model of the size of Transformer-base, answers of exactly 32 tokens, so many requests at a time. `throughput`:
the same with as many requests at once as each side likes. `captions`: the shipped en-de model, and the same widened to
Transformer-base's size, on test_2016, with BLEU beside the speed. docs/benchmarks.md tells what is fair about it.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines import captions as engine_captions
from benchmarks.engines import requests as engine_requests
from benchmarks.engines import throughput as engine_throughput
from benchmarks.engines.stage import Stage, peer_versions
from benchmarks.harness.models import SHIPPED, base_checkpoint
from benchmarks.harness.report import environment
from benchmarks.widened import widened_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.server.cores import available_cores

PARTS = ("requests", "throughput", "captions")
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
        num_captions: Of test_2016.
    """

    num_rounds: int
    seconds: float
    concurrency: tuple[int, ...]
    source_tokens: tuple[int, ...]
    batch_rows: tuple[int, ...]
    num_captions: int


FULL = Size(3, 1.5, (1, 8, 32, 64), (16, 128), (32, 64, 128), 1000)
QUICK = Size(1, 0.5, (1, 64), (16,), (64, 128), 128)


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
    parser.add_argument("--quick", action="store_true", help="Little of everything: to see that it works.")
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
    )


def run_forced(arguments: argparse.Namespace, chosen: Size, searches: Sequence[str], about: dict[str, object]) -> None:
    """Measure and write `requests` and `throughput`, which have the model in common."""
    checkpoint = base_checkpoint()
    most = engine_throughput.CONCURRENCY if "throughput" in arguments.parts else ()
    max_slots = max(*chosen.concurrency, *most, 1) * max(SEARCHES[search] for search in searches)
    requests, throughput = engine_requests.Results(), engine_throughput.Results()
    for precision in arguments.only:
        with Stage(checkpoint, precision, arguments.cache, arguments.threads, max_slots) as stage:
            for search in searches:
                for num_tokens in chosen.source_tokens:
                    case = engine_requests.Case(search, SEARCHES[search], num_tokens)
                    if "requests" in arguments.parts:
                        for concurrency in chosen.concurrency:
                            requests.measure(stage, case, concurrency, chosen.num_rounds, chosen.seconds)
                    if "throughput" in arguments.parts:
                        throughput.measure(stage, case, chosen.batch_rows, chosen.num_rounds, chosen.seconds)
    if "requests" in arguments.parts:
        requests.write(about)
    if "throughput" in arguments.parts:
        throughput.write(about)


def run_captions(arguments: argparse.Namespace, chosen: Size, searches: Sequence[str], about: dict[str, object]) -> None:
    """Measure and write `captions`."""
    files = [arguments.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de")]
    sources, references = (lines[: chosen.num_captions] for lines in read_parallel(*files))
    results = engine_captions.Results(sources, references)
    for model in arguments.models:
        checkpoint = Checkpoint.load(SHIPPED) if model == "en-de" else widened_checkpoint()
        for precision in arguments.only:
            max_slots = engine_captions.CONCURRENCY * max(SEARCHES[search] for search in searches)
            stage = Stage(checkpoint, precision, arguments.cache, arguments.threads, max_slots, is_transformers_wanted=False)
            with stage:
                for search in searches:
                    results.measure(stage, search, SEARCHES[search], chosen.batch_rows, chosen.num_rounds)
    results.write(about)


def main() -> None:
    """Measure and write the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped
    arguments = parse()
    chosen = size(arguments)
    about = environment("onnxruntime", "grpcio", "torch")
    about["versions"] |= peer_versions()
    about |= {"threads": arguments.threads, "rounds": chosen.num_rounds, "is quick": arguments.quick}
    if {"requests", "throughput"}.intersection(arguments.parts):
        run_forced(arguments, chosen, arguments.searches, about)
    if "captions" in arguments.parts:
        run_captions(arguments, chosen, arguments.searches, about)
