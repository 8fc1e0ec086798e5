"""What the benchmark `scaling` observes, and the figures it makes of that."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.report import figure_name
from benchmarks.scaling.main import Point, Sweep, figures, measure, notes, sweeps, table
from benchmarks.scaling.plot import draw
from benchmarks.scaling.probe import Probe, Trace


def test_a_trace_has_every_token_of_the_answers(endless: tuple[Path, Path]) -> None:
    probe = Probe(endless[1], 8, 1)
    for num_rows in (1, 8):
        trace = probe.trace(num_rows, source_tokens=20, target_tokens=12)
        assert len(trace.step_seconds) == len(trace.resident_bytes) == 12
        assert min(trace.step_seconds) > 0
        assert trace.first_token_seconds > 0


def test_requests_that_are_never_together_are_an_error(endless: tuple[Path, Path]) -> None:
    with pytest.raises(RuntimeError, match="5 requests with 8 source tokens were never decoded all together"):
        Probe(endless[1], 4, 1).trace(5, 8, 12)


def test_answers_that_end_by_themselves_are_an_error(shipped_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(RuntimeError, match=r"ended as eos after \d+ of 200 tokens"):
        Probe(shipped_bundle("en-de"), 4, 1).trace(4, 4, 200)


def test_figures_are_medians_but_memory_is_that_of_the_first_round() -> None:
    first = Trace([9.0] * 16 + [1.0] * 16, 0.5, list(range(0, 32_000_000, 1_000_000)))
    second = Trace([9.0] * 16 + [3.0] * 16, 0.7, [99_000_000] * 32)
    assert figures([first, second], Point(1, 16, 32)) == {"step ms": 2000, "first token ms": 600, "memory MB": 31}
    assert figures([first, second], Point(1, 16, 16)) == {"step ms": 9000, "first token ms": 600, "memory MB": 15}


class FakeProbe:
    """Steps take as many seconds as the place they are at."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def call(self, method: str, *arguments: int) -> Trace:
        assert method == "trace"
        self.calls.append(arguments)  # type: ignore[arg-type]
        steps = [float(i) for i in range(arguments[2])]
        return Trace(steps, 0.1, [0] * arguments[2])


def test_one_run_measures_all_lengths_of_answers() -> None:
    probes = {"int8": FakeProbe(), "fp32": FakeProbe()}
    sweep = Sweep("target_tokens", "target tokens", (Point(4, 16, 16), Point(4, 16, 64)))
    rows = measure(probes, sweep, 2)  # type: ignore[arg-type]
    assert probes["fp32"].calls == probes["int8"].calls == [(4, 16, 64)] * 2
    assert [(row["precision"], row["target tokens"], row["step ms"]) for row in rows] == [
        ("fp32", 16, 7500),
        ("fp32", 64, 55_500),
        ("int8", 16, 7500),
        ("int8", 64, 55_500),
    ]


def test_other_sweeps_run_every_point_from_small_to_large() -> None:
    probe = FakeProbe()
    points = Point(1, 16, 32), Point(8, 16, 32)
    rows = measure({"fp32": probe}, Sweep("rows", "rows", points), 2)  # type: ignore[dict-item]
    assert probe.calls == [(1, 16, 32), (8, 16, 32)] * 2
    assert [row["rows"] for row in rows] == [1, 8]


@pytest.mark.parametrize("is_quick", [True, False])
def test_every_sweep_rises_and_is_drawn(is_quick: bool, tmp_path: Path) -> None:
    probe = FakeProbe()
    for sweep in sweeps(is_quick):
        values = [getattr(point, sweep.name) for point in sweep.points]
        assert values == sorted(set(values))
        rows = measure({"fp32": probe, "int8": probe}, sweep, 1)  # type: ignore[dict-item]
        path = tmp_path / f"{sweep.name}.png"
        draw(path, sweep.label, [row | {"memory MB": 1.0} for row in rows])
        assert path.read_bytes().startswith(b"\x89PNG")
        assert set(table(rows)[0]) == set(rows[0])
        assert figure_name(f"scaling_{sweep.name}") in "\n".join(notes({"threads": 1, "rounds": 1}))
