"""Small models that Transformers' Trainer trains, imported, exported and served: BLEU beside Transformers and CTranslate2.

    python -m benchmarks.trained train --data data/multi30k [--family marian] [--folder trained] [--minutes 45]
    python -m benchmarks.trained compare --data data/multi30k [--folder trained]

`train` makes a Marian and a T5 that translate English captions into German, with a tokeniser of their own, and saves them as their
users do; Ctrl-C keeps what there is, and the same command goes on from there. Their weights are no part of the repository.
"""

import argparse
from pathlib import Path

from benchmarks.trained.families import FAMILIES
from benchmarks.trained.training import train


def main() -> None:
    """Train or compare."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train",):
        command = commands.add_parser(name)
        command.add_argument("--data", type=Path, default=Path("data/multi30k"))
        command.add_argument("--family", choices=[*FAMILIES], nargs="+", default=[*FAMILIES])
        command.add_argument("--folder", type=Path, default=Path("trained"))
        if name == "train":
            command.add_argument("--minutes", type=float, default=45, help="End training after so many, for each family.")
    arguments = parser.parse_args()
    for family in arguments.family:
        if not train(FAMILIES[family], arguments.data, arguments.folder / family, arguments.minutes):
            break
