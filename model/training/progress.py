"""Progress of a training run on standard error: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dragoman.model.training.log import Measured, described

LINE_SECONDS = 30.0


class TrainingProgress:
    """Report of a run's progress; this one reports nothing."""

    def begin(self, name: str, num_steps: int, step: int) -> None:
        """Take note of a run of so many steps, of which some are done."""

    def stepped(self, step: int, loss: float, num_tokens: int, seconds: float) -> None:
        """Take note of a step: its loss a target token, its target tokens and its duration."""

    def validated(self, step: int, measured: Measured, best_rank: float) -> None:
        """Take note of a validation, after which the best so far has that rank."""

    def end(self) -> None:
        """Stop, whatever has happened."""


class ProgressLines(TrainingProgress):
    """A line at the first step, every `LINE_SECONDS` and at each validation, without control characters."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Write lines, which come without their end, by a clock in seconds."""
        self._write, self._clock = write, clock
        self._name, self._num_steps, self._first_step = "", 0, 0
        self._started = self._spoke = 0.0
        self._has_stepped = False
        self._tokens, self._seconds = 0, 0.0

    def begin(self, name: str, num_steps: int, step: int) -> None:
        """Say where the run takes up, if it does."""
        self._name, self._num_steps, self._first_step = name, num_steps, step
        self._started = self._spoke = self._clock()
        if step:
            self._write(f"{name}: resumed at step {step:,} of {num_steps:,}")

    def stepped(self, step: int, loss: float, num_tokens: int, seconds: float) -> None:
        """Say how fast it goes, since the last such line, and how long it will take."""
        self._tokens += num_tokens
        self._seconds += seconds
        now = self._clock()
        if self._has_stepped and now - self._spoke < LINE_SECONDS:
            return
        rate = self._tokens / max(self._seconds, 1e-9)
        left = (now - self._started) / (step - self._first_step) * (self._num_steps - step)
        self._write(
            f"{self._name}: step {step:,} of {self._num_steps:,}, loss {loss:.3f}, {rate:,.0f} tokens/s, {_duration(left)} left"
        )
        self._spoke, self._has_stepped, self._tokens, self._seconds = now, True, 0, 0.0

    def validated(self, step: int, measured: Measured, best_rank: float) -> None:
        """Say what the validation gave."""
        is_best = ", the best so far" if measured.rank == best_rank else f" (best {described(best_rank)})"
        left = (self._clock() - self._started) / max(1, step - self._first_step) * (self._num_steps - step)
        self._write(
            f"{self._name}: validation at step {step:,} of {self._num_steps:,}: {measured}{is_best}, {_duration(left)} left"
        )


class ProgressBar(TrainingProgress):
    """A bar with steps done, loss, tokens a second, the best BLEU or perplexity, time gone and time to go."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = TaskID(0)
        self._best = ""

    def begin(self, name: str, num_steps: int, step: int) -> None:
        """Draw the bar."""
        self._task = self._bar.add_task(name, total=num_steps, completed=step, detail="")
        self._bar.start()

    def stepped(self, step: int, loss: float, num_tokens: int, seconds: float) -> None:
        """Move it."""
        rate = num_tokens / max(seconds, 1e-9)
        self._bar.update(self._task, completed=step, detail=f"loss {loss:.3f}  {rate:,.0f} tokens/s{self._best}")

    def validated(self, step: int, measured: Measured, best_rank: float) -> None:
        """Keep the best score beside it."""
        self._best = f"  {described(best_rank)}"

    def end(self) -> None:
        """Leave it as it is."""
        self._bar.stop()


def progress_on(stream: TextIO) -> TrainingProgress:
    """Return a bar where `stream` is a terminal, lines where it is not."""
    if stream.isatty():
        return ProgressBar(Console(file=stream))
    return ProgressLines(lambda line: say(line, stream))


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line at once, as the command line's own."""
    print(f"dragoman: {line}", file=stream or sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
