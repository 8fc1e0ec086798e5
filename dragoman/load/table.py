"""Tables of a result, for the terminal and for the HTML report."""

from collections.abc import Sequence
from typing import NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dragoman.load.compare import CONFIDENCE, Comparison
from dragoman.load.conditions import share_good
from dragoman.load.result import Check, Result, Summary
from dragoman.load.show import NOTHING, duration, milliseconds, number, share

# Without a terminal lines are as long as they need to be.
_WIDTH = 120
MOST_ERRORS, MOST_REPORTED_ERRORS = 5, 20
NO_REASON = "no reason given"
MEASURES = {
    "e2e": "end to end",
    "ttft": "first token",
    "itl": "between tokens",
    "queue": "queue (server)",
    "server": "server's total",
}
TIMES = ("", "samples", "mean", "p50", "p90", "p95", "p99", "p99.9", "max")
GROUPS = ("", "sent", "answered", "good", "failed", "provoked", "retries", "answers/s")
STEPS = ("calls/s", "holds", "good", "answers/s", "goodput/s", "p50 ms", "p95 ms", "p99 ms", "errors")
DIFFERENCES = ("", "first", "second", "change", f"{CONFIDENCE:.0%} interval of the difference", "")


class Table(NamedTuple):
    """A table; the first cell of each row is its heading."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def times_table(result: Result) -> Table:
    """Return the percentiles of each measure, those of `e2e` also by kind of call."""
    rows = []
    kinds = {name: group for name, group in result.groups.items() if "e2e" in group.times}
    for measure, label in MEASURES.items():
        summary = result.total.times.get(measure)
        if summary is not None:
            rows.append((label, *_time_cells(summary)))
        if measure == "e2e" and (len(kinds) > 1 or summary is None):
            rows += [(f"… {name}", *_time_cells(group.times["e2e"])) for name, group in kinds.items()]
    return Table("Milliseconds", TIMES, rows)


def groups_table(result: Result) -> Table:
    """Return the numbers of requests by kind of call or misbehaviour, and in total."""
    groups = dict(result.groups)
    if len(groups) != 1:
        groups["all"] = result.total
    rows = []
    for name, group in groups.items():
        counts = group.counts
        provoked = sum(counts.intended.values())
        numbers = (counts.num, counts.num_ok, counts.num_good, group.num_failed, provoked, counts.num_retries)
        rows.append((name, *(f"{count:,}" for count in numbers), number(group.requests_per_second)))
    return Table("Requests by the kind of call, or by how it misbehaved on purpose", GROUPS, rows)


def error_tables(result: Result) -> list[Table]:
    """Return failures by status, and the most frequent messages; none if nothing failed."""
    counts = result.total.counts
    codes = sorted({*counts.failures, *counts.intended})
    if not codes:
        return []
    rows = [(code, f"{counts.failures.get(code, 0):,}", f"{counts.intended.get(code, 0):,}") for code in codes]
    tables = [Table("Failures by status", ("", "failed", "provoked"), rows)]
    if result.errors:
        errors = result.errors[:MOST_REPORTED_ERRORS]
        messages = [(f"{error.code}: {error.message or NO_REASON}", f"{error.num:,}") for error in errors]
        tables.append(Table("The most frequent failures", ("", "requests"), messages))
    return tables


def sweep_table(result: Result) -> Table:
    """Return the rates of a sweep."""
    sweep = result.sweep
    assert sweep is not None
    rows = []
    for step in sorted(sweep.steps, key=lambda step: step.rate):
        e2e = step.times.get("e2e")
        times = [milliseconds(e2e.figure(name) if e2e else None) for name in ("p50", "p95", "p99")]
        rates = (number(step.requests_per_second), number(step.goodput))
        failed = f"{sum(step.failures.values()):,}"
        rows.append((number(step.rate), "yes" if step.is_passed else "no", share(step.share_good), *rates, *times, failed))
    return Table(f"Rates; one holds if {share(sweep.share)} of the requests are good", STEPS, rows)


def checks_table(result: Result) -> Table:
    """Return the conditions of `--fail-on`."""
    rows = [(check.condition, "failed" if check.is_failed else "passed", _measured(check)) for check in result.checks]
    return Table("The run fails if", ("condition", "", "measured"), rows)


def sender_table(result: Result) -> Table:
    """Return how late the sender was."""
    sender = result.sender
    cores = f"the busiest used {sender.cpu_cores:.2f} cores"
    caption = f"Milliseconds; {sender.num_sent:,} calls from {sender.num_processes} process(es), {cores}"
    lags = (("sent late", sender.lag), ("event loop late", sender.loop_lag))
    return Table(caption, TIMES, [(label, *_time_cells(lag)) for label, lag in lags if lag.num])


def print_result(result: Result, stream: TextIO) -> None:
    """Print a result."""
    console = _open_console(stream)
    total, sender = result.total, result.sender
    goodput = "no service levels set"
    if result.slos:
        limits = ", ".join(f"{name} {duration(limit)}" for name, limit in result.slos.items())
        goodput = f"goodput {number(total.goodput)}/s ({share(share_good(result))} good: {limits})"
    console.print(
        f"{number(total.counts.num)} requests in {result.counted_seconds:.1f} s counted: "
        f"{number(total.requests_per_second)} answers/s, {number(total.tokens_per_second)} tokens/s, {goodput}"
    )
    _print_table(console, times_table(result))
    if len(result.groups) > 1 or total.counts.intended:
        _print_table(console, groups_table(result))
    lines = [f"errors: {_codes(total.counts.failures)}; provoked: {_codes(total.counts.intended)}"]
    lines += [f"  {error.num:,} × {error.code}: {error.message or NO_REASON}" for error in result.errors[:MOST_ERRORS]]
    if rest := sum(error.num for error in result.errors[MOST_ERRORS:]):
        lines.append(f"  {rest:,} others")
    lag = f"calls left {duration(sender.lag.figure('p99'))} late (p99), " if sender.lag.num else ""
    lines.append(f"sender: {number(sender.num_sent)} calls, {lag}{sender.cpu_cores:.2f} cores in the busiest process")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if result.sweep is not None:
        knee = result.sweep.knee
        console.print("no rate held" if knee is None else f"knee: {number(knee)} calls/s")
        _print_table(console, sweep_table(result))
    for check in result.checks:
        console.print(f"{'FAILED' if check.is_failed else 'passed'}: {check.condition} ({_measured(check)})", markup=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False)


def differences_table(comparison: Comparison, caption: str) -> Table:
    """Return the figures of both runs, times in milliseconds, others a second."""
    rows = []
    for difference in comparison.differences:
        show = milliseconds if difference.is_time else number
        low, high = (("+" if end > 0 else "") + show(end) for end in (difference.low, difference.high))
        change = NOTHING if difference.change is None else f"{difference.change * 100:+.1f} %"
        name = difference.name + (" (ms)" if difference.is_time else "")
        rows.append((name, show(difference.first), show(difference.second), change, f"{low} to {high}", difference.verdict))
    return Table(caption, DIFFERENCES, rows)


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """Print a comparison."""
    console = _open_console(stream)
    _print_table(console, differences_table(comparison, ""))
    for flag, one, other in comparison.unlike:
        console.print(f"{flag}: {one or NOTHING} in the first, {other or NOTHING} in the second", markup=False)
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", markup=False)


def _open_console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False)


def _print_table(console: Console, table: Table) -> None:
    """Print a table; columns are right-aligned but for the first."""
    shown = RichTable(box=box.SIMPLE_HEAD, title=Text(table.caption) if table.caption else None, title_justify="left")
    for place, name in enumerate(table.head):
        shown.add_column(name, justify="right" if place else "left")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _measured(check: Check) -> str:
    """Return the value that a condition was compared with, with its unit."""
    if check.value is None:
        return "nothing was measured"
    texts = {"s": duration, "share": share}
    return f"it is {texts[check.unit](check.value) if check.unit in texts else number(check.value) + check.unit}"


def _time_cells(summary: Summary) -> list[str]:
    return [f"{summary.num:,}", milliseconds(summary.mean), *(milliseconds(summary.figure(name)) for name in summary.percentiles)]


def _codes(codes: dict[str, int]) -> str:
    return ", ".join(f"{code} {count:,}" for code, count in sorted(codes.items())) or "none"
