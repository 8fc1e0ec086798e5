"""Comparisons: what is found where something changed, and how often where nothing did."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from dragoman.cli import main as dragoman
from dragoman.load.compare import NUM_DRAWS, compare
from dragoman.load.compare_command import is_worse
from dragoman.load.result import write_result
from dragoman.model.errors import InputError


def latencies(seed: int, scale: float = 1.0, num: int = 40, seconds: int = 60) -> list[list[float]]:
    generator = np.random.default_rng(seed)
    return [(scale * generator.lognormal(-3, 0.5, generator.poisson(num))).clip(1e-5, 0.7).tolist() for _ in range(seconds)]


def named(comparison) -> dict:
    return {difference.name: difference for difference in comparison.differences}


def test_a_run_against_itself_has_no_difference(make_result) -> None:
    result = make_result(latencies(1))
    for difference in compare(result, result).differences:
        assert difference.first == difference.second and not difference.is_beyond_noise


def test_slower_answers_are_worse_and_their_change_is_in_the_interval(make_result) -> None:
    found = named(compare(make_result(latencies(1)), make_result(latencies(2, scale=1.2))))
    for name, percent in (("e2e p50", 50), ("e2e p95", 95), ("e2e p99", 99)):
        difference = found[name]
        truth = np.exp(-3 + 0.5 * {50: 0.0, 95: 1.645, 99: 2.326}[percent]) * 0.2
        assert difference.low <= truth <= difference.high
    assert found["e2e p50"].is_beyond_noise and not found["e2e p50"].is_better
    assert found["e2e p50"].change == pytest.approx(0.2, abs=0.05)
    assert not found["throughput"].is_beyond_noise


def test_fewer_answers_are_worse(make_result) -> None:
    found = named(compare(make_result(latencies(1)), make_result(latencies(2, num=30))))
    throughput = found["throughput"]
    assert throughput.is_beyond_noise and not throughput.is_better
    assert throughput.low <= -10 <= throughput.high
    assert not found["errors/s"].is_beyond_noise


def test_noise_is_called_a_difference_about_as_often_as_promised(make_result) -> None:
    """Of runs that differ by chance alone one in twenty may be told apart; blocks of few seconds are a little too sure."""
    results = [make_result(latencies(seed, num=20, seconds=40)) for seed in range(80)]
    pairs = [named(compare(a, b, num_draws=300)) for a, b in zip(results[::2], results[1::2], strict=True)]
    for name in ("throughput", "e2e p50", "e2e p95"):
        assert sum(pair[name].is_beyond_noise for pair in pairs) <= 8, name


def test_neighbours_that_move_together_widen_the_interval(make_result) -> None:
    generator = np.random.default_rng(5)
    values = (20 + 15 * np.sin(np.arange(64) / 5)).astype(int)
    waves = [[0.05] * int(value) for value in values]
    shuffled = [waves[i] for i in generator.permutation(64)]
    widths = []
    for run in (waves, shuffled):
        difference = named(compare(make_result(run), make_result(run)))["throughput"]
        widths.append(difference.high - difference.low)
    assert widths[0] > 1.3 * widths[1]


def test_goodput_is_compared_where_there_are_service_levels(make_result) -> None:
    assert "goodput" not in named(compare(make_result(latencies(1)), make_result(latencies(2))))
    runs = [make_result(latencies(seed, scale), slos={"e2e": 0.06}) for seed, scale in ((1, 1.0), (2, 1.5))]
    goodput = named(compare(*runs))["goodput"]
    assert goodput.is_beyond_noise and not goodput.is_better


def test_the_warm_up_is_left_out(make_result) -> None:
    slow_start = [[0.5] * 40] * 5 + latencies(1)[5:]
    runs = [make_result(times, warmup_seconds=5.0) for times in (latencies(1), slow_start)]
    assert not any(difference.is_beyond_noise for difference in compare(*runs).differences)


def test_what_makes_runs_unlike_is_said(make_result) -> None:
    first = make_result(latencies(1, seconds=5), settings={"--rate": "10", "--in": "a"}, warnings=["careful"])
    comparison = compare(first, make_result(latencies(1), settings={"--rate": "20", "--in": "a"}, models=[]))
    assert comparison.unlike == [("--rate", "10", "20")]
    assert any("first run has 5 slices" in warning for warning in comparison.warnings)
    assert any("careful" in warning for warning in comparison.warnings)
    assert "the two runs have different models" in comparison.warnings


def test_runs_without_a_second_that_counts_are_refused(make_result) -> None:
    with pytest.raises(InputError, match="second run is too short"):
        compare(make_result(latencies(1)), make_result([]))


def test_a_comparison_is_repeatable(make_result) -> None:
    runs = make_result(latencies(1)), make_result(latencies(2))
    assert compare(*runs) == compare(*runs) and NUM_DRAWS >= 1000


@pytest.mark.parametrize(("scale", "flags", "code"), [(1.0, ["--fail-if-worse"], 0), (1.5, ["--fail-if-worse"], 3), (1.5, [], 0)])
def test_the_command_says_it_in_text_page_and_exit_code(make_result, tmp_path, monkeypatch, capsys, scale, flags, code) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, times in zip(files, (latencies(3), latencies(3, scale)), strict=True):
        write_result(path, make_result(times))
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["dragoman", "load-compare", *map(str, files), "--report", str(page), *flags])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        dragoman.main()
    assert (ended.value.code or 0) == code
    assert ("worse" in capsys.readouterr().out) == (scale > 1)
    text = page.read_text()
    assert ElementTree.fromstring(text.partition("\n")[2]).findtext("head/title") == "Two runs compared"


def test_better_is_not_worse(make_result) -> None:
    assert not is_worse(compare(make_result(latencies(3)), make_result(latencies(3, 0.5))))
