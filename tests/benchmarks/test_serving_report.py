"""What the benchmark `serving` writes."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import report
from benchmarks.peers.server import KINDS, Settings
from benchmarks.serving.comparison import Comparison, Standing
from benchmarks.serving.contender import Contender, Models
from benchmarks.serving.goodput import Point
from benchmarks.serving.report import Setup, curve, goodput, row, verdict, write_report

SETUP = Setup("en-de-base", "int8", 10.0, 3, True, {"litserve": "benchmarks/peers/setup.sh x litserve"}, {"mosec": "0.9.8"})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "serving-int8"),
        ({"objective_factor": 10.0}, "serving-int8-10x"),
        ({"has_flags": True}, "serving-int8-set"),
        ({"objective_factor": 2.5, "has_flags": True, "precision": "fp32"}, "serving-fp32-2.5x-set"),
    ],
)
def test_what_was_asked_for_otherwise_replaces_no_result_of_the_defaults(changes: dict[str, Any], name: str) -> None:
    assert replace(SETUP, **changes).result_name == name


def point(rung: int, value: float, seconds: float = 0.2, failures: Counter[str] | None = None) -> Point:
    return Point(rung, value, seconds, seconds / 2, 0.001, failures or Counter(), 100, 0.25)


def standing(knees: list[Point | None], kind: int | None = None) -> Standing:
    contender = Contender(None if kind is None else KINDS[kind], Models("m", Path("b"), Path("c"), "int8"), Path("e"))
    settings = None if kind is None else Settings(2, 1, 1, 32, 5)
    points = [knee for knee in knees if knee]
    return Standing(contender, settings, unloaded_seconds=0.05, answers=["a", "b"], knees=knees, points=points)


def test_goodput_is_the_median_of_the_rounds() -> None:
    assert goodput(standing([point(1, 30.0), point(2, 10.0), point(3, 20.0)])) == 20.0


def test_a_round_without_a_knee_counts_as_nothing() -> None:
    assert goodput(standing([None, point(2, 10.0), None])) == 0.0
    assert row(standing([None, point(2, 10.0), None]), 30.0, 1.0, 10.0)["rounds"] == "0.0 to 10.0"
    assert row(standing([None]), 30.0, 1.0, 0.0)["p95 ms"] == "—"


def test_a_row_has_what_was_measured_at_the_knee() -> None:
    found = row(standing([point(10, 20.0, failures=Counter(UNAVAILABLE=2))], kind=1), 30.04, 0.985, 40.0)
    assert found["server"] == "mosec"
    assert found["goodput/s"] == "20.0" and found["of dragoman's"] == "0.50"
    assert found["offered/s"] == "2.2" and found["p50 ms"] == "100" and found["p95 ms"] == "200"
    assert found["not answered"] == "UNAVAILABLE 2"
    assert found["BLEU"] == "30.0" and found["same answers"] == "98.5%"
    assert found["settings"] == "2 × 1 threads (2 batches at a time), max batch 32, delay 5 ms"


def test_the_verdict_compares_with_the_best_peer() -> None:
    ours, good, bad = standing([point(1, 50.0)]), standing([point(1, 25.0)], 0), standing([point(1, 5.0)], 1)
    assert verdict([ours, bad, good]) == "- kept: 2.00 times triton's goodput (at least 2)"
    assert verdict([standing([point(1, 49.0)]), bad, good]) == "- MISSED: 1.96 times triton's goodput (at least 2)"


def test_there_is_no_verdict_without_two_sides() -> None:
    assert verdict([standing([point(1, 50.0)])]) == "There was nobody to compare with."
    assert verdict([standing([point(1, 50.0)], 0)]) == "There was nobody to compare with."
    assert verdict([standing([point(1, 50.0)]), standing([None], 0)]) == "No peer met the objective at any rate."


def test_other_objectives_have_results_of_their_own() -> None:
    assert SETUP.result_name == "serving-int8" and replace(SETUP, objective_factor=10).result_name == "serving-int8-10x"


def test_a_latency_that_never_ended_is_null() -> None:
    (found,) = curve([point(0, 1.0, math.inf, Counter(UNFINISHED=9))])
    assert found["p95_seconds"] is None and found["p50_seconds"] is None
    assert found["failures"] == {"UNFINISHED": 9}
    assert json.loads(json.dumps(found, allow_nan=False))["offered"] == 1.0


def test_table_figures_and_plot_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="draws the figure")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "processor_kind", lambda: "avx2")
    standings = [standing([point(20, 50.0), point(21, 52.0)]), standing([point(12, 20.0), point(12, 21.0, math.inf)], 0)]
    share = Comparison.share_of_same
    compared: Any = SimpleNamespace(standings=standings, objective=0.4)
    compared.share_of_same = lambda standing: share(compared, standing)
    write_report(compared, {"dragoman": 36.5, "triton": 36.25}, SETUP)
    table = (tmp_path / "serving-int8.md").read_text(encoding="utf-8")
    assert "within 400 ms" in table and "2.49 times triton's goodput" in table
    assert "litserve was not installed; `benchmarks/peers/setup.sh x litserve`" in table and "mosec 0.9.8" in table
    written = json.loads((tmp_path / "serving-int8.json").read_text(encoding="utf-8"))
    assert [len(points) for points in written["kinds"]["avx2"]["environment"]["curves"].values()] == [2, 2]
    assert (tmp_path / "serving-int8-avx2.png").read_bytes().startswith(b"\x89PNG")
