"""What is counted where, and what counts not at all."""

import math

import msgspec
import pytest

from dragoman.load.tally import Group, Outcome, Tally
from dragoman.load.timeline import Timeline


def outcome(due: float, seconds: float, **fields) -> Outcome:
    return Outcome(**({"group": "unary", "is_injected": False, "due": due, "ended": due + seconds} | fields))


def test_the_warm_up_does_not_count() -> None:
    tally = Tally()
    for due in (0.5, 1.5, 2.5):
        tally.record(outcome(due, 0.1), {}, 2.0, 3.0)
    assert (tally.groups["unary"].num, tally.groups["unary"].num_done) == (1, 1)
    assert sorted(tally.slices) == [0, 1, 2]


def test_throughput_counts_by_the_end_and_latency_by_when_it_was_due() -> None:
    tally = Tally()
    tally.record(outcome(0.5, 2.0, generated_tokens=7), {}, 1.0, 4.0)  # due before, answered while it counts
    tally.record(outcome(3.5, 2.0), {}, 1.0, 4.0)  # due while it counts, answered after
    group = tally.groups["unary"]
    assert (group.num, group.num_done, group.num_done_tokens) == (1, 1, 7)
    assert group.times["e2e"].num == 1


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        ({}, True),
        ({"seconds": 0.51}, False),
        ({"first_token": 10.2}, False),
        ({"first_token": 10.05}, True),
        ({"first_token": 10.05, "gaps": [0.03, 0.01]}, True),
        ({"first_token": 10.05, "gaps": [0.03, 0.03]}, False),
        ({"code": "INTERNAL"}, False),
        ({"is_injected": True}, False),
    ],
)
def test_an_answer_is_good_within_every_limit(fields: dict, is_good: bool) -> None:
    tally = Tally()
    fields = {"seconds": 0.4} | fields
    tally.record(outcome(10.0, **fields), {"e2e": 0.5, "ttft": 0.1, "itl": 0.02}, 0.0, 100.0)
    assert tally.groups["unary"].num_good == is_good


def test_provoked_failures_are_counted_apart() -> None:
    tally = Tally()
    tally.record(outcome(0.0, 0.1, group="cancel", is_injected=True, code="CANCELLED", is_intended=True), {}, 0.0, 1.0)
    tally.record(outcome(0.0, 0.1, group="cancel", is_injected=True, code="UNAVAILABLE"), {}, 0.0, 1.0)
    group = tally.groups["cancel"]
    assert (group.intended, group.failures) == ({"CANCELLED": 1}, {"UNAVAILABLE": 1})
    assert tally.slices[0].num_failed == 1


def test_times_of_calls_that_misbehave_stay_out_of_the_timeline() -> None:
    tally = Tally()
    tally.record(outcome(0.0, 9.0, group="slow", is_injected=True), {}, 0.0, 100.0)
    assert tally.slices[0].e2e.num == 0 and tally.groups["slow"].times["e2e"].num == 1


def test_groups_add_up_and_survive_the_wire() -> None:
    tallies = [Tally(), Tally()]
    for number, tally in enumerate(tallies):
        for i in range(5):
            tally.record(outcome(i / 10, 0.01 * (i + 1), first_token=i / 10 + 0.005, gaps=[0.001]), {}, 0.0, 1.0)
        tally.record(outcome(0.5, 0.1, code=f"CODE{number}"), {}, 0.0, 1.0)
    whole = Group()
    for tally in tallies:
        received = msgspec.json.decode(msgspec.json.encode(tally), type=Tally)
        assert received == tally
        whole.merge(received.groups["unary"])
    assert (whole.num, whole.num_ok, whole.failures) == (12, 10, {"CODE0": 1, "CODE1": 1})
    assert {measure: times.num for measure, times in whole.times.items()} == {"e2e": 10, "ttft": 10, "itl": 10}


def test_a_timeline_stays_bounded_and_loses_nothing() -> None:
    timeline = Timeline(max_slices=10)
    for second in range(95):
        tally = Tally()
        tally.record(outcome(float(second), 0.001 * (second + 1)), {}, 0.0, math.inf)
        tally.slice_at(float(second)).in_flight = second % 7
        timeline.add(0, tally.slices)
    assert timeline.width == 16
    slices = timeline.list()
    assert len(slices) == 6
    assert sum(piece.num_due for piece in slices) == sum(piece.num_done for piece in slices) == 95
    assert [piece.e2e.num for piece in slices] == [16, 16, 16, 16, 16, 15]
    assert {piece.in_flight for piece in slices} == {6}


def test_calls_under_way_in_several_processes_add_up() -> None:
    timeline = Timeline()
    for process, in_flight in ((0, 3), (1, 4), (0, 5), (1, 2)):
        tally = Tally()
        tally.slice_at(0.5).in_flight = in_flight
        timeline.add(process, tally.slices)
    assert timeline.list()[0].in_flight == 9
