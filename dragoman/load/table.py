"""The result of a run as text, for the terminal and for logs."""

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from dragoman.load.conditions import share_good
from dragoman.load.result import Check, GroupResult, Result, Summary
from dragoman.load.show import duration, milliseconds, number, share

# Without a terminal lines are as long as they need to be.
_WIDTH = 120
# Messages that are shown.
MOST_ERRORS = 5
MEASURES = {
    "e2e": "end to end",
    "ttft": "first token",
    "itl": "between tokens",
    "queue": "queue (server)",
    "server": "server's total",
}


def print_result(result: Result, stream: TextIO) -> None:
    """Print a result."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False)
    total = result.total
    console.print(
        f"{number(total.counts.num)} requests in {result.counted_seconds:.1f} s counted: "
        f"{number(total.requests_per_second)} answers/s, {number(total.tokens_per_second)} tokens/s, {_goodput(result)}"
    )
    console.print(_times(result))
    if len(result.groups) > 1 or any(group.counts.intended for group in result.groups.values()):
        console.print(_groups(result))
    console.print(f"errors: {_codes(total.counts.failures)}; provoked: {_codes(total.counts.intended)}", markup=False)
    for line in error_lines(result):
        console.print(line, markup=False, soft_wrap=True)
    sender = result.sender
    lag = f"calls left {duration(sender.lag.figure('p99'))} late (p99), " if sender.lag.num else ""
    console.print(f"sender: {number(sender.num_sent)} calls, {lag}{sender.cpu_cores:.2f} cores in the busiest process")
    if result.sweep is not None:
        console.print(_sweep(result))
    for check in result.checks:
        console.print(f"{'FAILED' if check.is_failed else 'passed'}: {check.condition} ({measured(check)})", markup=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False)


def measured(check: Check) -> str:
    """Say what a condition was compared with, with its unit."""
    if check.value is None:
        return "nothing was measured"
    match check.unit:
        case "s":
            return f"it is {duration(check.value)}"
        case "share":
            return f"it is {share(check.value)}"
        case unit:
            return f"it is {number(check.value)}{unit}"


def error_lines(result: Result) -> list[str]:
    """Return a line for each of the most frequent failures, with what was said of it."""
    shown = result.errors[:MOST_ERRORS]
    lines = [f"  {failure.num:,} × {failure.code}: {failure.message or 'no reason given'}" for failure in shown]
    rest = sum(failure.num for failure in result.errors[MOST_ERRORS:])
    return [*lines, f"  {rest:,} others"] if rest else lines


def _goodput(result: Result) -> str:
    if not result.slos:
        return "no service levels set"
    limits = ", ".join(f"{name} {duration(limit)}" for name, limit in result.slos.items())
    return f"goodput {number(result.total.goodput)}/s ({share(share_good(result))} good: {limits})"


def _times(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="milliseconds", title_justify="left")
    table.add_column("")
    for name in ("samples", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"):
        table.add_column(name, justify="right")
    kinds = {name: group for name, group in result.groups.items() if group.times}
    for measure, label in MEASURES.items():
        summary = result.total.times.get(measure)
        if summary is not None:
            table.add_row(label, *time_cells(summary))
        if measure == "e2e" and (len(kinds) > 1 or summary is None):
            for name, group in kinds.items():
                table.add_row(f"  {name}", *time_cells(group.times["e2e"]))
    return table


def time_cells(summary: Summary) -> list[str]:
    """Return the cells of a row: number of samples, then milliseconds."""
    return [f"{summary.num:,}", milliseconds(summary.mean), *(milliseconds(summary.figure(name)) for name in summary.percentiles)]


def _groups(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="requests", title_justify="left")
    table.add_column("")
    for name in ("sent", "answered", "good", "failed", "provoked", "retries", "answers/s"):
        table.add_column(name, justify="right")
    for name, group in result.groups.items():
        table.add_row(name, *group_cells(group))
    return table


def group_cells(group: GroupResult) -> list[str]:
    """Return the cells of a row: numbers of requests, then answers a second."""
    counts = group.counts
    numbers = (counts.num, counts.num_ok, counts.num_good, group.num_failed, sum(counts.intended.values()), counts.num_retries)
    return [*(f"{count:,}" for count in numbers), number(group.requests_per_second)]


def _codes(codes: dict[str, int]) -> str:
    return ", ".join(f"{code} {count:,}" for code, count in sorted(codes.items())) or "none"


def _sweep(result: Result) -> Table:
    sweep = result.sweep
    assert sweep is not None
    knee = "no rate held" if sweep.knee is None else f"knee: {number(sweep.knee)} calls/s"
    table = Table(box=box.SIMPLE_HEAD, title=f"{knee} ({share(sweep.share)} of the requests have to be good)", title_justify="left")
    for name in ("calls/s", "holds", "good", "answers/s", "goodput/s", "p50 ms", "p95 ms", "p99 ms", "errors"):
        table.add_column(name, justify="right")
    for step in sorted(sweep.steps, key=lambda step: step.rate):
        e2e = step.times.get("e2e")
        times = [milliseconds(e2e.figure(name) if e2e else None) for name in ("p50", "p95", "p99")]
        rates = (number(step.requests_per_second), number(step.goodput))
        held = "yes" if step.is_passed else "no"
        table.add_row(number(step.rate), held, share(step.share_good), *rates, *times, f"{sum(step.failures.values()):,}")
    return table
