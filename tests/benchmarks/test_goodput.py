"""What is made of a rate's outcomes, and the search for the highest rate that a server keeps up with."""

import math
from collections import Counter

import pytest

from benchmarks.harness.load import UNFINISHED, Outcome, Record
from benchmarks.serving.goodput import Ladder, Point, by_rung, middle, rate_of, rung_below, summarise

OBJECTIVE = 0.5


def record(*outcomes: tuple[str, float]) -> Record:
    """Calls, each given as its code and latency, a second apart, each sent a tenth of a second late."""
    return Record([Outcome(i, i + 0.1, i + latency, code) for i, (code, latency) in enumerate(outcomes)], 2.0, 8.0)


def point(rung: int, seconds: float, goodput: float = 1.0) -> Point:
    return Point(rung, goodput, seconds, seconds / 2, 0.0, Counter(), 10, 0.1)


def ladder(limit: int) -> Ladder:
    """A server that keeps up with rates up to a rung."""
    return Ladder(lambda rung: point(rung, OBJECTIVE if rung <= limit else 2 * OBJECTIVE), OBJECTIVE)


def test_rungs_and_rates_are_each_other_s_inverse() -> None:
    assert [rung_below(rate_of(rung)) for rung in range(-10, 100)] == list(range(-10, 100))
    assert rung_below(rate_of(7) * 1.05) == 7


def test_goodput_is_what_was_answered_in_time() -> None:
    found = summarise(3, 10.0, OBJECTIVE, record(("OK", 0.5), ("OK", 0.6), ("OK", 0.2), ("UNAVAILABLE", 0.1)))
    assert found.goodput == pytest.approx(0.2)
    assert found.num_sent == 4
    assert found.failures == {"UNAVAILABLE": 1}
    assert found.late_seconds == pytest.approx(0.1)
    assert found.sender_cores == 0.25


def test_a_failure_is_a_request_that_is_never_answered() -> None:
    one_in_twenty = summarise(0, 20.0, OBJECTIVE, record(*[("OK", 0.1)] * 19, (UNFINISHED, 0.0)))
    assert one_in_twenty.goal_seconds == pytest.approx(0.1)
    more = summarise(0, 20.0, OBJECTIVE, record(*[("OK", 0.1)] * 18, (UNFINISHED, 0.0), ("HTTP 500", 0.0)))
    assert math.isinf(more.goal_seconds) and more.median_seconds == pytest.approx(0.1)


def test_latency_counts_from_when_a_request_was_due() -> None:
    found = summarise(0, 1.0, OBJECTIVE, Record([Outcome(0.0, 0.4, 0.6, "OK")], 0.1, 1.0))
    assert found.goal_seconds == 0.6
    assert found.goodput == 0.0


def test_a_rate_that_sent_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no request was due within 2 s at 1\.08 a second"):
        summarise(1, 2.0, OBJECTIVE, record())


@pytest.mark.parametrize("stride", [1, 3, 4])
@pytest.mark.parametrize("start", [0, 9, 20, 21, 22, 40])
def test_the_knee_is_found_from_either_side(start: int, stride: int) -> None:
    search = ladder(21)
    found = search.find_knee(start, 0, stride)
    assert found is not None and found.rung == 21
    assert search.points[22].goal_seconds > OBJECTIVE


def test_no_rate_is_measured_twice() -> None:
    measured: list[int] = []

    def measure(rung: int) -> Point:
        measured.append(rung)
        return point(rung, OBJECTIVE if rung <= 21 else 1.0)

    Ladder(measure, OBJECTIVE).find_knee(10, 0, 4)
    assert len(measured) == len(set(measured)) <= 6


@pytest.mark.parametrize(("start", "lowest"), [(5, 5), (30, 5), (30, 4), (2, 5)])
def test_the_search_ends_where_even_the_lowest_rate_is_too_much(start: int, lowest: int) -> None:
    search = ladder(3)
    assert search.find_knee(start, lowest, 4) is None
    assert min(search.points) == lowest


def test_the_lowest_rate_may_be_the_knee() -> None:
    found = ladder(5).find_knee(30, 5, 4)
    assert found is not None and found.rung == 5


def test_rounds_are_gathered_by_rate() -> None:
    points = [point(2, 0.3), point(1, 0.1), point(2, 0.1), point(2, 0.2)]
    gathered = by_rung(points)
    assert list(gathered) == [1, 2]
    assert middle(gathered[2], lambda entry: entry.goal_seconds) == 0.2
