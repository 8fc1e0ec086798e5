"""Live view of a run in the terminal; without a terminal nothing is written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dragoman.load.histogram import Histogram
from dragoman.load.run import Run
from dragoman.load.show import duration

_RECENT_SLICES = 5


@contextmanager
def watching(stream: TextIO, title: Callable[[], str]) -> Iterator[Callable[[Run], None]]:
    """Show runs while the block lasts.

    Args:
        stream: Where; one that is no terminal shows nothing.
        title: What is being done.

    Yields:
        What to call with the run as it goes on.
    """
    if not stream.isatty():
        yield lambda run: None
        return
    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        yield lambda run: live.update(picture(run, title()), refresh=True)


def picture(run: Run, title: str) -> Group:
    """Return what is shown of a run."""
    elapsed = max(0.0, run.elapsed)
    failures: dict[str, int] = {}
    for group in run.tally.groups.values():
        for code, count in group.failures.items():
            failures[code] = failures.get(code, 0) + count
    table = Table.grid(padding=(0, 2))
    is_warming_up = elapsed < run.plan.warmup_seconds
    table.add_row("time", f"{elapsed:,.0f} of {run.plan.seconds:,.0f} s" + (", warming up" if is_warming_up else ""))
    in_flight = sum(progress.num_in_flight for progress in run.latest.values())
    table.add_row("answers", f"{_recent_rate(run):,.1f}/s   {in_flight:,} in flight")
    for name, histogram in (("latency", _recent(run, "e2e")), ("first token", _recent(run, "ttft"))):
        if histogram.num:
            p50, p95, p99 = histogram.percentiles((50, 95, 99))
            table.add_row(name, f"p50 {duration(p50)}   p95 {duration(p95)}   p99 {duration(p99)}")
    lag = run.tally.lag.percentile(99)
    if lag is not None:
        table.add_row("sent late", f"p99 {duration(lag)}")
    errors = ", ".join(f"{code} {count:,}" for code, count in sorted(failures.items()))
    table.add_row("errors", Text(errors or "none", style="red" if errors else "green"))
    worst = run.tally.failures.most_frequent()[:1]
    for failure in worst:
        table.add_row("", Text(f"{failure.code}: {failure.message}", style="red", overflow="ellipsis", no_wrap=True))
    bar = ProgressBar(total=run.plan.seconds, completed=min(elapsed, run.plan.seconds), width=60)
    return Group(Text(title, style="bold"), bar, table)


def _recent(run: Run, measure: str) -> Histogram:
    """Return the times of the last seconds, of the whole run where there are none."""
    recent = Histogram()
    for number in sorted(run.timeline.slices)[-_RECENT_SLICES:]:
        recent.merge(getattr(run.timeline.slices[number], measure))
    return recent


def _recent_rate(run: Run) -> float:
    """Return answers a second in the last whole slices."""
    numbers = sorted(run.timeline.slices)[-_RECENT_SLICES - 1 : -1]
    return sum(run.timeline.slices[number].num_done for number in numbers) / (len(numbers) * run.timeline.width) if numbers else 0.0
