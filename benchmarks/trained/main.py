"""Small models that Transformers' Trainer trains, imported, exported and served: BLEU beside Transformers and CTranslate2.

    python -m benchmarks.trained train --data data/multi30k [--family marian] [--folder trained] [--minutes 45]
    python -m benchmarks.trained compare --data data/multi30k [--folder trained]

`train` makes a Marian and a T5 that translate English captions into German, with a tokeniser of their own, and saves them as their
users do; Ctrl-C keeps what there is, and the same command goes on from there. Their weights are no part of the repository.
"""

import argparse
from pathlib import Path

from benchmarks.harness.report import environment, write
from benchmarks.trained.comparison import compare
from benchmarks.trained.families import FAMILIES
from benchmarks.trained.training import train

PACKAGES = ("torch", "transformers", "sentencepiece", "tokenizers", "onnxruntime", "ctranslate2", "sacrebleu")
TITLES = {"marian": "Marian", "t5": "T5"}
NOTES = (
    "- What a model does where nothing is asked is its own to say: `as the model says` is `generate` without arguments, or with "
    "those of the task in the configuration, and a request without options.",
    "- A line is unlike Transformers' where a token or a letter is another. A tie: to the model in double precision, both answers' "
    "scores, or in greedy search the log-probabilities of the first tokens that differ, are within 1e-4 of each other.",
    "- CTranslate2 ends a beam search sooner than Transformers does by default, and divides by the length without end-of-sequence.",
)


def main() -> None:
    """Train or compare."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "compare"):
        command = commands.add_parser(name)
        command.add_argument("--data", type=Path, default=Path("data/multi30k"))
        command.add_argument("--family", choices=[*FAMILIES], nargs="+", default=[*FAMILIES])
        command.add_argument("--folder", type=Path, default=Path("trained"), help="Where models are made, one folder each.")
        if name == "train":
            command.add_argument("--minutes", type=float, default=45, help="End training after so many, for each family.")
        else:
            command.add_argument("--sources", type=int, help="Of test_2016; with fewer than all nothing is written.")
    arguments = parser.parse_args()
    if arguments.command == "train":
        for family in arguments.family:
            if not train(FAMILIES[family], arguments.data, arguments.folder / family, arguments.minutes):
                break
        return
    for family in arguments.family:
        about = environment(*PACKAGES)
        rows, notes = compare(family, arguments.folder / family / "model", arguments.data, arguments.sources)
        if arguments.sources is None:
            title = f"A {TITLES[family]} that Transformers' Trainer trained, on test_2016"
            write(f"trained_{family}", title, about, rows, [*NOTES, *notes])
        else:
            print(*rows, *notes, sep="\n")
