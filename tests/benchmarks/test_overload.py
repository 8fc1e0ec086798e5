"""What is made of the outcomes of a load."""

from collections.abc import Sequence

import pytest

from benchmarks.harness.load import UNFINISHED, Outcome, Record
from benchmarks.harness.setting import Setting
from benchmarks.overload import Cores, Summary, percentile, result_name, summarise, verdicts

CORES = Cores(0.25, 0.5, 1.0)


def summary(factor: float, *outcomes: tuple[str, float], seconds: float = 10.0) -> Summary:
    """Summarise calls, each given as its code and latency, sent half a second late and one second apart."""
    record = Record([Outcome(i, i + 0.5, i + latency, code) for i, (code, latency) in enumerate(outcomes)], 1.0, 10.0)
    return summarise(factor, seconds, record, CORES)


def is_kept(lines: Sequence[str]) -> list[bool]:
    return [line.startswith("- kept: ") for line in lines]


@pytest.mark.parametrize(("percent", "expected"), [(1, 1.0), (50, 50.0), (95, 95.0), (99, 99.0), (100, 100.0)])
def test_percentile_is_the_smallest_value_that_covers_the_share(percent: int, expected: float) -> None:
    assert percentile([float(i) for i in range(1, 101)], percent) == expected
    assert percentile([7.0], percent) == 7.0


def test_every_call_is_counted_once() -> None:
    found = summary(2, ("OK", 1.0), ("RESOURCE_EXHAUSTED", 0.6), ("INTERNAL", 1.0), (UNFINISHED, 60.0), ("OK", 2.0))
    row = found.row(0.1)
    assert (row["sent"], row["completed"], row["rejected"], row["lost"]) == (5, 2, 1, 2)
    assert row["other codes"] == f"INTERNAL 1, {UNFINISHED} 1"
    assert row["of 1×"] == "200.0%"


def test_answers_after_the_time_of_sending_do_not_count_as_throughput() -> None:
    found = summary(1, ("OK", 1.0), ("OK", 9.5), seconds=10.0)
    assert found.completed == pytest.approx(0.1)
    assert found.num_lost == 0


def test_latency_counts_from_when_a_call_was_due() -> None:
    found = summary(1, ("OK", 3.0), ("RESOURCE_EXHAUSTED", 0.75))
    assert (found.accepted_seconds, found.rejection_seconds) == ([3.0], [0.75])
    assert found.lateness_seconds == [0.5, 0.5]


def test_promises_within_their_limits_are_kept() -> None:
    first = summary(1, *[("OK", 0.6)] * 10, seconds=20.0)
    last = summary(5, *[("OK", 0.6)] * 9, ("RESOURCE_EXHAUSTED", 0.046875), seconds=20.0)
    assert is_kept(verdicts([first, last], bound_seconds=0.61)) == [True] * 4


def test_each_broken_promise_is_named() -> None:
    first = summary(1, *[("OK", 0.6)] * 10, seconds=20.0)
    last = summary(5, *[("OK", 0.7)] * 8, ("RESOURCE_EXHAUSTED", 0.06), ("UNAVAILABLE", 0.6), seconds=20.0)
    lines = verdicts([first, last], bound_seconds=0.65)
    assert is_kept(lines) == [False] * 4
    assert "80.0% of 1×" in lines[0] and "60.0 ms" in lines[1] and ": 1 (none)" in lines[2] and "700 ms" in lines[3]


def test_a_load_without_refusals_has_no_figures_for_them() -> None:
    found = summary(1, ("OK", 1.0))
    assert found.row(found.completed)["rejection p99 ms"] == "—"
    assert is_kept(verdicts([found], bound_seconds=1.0)) == [True] * 4


def test_results_of_other_bundles_and_other_processes_stay_apart() -> None:
    one, several = Setting(1, 1, 64), Setting(2, 1, 32, 2)
    assert result_name("en-de", one) == "overload" and result_name("en-de-base-int8", one) == "overload-en-de-base-int8"
    assert result_name("en-de", several) == "overload-2x2"
