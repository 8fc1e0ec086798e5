import io

from rich.console import Console

from dragoman.load.arrivals import Arrivals
from dragoman.load.live import picture, watching
from dragoman.load.run import Run
from dragoman.load.sender import Progress
from dragoman.load.tally import Outcome, Tally


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_run(make_plan) -> Run:
    run = Run(make_plan(arrivals=Arrivals(10.0), seconds=30.0))
    tally = Tally()
    for due in range(8):
        for i in range(10):
            tally.record(Outcome("unary", False, due + i / 20, due + i / 20 + 0.25), {}, 0.0, 30.0)
    tally.record(Outcome("unary", False, 7.0, 7.1, "UNAVAILABLE"), {}, 0.0, 30.0)
    run._take(0, Progress(tally, 81, 3, 0.1, 30.0))
    return run


def test_the_picture_has_pace_latency_and_errors(make_plan) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(picture(make_run(make_plan), "load on somewhere"))
    text = out.getvalue()
    assert "load on somewhere" in text and "UNAVAILABLE 1" in text
    assert "10.0/s" in text and "3 in flight" in text
    assert "p50 250" in text


def test_progress_is_for_terminals_only(make_plan) -> None:
    run = make_run(make_plan)
    for stream, is_shown in ((io.StringIO(), False), (Terminal(), True)):
        with watching(stream, lambda: "load on somewhere") as refresh:
            refresh(run)
        assert ("load on somewhere" in stream.getvalue()) == is_shown


def test_a_run_that_has_not_begun_has_a_picture(make_plan) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(picture(Run(make_plan(concurrency=1)), "soon"))
    assert "none" in out.getvalue()
