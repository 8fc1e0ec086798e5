"""The targets of throughput beside what was measured on this kind of processor.

    python -m benchmarks.targets [--kind avx512_vnni]

It measures nothing: it reads `benchmarks/results` and prints, of each target, the figure, whether it was reached, and the result
that it is from. What was not measured on this kind of processor is said to be so.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.report import Section, read_result
from benchmarks.overhead import BATCH, UNARY
from benchmarks.serving.contender import DRAGOMAN
from dragoman.export.processor import processor_kind

NOT_LESS = 0.97
"""Of what was before, that counts as not less: what two runs of the same differ by."""

Figure = Callable[[Section], float | None]
"""Reads a figure; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be reached.

    Attributes:
        name: What it is of.
        result: Name of the result's files.
        limit: The least that reaches it, or the most.
        figure: See there.
        is_most: Whether the limit is the most.
    """

    name: str
    result: str
    limit: float
    figure: Figure
    is_most: bool = False

    def row(self, section: Section | None) -> str:
        """Return the table's row."""
        value = self.figure(section) if section else None
        sign = "≤" if self.is_most else "≥"
        measured = section.environment["date"] if section and value is not None else "—"
        said = "—" if value is None else f"{value:.2f}" if value % 1 else f"{value:.0f}"
        return f"| {self.name} | {sign} {self.limit:g} | {said} | {self.verdict(value)} | {self.result} | {measured} |"

    def verdict(self, value: float | None) -> str:
        """Say whether a figure reaches it."""
        if value is None:
            return "not measured"
        return "reached" if (value <= self.limit if self.is_most else value >= self.limit) else "MISSED"


def column(name: str, **case: str) -> Figure:
    """Return what reads a column of one row."""

    def figure(section: Section) -> float | None:
        found = [row for row in section.rows if all(row.get(key) == value for key, value in case.items())]
        return number(found[0].get(name)) if found else None

    return figure


def least_of_best(columns: Sequence[str], **case: str) -> Figure:
    """Return what reads the best of some columns in each row of a case, and takes the least of those."""

    def figure(section: Section) -> float | None:
        found = [row for row in section.rows if all(row.get(key) == value for key, value in case.items())]
        values = [[value for name in columns if (value := number(row.get(name))) is not None] for row in found]
        return min((max(own) for own in values if own), default=None)

    return figure


def against_before(section: Section) -> float | None:
    """Return the least, over all cases, of today's ratio to CTranslate2 by that of the older server in the same run."""
    pairs = [(number(row.get("gRPC ÷ better")), number(row.get("before ÷ better"))) for row in section.rows]
    return min((now / before for now, before in pairs if now is not None and before), default=None)


def goodput(section: Section) -> float | None:
    """Return our goodput by the best peer's."""
    rates = {row["server"]: float(row["goodput/s"]) for row in section.rows}
    ours, best = rates.pop(DRAGOMAN, None), max(rates.values(), default=0.0)
    return ours / best if ours is not None and best else None


def share(requests: str) -> Figure:
    """Return what reads our share of the no-op server's requests a second, where we have the most."""

    def figure(section: Section) -> float | None:
        rows = [row for row in section.rows if row.get("requests") == requests and number(row.get("share")) is not None]
        return float(max(rows, key=lambda row: float(row["dragoman/s"]))["share"]) if rows else None

    return figure


def p99_ratio(section: Section) -> float | None:
    """Return a lone request's latency at 99 % by that of the older server."""
    rows = {row["server"]: number(row["p99 ms"]) for row in section.rows}
    now, before = rows.get("now"), rows.get("before")
    return now / before if now is not None and before else None


def different(section: Section) -> float:
    """Return how many answers differ; one more for each load in which some are missing."""
    return float(sum(row["different"] + (row["not answered"] != "none") for row in section.rows))


def missed(section: Section) -> float:
    """Return how many promises a result says were missed."""
    return float(sum(line.startswith("- MISSED") for line in section.notes))


def missed_with_kills(section: Section) -> float | None:
    """Return the same of a soak in which processes were killed."""
    return missed(section) if any("killed: " in line for line in section.notes if line.startswith("- ")) else None


def number(text: object) -> float | None:
    """Return what a cell says; None if that is nothing."""
    return float(str(text).replace(",", "")) if text not in (None, "", "—") else None


ENGINES, BULK = "engine ÷ CTranslate2", "gRPC in bulk ÷ CTranslate2"
THROUGH_GRPC = ("gRPC ÷ CTranslate2", BULK)


def _captions(search: str, size: str, side: str, limit: float) -> Target:
    """Return a target of captions in int8."""
    model = {"base": "en-de-base", "small": "en-de"}[size]
    figure = column(side, model=model, search=search, precision="int8")
    return Target(f"captions, int8, {search}, {size}: {side}", "engines_captions", limit, figure)


TARGETS = (
    _captions("greedy", "base", ENGINES, 1.25),
    _captions("greedy", "small", ENGINES, 0.9),
    _captions("greedy", "base", BULK, 1.1),
    _captions("greedy", "small", BULK, 0.6),
    _captions("beam 4", "base", ENGINES, 1.1),
    _captions("beam 4", "base", BULK, 1.0),
    Target(
        "32 tokens, int8, greedy: better of gRPC ÷ CTranslate2, least of all lengths",
        "engines_throughput",
        1.15,
        least_of_best(THROUGH_GRPC, precision="int8", search="greedy"),
    ),
    Target(
        "32 tokens, int8, beam 4: better of gRPC ÷ CTranslate2, least of all lengths",
        "engines_throughput",
        1.1,
        least_of_best(THROUGH_GRPC, precision="int8", search="beam 4"),
    ),
    Target("concurrency 1, 8, 32, 64: ratio ÷ ratio before, least of all cases", "engines", NOT_LESS, against_before),
    Target("goodput ÷ best peer's, objective 4 × unloaded", "serving-int8", 3.0, goodput),
    Target("goodput ÷ best peer's, objective 10 × unloaded", "serving-int8-10x", 2.0, goodput),
    Target("requests/s ÷ no-op server's, a call each", "overhead", 0.35, share(UNARY)),
    Target("requests/s ÷ no-op server's, 16 in a message", "overhead", 0.8, share(BATCH)),
    Target("p99 of a lone short request beside full load ÷ before", "lone", 1.05, p99_ratio, is_most=True),
    Target("sameness: answers that differ", "sameness", 0, different, is_most=True),
    Target("soak and kills, 2 engines, 2 front ends: promises missed", "soak-2x2", 0, missed_with_kills, is_most=True),
    Target("overload, 2 engines, 2 front ends: promises missed", "overload-2x2", 0, missed, is_most=True),
)


def table(kind: str, targets: Sequence[Target] = TARGETS) -> list[str]:
    """Return the table of a kind of processor."""
    rows = [target.row(read_result(target.result).sections.get(kind)) for target in targets]
    return ["| target | limit | measured | | result | of |", "|---|---|---|---|---|---|", *rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default=processor_kind(), help="Of processor, as in the results; by default this one's.")
    arguments = parser.parse_args()
    print(f"Processor: {arguments.kind}", "", *table(arguments.kind), sep="\n")


if __name__ == "__main__":
    main()
