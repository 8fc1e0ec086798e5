"""Live view of a run in the terminal; without a terminal nothing is written."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dragoman.load.run import Run
from dragoman.load.show import duration
from dragoman.load.tally import Slice

_RECENT_SLICES = 5


@contextmanager
def watching(stream: TextIO, title: Callable[[], str]) -> Iterator[Callable[[Run], None]]:
    """Show runs with a title on a terminal while the block lasts; yield the function to call with the run as it goes on."""
    if not stream.isatty():
        yield lambda run: None
        return
    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        yield lambda run: live.update(picture(run, title()), refresh=True)


def picture(run: Run, title: str) -> Group:
    """Return what is shown of a run."""
    elapsed = max(0.0, run.elapsed)
    numbers = sorted(run.timeline.slices)
    recent, whole = Slice(), Slice()  # the last slices, and those before the one that goes on
    for number in numbers[-_RECENT_SLICES:]:
        recent.merge(run.timeline.slices[number])
    for number in numbers[-_RECENT_SLICES - 1 : -1]:
        whole.merge(run.timeline.slices[number])
    seconds = len(numbers[-_RECENT_SLICES - 1 : -1]) * run.timeline.width
    table = Table.grid(padding=(0, 2))
    is_warming_up = elapsed < run.plan.warmup_seconds
    table.add_row("time", f"{elapsed:,.0f} of {run.plan.seconds:,.0f} s" + (", warming up" if is_warming_up else ""))
    in_flight = sum(progress.num_in_flight for progress in run.latest.values())
    table.add_row("answers", f"{whole.num_done / max(seconds, 1):,.1f}/s   {in_flight:,} in flight")
    for name, histogram in (("latency", recent.e2e), ("first token", recent.ttft)):
        if histogram.num:
            p50, p95, p99 = map(histogram.percentile, (50, 95, 99))
            table.add_row(name, f"p50 {duration(p50)}   p95 {duration(p95)}   p99 {duration(p99)}")
    lag = run.tally.lag.percentile(99)
    if lag is not None:
        table.add_row("sent late", f"p99 {duration(lag)}")
    failures = Counter[str]()
    for group in run.tally.groups.values():
        failures.update(group.failures)
    errors = ", ".join(f"{code} {count:,}" for code, count in sorted(failures.items()))
    table.add_row("errors", Text(errors or "none", style="red" if errors else "green"))
    for failure in run.tally.failures.most_frequent()[:1]:
        table.add_row("", Text(f"{failure.code}: {failure.message}", style="red", overflow="ellipsis", no_wrap=True))
    bar = ProgressBar(total=run.plan.seconds, completed=min(elapsed, run.plan.seconds), width=60)
    return Group(Text(title, style="bold"), bar, table)
