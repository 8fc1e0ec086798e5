"""The options of `dragoman load-compare`, and how a comparison is shown: as text, as a page, as an exit code."""

import sys
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer

from dragoman.load.compare import CONFIDENCE, Comparison, Difference, compare
from dragoman.load.plain_help import PlainCommand
from dragoman.load.result import Result, read_result
from dragoman.load.show import NOTHING, milliseconds, number, signed_share
from dragoman.load.table import Table, open_console, print_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FAILED_CODE = 3
INTERVALS = (
    "The interval is of the second figure less the first, by a block bootstrap over the seconds of each run; a difference is "
    "beyond noise if the interval leaves zero out. Noise from run to run is not in it: repeat runs to see that."
)
HEAD = ("", "first", "second", "change", f"{CONFIDENCE:.0%} interval of the difference", "")


@app.command(cls=PlainCommand, context_settings={"help_option_names": ["-h", "--help"]})
def load_compare(
    first: Annotated[Path, typer.Argument(help="Result of the run to compare with.")],
    second: Annotated[Path, typer.Argument(help="Result of the run in question.")],
    output: Annotated[Path | None, typer.Option(help="Write the comparison as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the comparison as one HTML page.")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="Exit with 3 if the second is worse beyond noise.")
    ] = False,
) -> None:
    """Compare two results of `dragoman load --output` and say which differences are beyond noise."""
    results = read_result(first), read_result(second)
    comparison = compare(*results)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")
    if report is not None:
        report.write_text(comparison_page(comparison, results, (str(first), str(second))), encoding="utf-8")
    print_comparison(comparison, sys.stdout)
    raise typer.Exit(FAILED_CODE if fail_if_worse and is_worse(comparison) else 0)


def is_worse(comparison: Comparison) -> bool:
    """Tell whether any figure of the second run is worse beyond noise."""
    return any(difference.is_beyond_noise and not difference.is_better for difference in comparison.differences)


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """Print a comparison."""
    console = open_console(stream)
    print_table(console, differences_table(comparison, ""))
    for flag, one, other in comparison.unlike:
        console.print(f"{flag}: {one or NOTHING} in the first, {other or NOTHING} in the second", markup=False)
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", markup=False)


def differences_table(comparison: Comparison, caption: str) -> Table:
    """Return the figures of both runs, times in milliseconds, others a second."""
    return Table(caption, HEAD, [cells(difference) for difference in comparison.differences])


def cells(difference: Difference) -> list[str]:
    """Return the cells of a row: times in milliseconds, everything else a second."""
    show = milliseconds if difference.is_time else number
    unit = " (ms)" if difference.is_time else ""
    change = difference.change
    signs = ["+" if end > 0 else "" for end in (difference.low, difference.high)]
    interval = f"{signs[0]}{show(difference.low)} to {signs[1]}{show(difference.high)}"
    return [
        difference.name + unit,
        show(difference.first),
        show(difference.second),
        NOTHING if change is None else signed_share(change),
        interval,
        verdict(difference),
    ]


def verdict(difference: Difference) -> str:
    """Say what the interval means."""
    if not difference.is_beyond_noise:
        return "within noise"
    return "better" if difference.is_better else "worse"


def comparison_page(comparison: Comparison, results: tuple[Result, Result], names: tuple[str, str]) -> str:
    """Return a comparison as one HTML page."""
    from dragoman.load.report import Section, render

    runs = [
        (name, result.created, f"{result.counted_seconds:.1f} s", f"{result.total.counts.num:,}", f"{result.total.num_failed:,}")
        for name, result in zip(names, results, strict=True)
    ]
    head = ("", "began", "counted", "requests", "failed")
    sections = [
        Section("Differences", [differences_table(comparison, "Times in milliseconds")], text=INTERVALS),
        Section("Runs", [Table("First and second", head, runs)]),
    ]
    if comparison.unlike:
        sections.append(Section("Settings that differ", [Table("By flag", ("", "first", "second"), comparison.unlike)]))
    return render("Two runs compared", sections, warnings=comparison.warnings)
