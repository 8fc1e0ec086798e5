import io

import pytest
from rich.console import Console

from dragoman.model.training.measured import Measured
from dragoman.model.training.progress import ProgressBar, ProgressLines, progress_on


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def progress(clock: Clock, lines: list[str]) -> ProgressLines:
    return ProgressLines(lines.append, clock)


def test_a_line_comes_at_the_first_step_and_then_every_half_minute(progress, clock: Clock, lines: list[str]) -> None:
    progress.begin("toy", 1000, 0)
    for step in range(1, 72):
        clock.now += 1.0
        progress.stepped(step, 4.5 - step / 100, 200, 0.5)
    assert lines == [
        "toy: step 1 of 1,000, loss 4.490, 400 tokens/s, 0:16:39 left",
        "toy: step 31 of 1,000, loss 4.190, 400 tokens/s, 0:16:09 left",
        "toy: step 61 of 1,000, loss 3.890, 400 tokens/s, 0:15:39 left",
    ]


def test_speed_is_that_since_the_last_line(progress, clock: Clock, lines: list[str]) -> None:
    progress.begin("toy", 100, 0)
    for step, num_tokens in ((1, 100), (2, 200), (3, 400)):
        clock.now += 20.0
        progress.stepped(step, 1.0, num_tokens, 10.0)
    assert [line.split(", ")[2] for line in lines] == ["10 tokens/s", "30 tokens/s"]


def test_each_validation_is_a_line_with_the_best_score(progress, clock: Clock, lines: list[str]) -> None:
    progress.begin("toy", 400, 0)
    clock.now += 60.0
    progress.validated(100, Measured(2.5, 12.0, 1.0), 12.0)
    clock.now += 60.0
    progress.validated(200, Measured(2.25, 11.0, 1.0), 12.0)
    progress.end()
    assert lines == [
        "toy: validation at step 100 of 400: loss 2.500, BLEU 12.00, the best so far, 0:03:00 left",
        "toy: validation at step 200 of 400: loss 2.250, BLEU 11.00 (best BLEU 12.00), 0:02:00 left",
    ]


def test_time_left_of_a_resumed_run_follows_its_own_steps(progress, clock: Clock, lines: list[str]) -> None:
    progress.begin("toy", 5000, 4000)
    clock.now += 2.0
    progress.stepped(4001, 1.0, 100, 2.0)
    assert lines == ["toy: resumed at step 4,000 of 5,000", "toy: step 4,001 of 5,000, loss 1.000, 50 tokens/s, 0:33:18 left"]


def test_a_run_that_had_ended_only_validates(progress, lines: list[str]) -> None:
    progress.begin("toy", 10, 10)
    progress.validated(10, Measured(1.0, 5.0, 1.0), 5.0)
    assert lines[-1] == "toy: validation at step 10 of 10: loss 1.000, BLEU 5.00, the best so far, 0:00:00 left"


def test_without_a_terminal_lines_are_plain() -> None:
    stream = io.StringIO()
    progress = progress_on(stream)
    progress.begin("toy", 10, 0)
    progress.stepped(1, 2.0, 10, 1.0)
    progress.validated(1, Measured(2.0, 5.0, 1.0), 5.0)
    progress.end()
    text = stream.getvalue()
    assert text.count("\n") == 2 and text.replace("\n", "").isprintable()
    assert all(line.startswith("dragoman: toy: ") for line in text.splitlines())


def test_on_a_terminal_there_is_a_bar() -> None:
    assert isinstance(progress_on(Terminal()), ProgressBar)
    stream = io.StringIO()
    bar = ProgressBar(Console(file=stream, force_terminal=True, width=120))
    bar.begin("toy", 10, 0)
    bar.validated(1, Measured(2.0, 5.0, 1.0), 7.5)
    bar.stepped(2, 1.25, 10, 1.0)
    bar.end()
    assert "2/10" in stream.getvalue() and "loss 1.250" in stream.getvalue() and "BLEU 7.50" in stream.getvalue()
