"""Results that are there already: their Markdown made again from their JSON, sections moved to the kind they are known to be of.

    python -m benchmarks.harness.rewrite [NAME ...] [--kind avx512_vnni]

Without names it is every result. Files of the form without kinds come out in the present one. `--kind` says which kind of processor
those sections were measured on that do not say so themselves, by evidence that you have; it never replaces a section.
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness import report
from benchmarks.harness.report import UNKNOWN, read_result


def rewrite(names: Sequence[str], kind: str = UNKNOWN) -> None:
    """Write results again, what is of an unknown kind as of this one.

    Raises:
        ValueError: If there is a section of that kind beside the unknown one.
    """
    for name in names:
        result = read_result(name)
        if kind != UNKNOWN and (section := result.sections.pop(UNKNOWN, None)):
            if kind in result.sections:
                raise ValueError(f"{name} has a section of {kind} already")
            result.sections[kind] = section
        result.write(name)


def main() -> None:
    """Rewrite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in report.RESULTS.glob("*.json"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(known)}.")
    parser.add_argument("--kind", default=UNKNOWN, help="As `dragoman.export.processor` calls it.")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no such result: {', '.join(sorted(unknown))}")
    rewrite(arguments.names or known, arguments.kind)


if __name__ == "__main__":
    main()
