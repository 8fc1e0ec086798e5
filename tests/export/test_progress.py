"""Progress of an export: a line for each step, with its seconds and an estimate of the rest."""

from dragoman.export.progress import STEPS, Progress


def test_each_step_is_a_line_with_its_seconds_and_what_is_left() -> None:
    times, lines = iter([0.0, 2.0, 6.0, 7.0]), []
    progress = Progress({"read": 10, "prove": 20, "write": 5}, lines.append, lambda: next(times))
    for step in ("read", "prove", "write"):
        progress.done(step)
    assert lines == [
        "[1/3] read: 2.0 s; about 5 s to go",
        "[2/3] prove: 4.0 s; about 1 s to go",
        "[3/3] write: 1.0 s",
    ]


def test_progress_without_a_listener_is_silent() -> None:
    for steps in STEPS.values():
        progress = Progress(steps)
        for step in steps:
            progress.done(step)
