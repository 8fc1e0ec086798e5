"""Figures of a run: histograms, tallies, the timeline, conditions, the search for the knee, scraped metrics, the result file."""

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.load.conditions import parse_conditions, share_good
from dragoman.load.histogram import PERCENTS, Histogram
from dragoman.load.result import Check, Result, Step, Sweep, encode, read_result, summarise
from dragoman.load.run import slow_sender
from dragoman.load.scrape import MAX_POINTS, Point, Scraper, ServerSeries, parse
from dragoman.load.session import KneeSearch
from dragoman.load.tally import MAX_CHARACTERS, MAX_MESSAGES, OTHERS, UNSENT, Failure, Failures, Group, Outcome, Tally, Timeline
from dragoman.model.errors import InputError
from tests.load.conftest import ROOT, make_result


def of(samples: Iterable[float]) -> Histogram:
    histogram = Histogram()
    for seconds in samples:
        histogram.add(seconds)
    return histogram


@settings(max_examples=50)
@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=300), st.integers(0, 300))
def test_percentiles_are_those_of_all_samples_however_they_are_merged(samples: list[float], cut: int) -> None:
    histogram = of(samples[:cut])
    histogram.merge(of(samples[cut:]))
    histogram.merge(Histogram())
    expected = np.percentile(samples, PERCENTS, method="inverted_cdf")
    assert [*map(histogram.percentile, PERCENTS)] == pytest.approx(expected, rel=0.0026)
    assert (histogram.num, histogram.smallest, histogram.largest) == (len(samples), min(samples), max(samples))
    assert histogram.bins == of(samples).bins and histogram.mean == pytest.approx(np.mean(samples))


def test_histograms_of_few_samples_and_of_many() -> None:
    assert [*map(of([0.5, 0.1]).percentile, (50, 51, 99.9))] == [pytest.approx(0.1, rel=0.003), 0.5, 0.5]
    empty = Histogram()
    assert (empty.percentile(50), empty.percentile(99), empty.mean, empty.share_within(1.0)) == (None, None, None, None)
    backwards = of([-0.5, 0.0])  # clocks of two processes
    assert (backwards.num, backwards.total, backwards.percentile(99)) == (2, 0.0, 0.0)
    assert of([0.1, 0.2, 0.3, 0.4]).share_within(0.25) == 0.5 and of([0.1, 0.2]).share_within(0.1) == 0.5
    assert len(of(np.random.default_rng(3).lognormal(-3, 2, 50_000).tolist()).bins) < 4000


def outcome(due: float, seconds: float, **fields: object) -> Outcome:
    return Outcome(**{"group": "unary", "is_injected": False, "due": due, "ended": due + seconds} | fields)


def tally_of(outcomes: list[Outcome], slos: dict[str, float] | None = None, start: float = 0.0, end: float = 100.0) -> Tally:
    tally = Tally()
    for one in outcomes:
        tally.record(one, slos or {}, start, end)
    return tally


def test_latency_counts_by_the_time_due_and_throughput_by_the_end() -> None:
    """In the time from 1 to 4 seconds."""
    before, within, after = outcome(0.5, 2.0, generated_tokens=7), outcome(1.0, 0.5), outcome(3.5, 2.0, generated_tokens=2)
    tally = tally_of([before, within, after, outcome(4.0, 1.0), outcome(0.2, 0.8)], start=1.0, end=4.0)
    group, slices = tally.groups["unary"], tally.slices
    assert (group.num, group.num_ok, group.num_done, group.num_done_tokens, group.times["e2e"].num) == (2, 2, 3, 7, 2)
    assert [(slices[n].num_due, slices[n].num_done) for n in range(6)] == [(2, 0), (1, 2), (0, 1), (1, 0), (1, 0), (0, 2)]


def test_an_answer_is_good_within_every_limit() -> None:
    for fields, is_good in (
        ({}, True),
        ({"seconds": 0.5}, True),
        ({"seconds": 0.625}, False),
        ({"first_token": 10.25}, False),
        ({"first_token": 10.125}, True),
        ({"first_token": 10.05, "gaps": [0.03, 0.01]}, True),
        ({"first_token": 10.05, "gaps": [0.03, 0.03]}, False),
        ({"code": "INTERNAL"}, False),
        ({"is_injected": True}, False),
    ):
        tally = tally_of([outcome(10.0, **({"seconds": 0.4} | fields))], {"e2e": 0.5, "ttft": 0.125, "itl": 0.02})
        group, due = tally.groups["unary"], tally.slices[10]
        assert group.num_good == group.num_done_good == due.num_good == is_good, fields


def test_intended_failures_and_injected_times_are_counted_apart() -> None:
    cancel = {"group": "cancel", "is_injected": True}
    tally = tally_of(
        [
            outcome(0.0, 0.1, **cancel, code="CANCELLED", is_intended=True),
            outcome(0.0, 0.1, **cancel, code="UNAVAILABLE", message="gone"),
            outcome(0.5, 9.0, group="slow", is_injected=True),
            outcome(0.5, 0.1, code=UNSENT),
            outcome(200.0, 0.1, code="LATE"),
        ]
    )
    group = tally.groups["cancel"]
    assert (group.intended, group.failures, tally.slices[0].num_failed) == ({"CANCELLED": 1}, {"UNAVAILABLE": 1}, 2)
    assert tally.slices[0].e2e.num == 0 and tally.groups["slow"].times["e2e"].num == 1
    told = [(failure.code, failure.message) for failure in tally.failures.most_frequent()]
    assert told == [("UNAVAILABLE", "gone"), (UNSENT, "not sent: too many calls were under way")]


def test_groups_add_up_and_survive_the_wire() -> None:
    whole = Group()
    for number_ in range(2):
        outcomes = [outcome(i / 10, 0.01 * (i + 1), first_token=i / 10 + 0.005, gaps=[0.001], num_retries=1) for i in range(5)]
        outcomes += [outcome(0.5, 0.1, code=f"CODE{number_}"), outcome(0.5, 0.1, queue_seconds=0.1, server_seconds=0.2)]
        tally = tally_of(outcomes)
        received = msgspec.json.decode(msgspec.json.encode(tally), type=Tally)
        assert received == tally
        whole.merge(received.groups["unary"])
    assert (whole.num, whole.num_ok, whole.num_retries, whole.failures) == (14, 12, 10, {"CODE0": 1, "CODE1": 1})
    assert {name: times.num for name, times in whole.times.items()} == {"e2e": 12, "ttft": 10, "itl": 10, "queue": 2, "server": 2}


def test_a_timeline_stays_bounded_and_loses_nothing() -> None:
    timeline = Timeline(max_slices=10)
    for second in range(95):
        tally = tally_of([outcome(float(second), 0.001 * (second + 1))], end=math.inf)
        tally.slice_at(float(second)).in_flight = second % 7
        timeline.add(0, tally.slices)
    slices = timeline.list()
    assert (timeline.width, len(slices), {piece.in_flight for piece in slices}) == (16, 6, {6})
    assert [(piece.num_due, piece.num_done, piece.e2e.num) for piece in slices] == [(16, 16, 16)] * 5 + [(15, 15, 15)]
    several = Timeline()
    for process, in_flight in ((0, 3), (1, 4), (0, 5), (1, 2)):
        tally = Tally()
        tally.slice_at(0.5).in_flight = in_flight
        several.add(process, tally.slices)
    assert several.list()[0].in_flight == 9


def test_failures_are_bounded_in_number_and_length_and_the_most_frequent_come_first() -> None:
    failures, other, many = Failures(), Failures(), Failures()
    for code, message in (("INTERNAL", "a"), ("UNAVAILABLE", "b"), ("UNAVAILABLE", "b"), ("UNAVAILABLE", "c")):
        failures.add(code, message)
    other.add("INTERNAL", "a", 5)
    failures.merge(other)
    expected = [("INTERNAL", "a", 6), ("UNAVAILABLE", "b", 2), ("UNAVAILABLE", "c", 1)]
    assert failures.most_frequent() == [Failure(*fields) for fields in expected]
    for number_ in range(1000):
        many.add("INVALID_ARGUMENT", f"text: {number_} tokens")
    found = many.most_frequent()
    assert len(found) == MAX_MESSAGES + 1 and found[0] == Failure("INVALID_ARGUMENT", OTHERS, 1000 - MAX_MESSAGES)
    other.add("DATA_LOSS", "one\ntwo \x1b[31m" * 10_000)
    (message,) = other.counts["DATA_LOSS"]
    assert len(message) == MAX_CHARACTERS + 1 and message.isprintable() and message.startswith("one two �[31mone two ")


FAILED = {"requests<=40": "", "p50>150ms": "s", "e2e_max>=0.2s": "s", "mean>190ms": "s", "throughput<11": "/s"}
FAILED |= {"UNAVAILABLE==0": "", "ttft_p95>1s": "s", "knee<1": "/s"}  # of the last two nothing was measured
PASSED = {"errors>0": "", "requests<40": "", "retries!=0": "", "p50>250ms": "s", "error_rate>1%": "share", "UNAVAILABLE>0": ""}
PASSED |= {"goodput_share<99%": "share", "tokens_per_second>100": "/s"}


def test_conditions_are_checked() -> None:
    result = make_result([[0.2] * 10] * 4)
    for conditions, is_failed in ((FAILED, True), (PASSED, False)):
        checks = [condition.check(result) for condition in parse_conditions(",".join(conditions))]
        assert {check.condition: check.unit for check in checks if check.is_failed == is_failed} == conditions
    assert share_good(make_result([[], []])) is None
    assert share_good(make_result([[0.1, 0.1, 0.1, 0.9]], slos={"e2e": 0.5})) == 0.75


def search(first: float, knee: float, **arguments: int) -> tuple[KneeSearch, list[float]]:
    found, tried = KneeSearch(first, **arguments), []
    while (rate := found.next_rate()) is not None:
        tried.append(rate)
        found.record(rate, rate <= knee)
    return found, tried


@settings(max_examples=50)
@given(st.floats(10.0, 2000.0), st.floats(11.0, 900.0))
def test_the_knee_is_found_from_below_and_from_above(first: float, knee: float) -> None:
    found, tried = search(first, knee)
    assert found.knee is not None and knee / 1.0501 <= found.knee <= knee
    assert len(tried) <= 20 and found.failed is not None
    # Rates grow until one fails, and then the gap is halved.
    assert search(100.0, 200.0, max_steps=4)[1] == pytest.approx([100, 160, 256, 208])
    found, tried = search(10.0, 0.0)
    assert found.knee is None and tried == [10, 2.5, 0.625, 0.15625, 0.0390625]
    found, tried = search(10.0, 1e99, max_steps=4)
    assert found.failed is None and found.knee == max(tried)


NONE = Histogram()
LATE_CASES = {
    # At 50 calls a second 200 ms of other work make ten calls late, of the 1,500 of half a minute.
    "a hiccup": ((of([0.0002] * 1490 + [0.02 * place for place in range(10)]), NONE, 0.02, 0.05), ""),
    # Measured beside a server on the same two cores: late at p99, and on time all the same.
    "a busy machine": ((of([0.0002] * 900 + [0.006] * 80 + [0.017] * 20), NONE, 0.01, 0.16), ""),
    "a busy machine, closed loop": ((NONE, of([0.0003] * 550 + [0.012] * 50), 0.0, 0.03), ""),
    "too few calls": ((of([0.5] * 99), NONE, 0.1, 0.0), ""),
    "enough calls": ((of([0.5] * 100), NONE, 0.05, 0.0), "100.0 % of its calls left more than 10 ms late (p99 500 ms)"),
    "a late event loop": ((NONE, of([0.5] * 100), 0.0, 0.0), "its event loop was more than 10 ms late"),
    "no core left": ((NONE, of([0.001] * 200), 0.0, 0.97), "0.97 cores"),
    "only starting": ((NONE, of([0.001] * 10), 0.0, 0.97), ""),
}


def test_a_slow_sender_is_told_from_a_busy_machine() -> None:
    for name, (arguments, reason) in LATE_CASES.items():
        text = slow_sender(*arguments)
        assert (text is None) == (not reason) and reason in (text or ""), name
    # The limit depends on how often calls are due.
    for gap, limit in ((0.001, 0.01), (0.1, 0.01), (0.5, 0.05), (60.0, 0.1)):
        assert slow_sender(of([limit * 0.9] * 200), NONE, gap, 0.0) is None
        found = re.search(r"more than (\S+) ms late", slow_sender(of([limit * 1.1] * 200), NONE, gap, 0.0) or "")
        assert found is not None and float(found[1]) == pytest.approx(1000 * limit)


METRICS = """\
# TYPE dragoman_slots_in_use gauge
dragoman_slots_in_use{model="en-de"} 3.0
dragoman_slots_in_use{model="a } b"} 4.0 1700000000
process_cpu_seconds_total 10.5
dragoman_engine_cpu_seconds_total{model="en-de",replica="0"} 20.0
dragoman_step_duration_seconds_bucket{le="+Inf",model="en-de"} 5.0
dragoman_step_duration_seconds_sum{model="en-de"} 1.0
dragoman_step_duration_seconds_count{model="en-de"} 100.0
other NaN
"""


def changed(seconds: float, total: float, count: float) -> str:
    text = METRICS.replace("total 10.5", f"total {seconds}").replace("} 1.0\n", f"}} {total}\n")
    return text.replace("} 100.0", f"}} {count}")


def scraped(*texts: str | Exception) -> ServerSeries:
    """Scrape once a second an address that has these texts."""
    answers, now = iter(texts), iter(range(100_000))

    def read(url: str) -> str:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    scraper = Scraper("http://somewhere/metrics", lambda: float(next(now)), read)
    for _ in texts:
        scraper.scrape()
    return scraper.series


def test_metrics_are_sums_over_labels_rates_and_means_since_the_last_reading() -> None:
    totals = parse(METRICS)
    assert totals["dragoman_slots_in_use"] == 7.0
    assert "dragoman_step_duration_seconds_bucket" not in totals and "other" not in totals
    later, restarted = (changed(*values).replace("} 20.0", "} 22.0") for values in ((11.25, 1.5, 150), (0.5, 0.2, 10)))
    found = [point.values for point in scraped(METRICS, later, later, restarted).points]
    assert found == [
        {"slots_in_use": 7.0},
        pytest.approx({"slots_in_use": 7.0, "cpu_cores": 2.75, "step_seconds": 0.01}),
        {"slots_in_use": 7.0, "cpu_cores": 0.0},  # no step, no mean
        pytest.approx({"slots_in_use": 7.0, "cpu_cores": 0.5, "step_seconds": 0.02}),  # counters that fell began anew
    ]


def test_a_reading_that_fails_is_counted_and_points_stay_bounded() -> None:
    for failure in (ConnectionRefusedError(), "<html>not metrics", "name{label"):
        series = scraped(METRICS, failure, METRICS)
        assert series.num_failures == 1 and len(series.points) == 2 and "cpu_cores" not in series.points[1].values
    points = scraped(*[METRICS] * 3000).points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points[0].at == 0 and points[-1].at >= 2980
    assert all(a.at < b.at for a, b in itertools.pairwise(points))


def test_a_percentile_is_shown_where_there_are_samples_enough() -> None:
    for num, shown in ((1, ["max"]), (97, ["p50", "p90", "p95", "max"]), (1000, ["p50", "p90", "p95", "p99", "p99.9", "max"])):
        summary = summarise(of([0.1] * num))
        assert [name for name in summary.percentiles if summary.figure(name) is not None] == shown


def test_a_result_is_read_as_it_was_written_and_its_figures_are_of_the_counted_time(tmp_path: Path) -> None:
    result = make_result(
        [[0.1] * 6, [], [0.3] * 3],
        slos={"e2e": 0.2},
        server=[ServerSeries("http://somewhere", [Point(1.0, {"waiting": 3.0})], 2)],
        sweep=Sweep([Step(10.0, True, 1.0, 9.5, 9.5, {"INTERNAL": 1}, {})], 10.0, 0.99),
        checks=[Check("errors>0", 0.0, False)],
        warnings=["careful"],
    )
    (tmp_path / "result.json").write_bytes(encode(result))
    assert read_result(tmp_path / "result.json") == result
    content = msgspec.json.decode((tmp_path / "result.json").read_bytes())
    assert (content["format"], content["version"]) == ("dragoman-load", 1)
    assert (result.total.requests_per_second, result.total.goodput, result.total.tokens_per_second) == (3.0, 2.0, 30.0)
    assert result.total.times["e2e"].percentiles["p50"] == pytest.approx(0.1, rel=0.003)
    documentation = (ROOT / "docs/load-testing.md").read_text(encoding="utf-8")
    assert [name for name in Result.__struct_fields__ if f"`{name}`" not in documentation] == []


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    for content, named in (
        ("[]", ""),
        ('{"format": "other"}', "not a result"),
        ('{"format": "dragoman-load", "version": 99}', "version 99"),
        ('{"format": "dragoman-load", "version": 1}', "created"),
    ):
        (tmp_path / "file").write_text(content)
        with pytest.raises(InputError, match=f"file: .*{named}"):
            read_result(tmp_path / "file")
    with pytest.raises(InputError, match="none: No such file"):
        read_result(tmp_path / "none")
