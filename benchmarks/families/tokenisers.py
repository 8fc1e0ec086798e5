"""Our tokenisers beside the libraries that they stand for: the same ids and the same text, or the cause of each difference.

python -m benchmarks.families.tokenisers [--strings 5000] [--text FILE ...]

A family is compared with its definition (sentencepiece, and the table that its code makes of the ids) and with the class of
Transformers; what that class saves as `tokenizer.json` is compared with `tokenizers`. A difference needs a cause that is checked:
what the cause concerns is taken away, and then ids or texts have to be the same. What is left is unexplained; nothing may be.
"""

import argparse
import gzip
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.families.texts import training_lines
from benchmarks.families.tokeniser_cases import FAMILIES, Case, family_cases, plain_cases
from benchmarks.families.tokeniser_texts import id_rows, strings
from benchmarks.harness.report import environment, write

NOTES = (
    "Tokenisers of some 300 pieces, trained on this repository's text, with ids as the family has them. *Ids*: strings that get "
    "the same ids, special tokens aside. *Text*: sequences of ids, half of them random and half encoded strings, that get the same "
    "text. Every difference has the cause that is told, and is none without what that concerns.",
)


@dataclass
class Found:
    """What a comparison gave: how many of `count` are the same, causes of the others, and those that have none."""

    count: int
    same_ids: int = 0
    same_texts: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


def compare(case: Case, texts: Sequence[str]) -> Found:
    """Encode and decode by both, and say why where they differ."""
    found = Found(len(texts))
    for text, ids in zip(texts, case.ours.encode_batch(texts), strict=True):
        theirs = list(case.encode(text))
        if ids == theirs:
            found.same_ids += 1
        elif cause := case.encode_cause(text, theirs):
            found.causes[cause] += 1
        else:
            found.unexplained.append(f"{text!r}: {ids} and {theirs}")
    for row in id_rows(case.ours, texts):
        ours, theirs_text = case.ours.decode(row), case.decode(row)
        if ours == theirs_text:
            found.same_texts += 1
        elif cause := decode_cause(case, row):
            found.causes[cause] += 1
        else:
            found.unexplained.append(f"{row}: {ours!r} and {theirs_text!r}")
    return found


def decode_cause(case: Case, row: list[int]) -> str:
    """Return the fewest causes without which both texts are one; empty if there are none."""
    for count in range(1, len(case.decode_causes) + 1):
        for causes in itertools.combinations(case.decode_causes, count):
            ids = row
            for cause in causes:
                ids = cause.ids(ids)
            ours, theirs = case.ours.decode(ids), case.decode(ids)
            for cause in causes:
                ours, theirs = cause.text(ours), cause.text(theirs)
            if ours == theirs:
                return " and ".join(cause.name for cause in causes)
    return ""


def main() -> None:
    """Compare all, print the table and write it as a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strings", type=int, default=5000)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="Texts of a sentence a line, plain or gzipped.")
    given = parser.parse_args()
    about = environment("sentencepiece", "tokenizers", "transformers")
    words = [word for line in training_lines() for word in line.split()]
    texts = {f"{given.strings:,} random strings": strings(given.strings, words)}
    texts |= {path.name: _lines(path)[: given.strings] for path in given.text}
    rows = []
    with tempfile.TemporaryDirectory() as root:
        families = (case for family in FAMILIES for case in family_cases(family, Path(root)))
        for case in itertools.chain(plain_cases(), families):
            for name, lines in texts.items():
                found = compare(case, lines)
                print(case.name, case.reference, name, found, flush=True)
                rows.append(
                    {
                        "tokeniser": case.name,
                        "reference": case.reference,
                        "of": name,
                        "ids": f"{found.same_ids}/{found.count}",
                        "text": f"{found.same_texts}/{found.count}",
                        "causes": "; ".join(f"{cause}: {count}" for cause, count in found.causes.most_common()),
                        "unexplained": len(found.unexplained),
                    }
                )
    write("families_tokenisers", "Tokenisers of other libraries, against these", about, rows, NOTES)


def _lines(path: Path) -> list[str]:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()


if __name__ == "__main__":
    main()
