"""Dragoman beside servers built around CTranslate2: requests a second that each answers in time.

    python -m benchmarks.serving [--data data/multi30k] [--precision int8] [--servers dragoman triton mosec litserve] [--quick]

The peers live in environments of their own, which `benchmarks/peers/setup.sh` makes. Captions, and several joined, arrive as a
Poisson process, whatever has been answered; all servers have the same weights, cores, arrivals and latency objective. Each peer's
settings are searched for first; then, in rounds, the highest rate at which a server meets the objective. docs/benchmarks.md tells
what is fair about it.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.models import bundle_of
from benchmarks.peers.server import KINDS
from benchmarks.serving.comparison import OBJECTIVE_FACTOR, Comparison, Size
from benchmarks.serving.contender import DRAGOMAN, NAMES, Contender, Models, missing
from benchmarks.serving.report import Setup, write_report
from benchmarks.widened import widened_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.networks.transformer import transformer_of
from dragoman.model.quality import score
from dragoman.server.cores import available_cores
from tests.oracles import ctranslate2_model

PRECISIONS = ("int8", "fp32")
FULL = Size(seconds=10.0, tuning_seconds=5.0, warm_seconds=2.0, num_rounds=3, num_checked=200)
QUICK = Size(seconds=3.0, tuning_seconds=0.0, warm_seconds=0.5, num_rounds=1, num_checked=20)


def prepare(arguments: argparse.Namespace, *, has_peers: bool) -> Models:
    """Put the checkpoint into both forms, or into Dragoman's only."""
    checkpoint = Checkpoint.load(arguments.checkpoint) if arguments.checkpoint else widened_checkpoint()
    folder = arguments.cache / f"{checkpoint.name}-ctranslate2-{arguments.precision}"
    if has_peers:
        ctranslate2_model.write_model(
            transformer_of(checkpoint.model), folder, {"fp32": "float32"}.get(arguments.precision, arguments.precision)
        )
        checkpoint.tokenizers.save(folder)
    bundle = arguments.bundle or bundle_of(checkpoint, arguments.cache, arguments.precision)
    return Models(checkpoint.name, bundle, folder, arguments.precision)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--checkpoint", type=Path, help="What to serve; by default en-de, widened to the size of Transformer-base.")
    parser.add_argument("--bundle", type=Path, help="Its bundle, where it has been exported already.")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    parser.add_argument("--servers", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--environments", type=Path, default=Path(".cache/peers"), help="Folder that setup.sh was given.")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--dragoman-flags", default="", help="Of `dragoman serve`, as one argument; its defaults otherwise.")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--objective-factor", type=float, default=OBJECTIVE_FACTOR, help="Of the lowest unloaded latency.")
    parser.add_argument("--quick", action="store_true", help="Little of everything, peers not tuned: to see that it works.")
    return parser.parse_args()


def gather(arguments: argparse.Namespace, skipped: Mapping[str, str]) -> list[Contender]:
    """Make every server that takes part ready to be started, Dragoman first."""
    names = [name for name in NAMES if name in arguments.servers and name not in skipped]
    if not names:
        raise SystemExit("no server is left to measure")
    models = prepare(arguments, has_peers=names != [DRAGOMAN])
    kinds = {kind.name: kind for kind in KINDS}
    flags = {DRAGOMAN: tuple(shlex.split(arguments.dragoman_flags))}
    return [Contender(kinds.get(name), models, arguments.environments, flags.get(name, ())) for name in names]


def main() -> None:
    """Compare and write the results."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with whoever measures them
    arguments = parse()
    skipped = {name: command for name in arguments.servers if (command := missing(name, arguments.environments))}
    for name, command in skipped.items():
        print(f"{name} is skipped; to install it: {command}", flush=True)
    sources, references = read_parallel(*(arguments.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de")))
    contenders = gather(arguments, skipped)
    size = replace(QUICK if arguments.quick else FULL, objective_factor=arguments.objective_factor)
    num_rounds = arguments.rounds or size.num_rounds
    comparison = Comparison(contenders, sources, size, available_cores())
    comparison.look()
    if size.tuning_seconds:
        comparison.tune()
    for number in range(1, num_rounds + 1):
        comparison.run_round(number)
    quality = {s.contender.name: score(s.answers, references[: len(s.answers)]).bleu for s in comparison.standings}
    versions: dict[str, str] = {}
    for contender in contenders:
        versions |= contender.kind.versions(arguments.environments) if contender.kind else {}
    model = contenders[0].models.name
    is_tuned, factor = size.tuning_seconds > 0, size.objective_factor
    setup = Setup(
        model, arguments.precision, size.seconds, num_rounds, is_tuned, skipped, versions, factor, bool(arguments.dragoman_flags)
    )
    write_report(comparison, quality, setup)
