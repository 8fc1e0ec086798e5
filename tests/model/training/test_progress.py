"""Progress of a run in a log, and the tables of its steps on disk."""

import math
from pathlib import Path

import pytest

from dragoman.model.likelihood import Likelihood
from dragoman.model.training import log as logs
from dragoman.model.training.log import CsvLog, Measured, plot_curves, read_rows
from dragoman.model.training.progress import ProgressLines
from tests.clock import Clock


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
        progress.stepped(step, 4.5 - step / 100, 200 if step < 40 else 400, 0.5)
    assert lines == [
        "toy: step 1 of 1,000, loss 4.490, 400 tokens/s, 0:16:39 left",
        "toy: step 31 of 1,000, loss 4.190, 400 tokens/s, 0:16:09 left",
        "toy: step 61 of 1,000, loss 3.890, 693 tokens/s, 0:15:39 left",  # since the last line
    ]


def test_validations_and_a_resumed_run_are_lines(progress, clock: Clock, lines: list[str]) -> None:
    progress.begin("toy", 400, 0)
    for step, loss, bleu in ((100, 2.5, 12.0), (200, 2.25, 11.0)):
        clock.now += 60.0
        progress.validated(step, Measured(loss, bleu, 1.0), 12.0)
    progress.end()
    assert lines == [
        "toy: validation at step 100 of 400: loss 2.500, BLEU 12.00, the best so far, 0:03:00 left",
        "toy: validation at step 200 of 400: loss 2.250, BLEU 11.00 (best BLEU 12.00), 0:02:00 left",
    ]
    progress.begin("toy", 5000, 4000)
    clock.now += 2.0
    progress.stepped(4001, 1.0, 100, 2.0)
    assert lines[2:] == ["toy: resumed at step 4,000 of 5,000", "toy: step 4,001 of 5,000, loss 1.000, 50 tokens/s, 0:33:18 left"]
    progress.begin("toy", 10, 10)  # a run that had ended only validates
    progress.validated(10, Measured(1.0, 5.0, 1.0), 5.0)
    assert lines[-1] == "toy: validation at step 10 of 10: loss 1.000, BLEU 5.00, the best so far, 0:00:00 left"
    assert str(Measured(math.log(8))) == "loss 2.079, perplexity 8.00" and str(Measured(0.0)) == "loss 0.000, perplexity 1.00"
    assert str(Measured(1e4)) == "loss 10000.000, perplexity inf" and Likelihood.of([[-1e4]]).perplexity == math.inf


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        ("step,loss\n1,0.5\n2,0.25\n3,0.125\n", 2, "step,loss\n1,0.5\n2,0.25\n"),  # rows beyond the saved state
        *((f"step,loss\n1,0.5\n11,0.25\n{torn}", 11, "step,loss\n1,0.5\n11,0.25\n") for torn in ("", "1", "12", "12,", "12,0.0")),
        *((torn, 0, "step,loss\n") for torn in ("", "ste", "step,lo", "step,loss")),
    ],
)
def test_resuming_drops_torn_rows_and_those_beyond_the_saved_state(tmp_path: Path, before: str, step: int, after: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(before, encoding="utf-8")
    log = CsvLog(path, ("step", "loss"), step)
    log.write(step + 1, 0.1)
    assert path.read_text(encoding="utf-8") == f"{after}{step + 1},0.1\n", "a row is on disk as soon as it is written"
    log.close()
    path.write_text("step,loss\n1,0.5\n2", encoding="utf-8")
    assert read_rows(path) == [{"step": "1", "loss": "0.5"}]


@pytest.mark.parametrize("num_steps", [0, 450])
def test_curves_are_drawn(tmp_path: Path, num_steps: int) -> None:
    steps = CsvLog(tmp_path / logs.STEPS_FILE, logs.STEP_FIELDS, 0)
    validations = CsvLog(tmp_path / logs.VALIDATION_FILE, logs.VALIDATION_FIELDS, 0)
    for step in range(1, num_steps + 1):
        steps.write(step, 0, 9000 / step, 0.1, 1.0, 100, 0.5)
    for loss in (9000, 2.5):
        validations.write(num_steps, 1, loss, *((12.0, 30.0) if num_steps > 1 else ("", "")))
    plot_curves(tmp_path)
    steps.close()
    validations.close()
    assert (tmp_path / logs.CURVES_FILE).read_bytes().startswith(b"\x89PNG")
