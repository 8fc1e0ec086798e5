"""A progress bar for work line by line, for people only: without a terminal it writes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class LinesPerSecond(ProgressColumn):
    """The pace, once there is one."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        pace = task.finished_speed or task.speed
        return Text("" if pace is None else f"{pace:,.1f} lines/s")


@contextmanager
def line_progress(stream: TextIO | None, description: str, total: int, num_done: int = 0) -> Iterator[Callable[[], None]]:
    """Show a bar while the block runs.

    Args:
        stream: Where to show it; None, or one that is no terminal, shows nothing.
        description: What is worked on.
        total: Lines in all.
        num_done: Of these done already.

    Yields:
        What to call after each line.
    """
    if stream is None or not stream.isatty():
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        LinesPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        task = progress.add_task(description, total=total, completed=num_done)
        yield lambda: progress.advance(task)
