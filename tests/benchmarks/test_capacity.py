"""Plans for machines of many cores: never more than there is, and limited by what is named."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.capacity import ALONE_US, BESIDE_US, costs_of, front_us, memory_mib, passing_us, read_rows
from benchmarks.capacity_plan import MAX_LOAD, SHARED_CORES, Costs, plan
from benchmarks.harness import report

BASE = Costs(engine_us=10_000, front_us=400, desk_us=50)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 16, 33, 64, 128])
@pytest.mark.parametrize("front", [10.0, 400.0, 2_000.0, 20_000.0])
def test_no_plan_needs_more_than_there_is(cores: int, front: float) -> None:
    costs = replace(BASE, front_us=front)
    made = plan(cores, costs)
    assert made.rate > 0 and made.engines >= 1 and made.front_ends >= 1
    busy = made.rate * (costs.engine_us + costs.front_us + (costs.desk_us if made.engines > 1 else 0)) / 1e6
    assert busy <= cores * 1.0001
    if cores > SHARED_CORES:
        own = 1 if made.front_ends > 1 else 0
        assert made.engines + made.front_ends + own <= cores
        assert made.rate * costs.front_us / 1e6 <= made.front_ends * MAX_LOAD * 1.0001
        assert made.rate <= made.engines * 1e6 / costs.engine_us * 1.0001


def test_more_cores_never_do_less() -> None:
    rates = [plan(cores, BASE).rate for cores in range(1, 65)]
    assert all(more >= less * 0.999 for less, more in itertools.pairwise(rates))


def test_the_limit_is_what_is_dear() -> None:
    assert plan(8, BASE).limit == "engines"
    assert plan(64, replace(BASE, engine_us=500, front_us=300, desk_us=100, sharing=0.9)).limit == "desk"
    assert plan(2, replace(BASE, engine_us=500, front_us=4_000)).limit == "front end"


def test_one_front_end_is_enough_until_it_is_not() -> None:
    assert plan(8, BASE).front_ends == 1
    many = plan(64, replace(BASE, engine_us=1_000))
    assert many.front_ends > 1 and many.engines + many.front_ends + 1 <= 64


def test_engines_that_hold_each_other_up_do_less() -> None:
    assert plan(16, replace(BASE, sharing=0.8)).rate == pytest.approx(0.8 * plan(16, BASE).rate, rel=0.1)
    assert plan(1, replace(BASE, sharing=0.8)).rate == plan(1, BASE).rate, "one engine has nobody beside it"


def test_on_few_cores_the_front_end_takes_its_time_from_the_engines() -> None:
    made = plan(2, BASE)
    assert (made.engines, made.front_ends) == (2, 1)
    assert made.rate == pytest.approx(2e6 / (BASE.engine_us + BASE.front_us + BASE.desk_us))


def test_memory_and_streams_are_those_of_the_engines() -> None:
    made = plan(8, replace(BASE, first_mib=100, further_mib=10, front_mib=50, stream_gbs=2))
    assert made.mib == 100 + 10 * (made.engines - 1) + 50 * made.front_ends
    assert made.memory_gbs == 2 * made.engines


def test_no_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="0 cores"):
        plan(0, BASE)


def test_costs_are_read_from_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = [{"concurrency": 64, "dragoman: front end µs": 200}, {"concurrency": 1, "dragoman: front end µs": 900}]
    report.write("overhead", "Requests", report.environment(), rows)
    assert front_us(read_rows("overhead")) == 200, "that of many requests at once"
    assert read_rows("missing") == []
    monkeypatch.setattr(report, "processor_kind", lambda: "another")
    assert read_rows("overhead") == [], "of another kind"
    with pytest.raises(SystemExit, match="--front-us"):
        front_us([])
    memory = [{"model": "m", "engines": number, "shared: MiB": str(100 + 30 * number)} for number in (4, 1, 2)]
    assert memory_mib(memory, "m") == (130.0, 30.0)
    assert memory_mib(memory, "other") == memory_mib(memory[:1], "m") == (0.0, 0.0)


def test_two_engines_that_are_faster_than_one_have_been_lucky(endless: tuple[Path, Path]) -> None:
    found = {ALONE_US: 10_000.0, BESIDE_US: 9_900.0, "step_seconds": 0.001}
    costs = costs_of(endless[1], found, 100.0, 10.0)
    assert (costs.engine_us, costs.sharing) == (10_000, 1.0)
    assert costs_of(endless[1], found | {BESIDE_US: 12_500.0}, 100.0, 10.0).sharing == 0.8


def test_passing_a_request_on_costs_something() -> None:
    assert passing_us(20) > 0
