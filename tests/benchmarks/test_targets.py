"""Targets read what benchmarks write, of one kind of processor, and say what was reached, missed and not measured."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import targets
from benchmarks.harness import report
from benchmarks.harness.report import Result, Section
from benchmarks.targets import (
    TARGETS,
    Target,
    against_before,
    column,
    different,
    goodput,
    least_of_best,
    missed,
    missed_with_kills,
    p99_ratio,
    share,
    table,
)

ABOUT = {"date": "2026-01-02", "cores": 2, "processor": "a", "python": "3", "versions": {}}


def section(*rows: dict[str, Any], notes: tuple[str, ...] = ()) -> Section:
    return Section(ABOUT, [*rows], [*notes])


def test_a_limit_is_reached_from_the_right_side() -> None:
    least, most = Target("a", "x", 1.1, lambda _: None), Target("a", "x", 0, lambda _: None, is_most=True)
    assert [least.verdict(value) for value in (None, 1.09, 1.1)] == ["not measured", "MISSED", "reached"]
    assert [most.verdict(value) for value in (0.0, 1.0)] == ["reached", "MISSED"]


def test_figures_are_those_of_their_case() -> None:
    rows = section(
        {"model": "a", "search": "greedy", "gRPC": "0.90", "bulk": "1.20"},
        {"model": "a", "search": "greedy", "gRPC": "1.10", "bulk": ""},
        {"model": "b", "search": "greedy", "gRPC": "1,000.5", "bulk": ""},
    )
    assert column("gRPC", model="b")(rows) == 1000.5
    assert column("bulk", model="b")(rows) is None and column("gRPC", model="c")(rows) is None
    assert least_of_best(("gRPC", "bulk"), model="a")(rows) == 1.1
    assert least_of_best(("gRPC",), model="c")(rows) is None


def test_ratios_are_compared_with_those_of_the_same_case_before() -> None:
    assert against_before(section({"gRPC ÷ better": "1.20"})) is None
    found = against_before(
        section(
            {"gRPC ÷ better": "1.20", "before ÷ better": "1.00"},
            {"gRPC ÷ better": "0.90", "before ÷ better": "1.00"},
            {"gRPC ÷ better": "0.10", "before ÷ better": ""},
        )
    )
    assert found == pytest.approx(0.9)


def test_shares_goodput_and_latencies() -> None:
    rows = section(
        {"requests": "a call each", "dragoman/s": 10, "share": 0.5},
        {"requests": "a call each", "dragoman/s": 90, "share": 0.3},
    )
    assert share("a call each")(rows) == 0.3 and share("16 in a message")(rows) is None
    rates = {"dragoman": "90", "x": "30", "y": "9"}
    servers = section(*({"server": name, "goodput/s": rate} for name, rate in rates.items()))
    assert goodput(servers) == 3.0 and goodput(section({"server": "dragoman", "goodput/s": "90"})) is None
    assert p99_ratio(section({"server": "now", "p99 ms": "50.0"}, {"server": "before", "p99 ms": "100.0"})) == 0.5
    assert p99_ratio(section({"server": "now", "p99 ms": "50.0"})) is None
    assert missed(section({}, notes=("- kept: a", "- MISSED: b", "- MISSED: c"))) == 2
    assert missed_with_kills(section({}, notes=("- kept: a", "- MISSED: b"))) is None
    assert missed_with_kills(section({}, notes=("- kept: killed: engine; as many", "- MISSED: b"))) == 1
    answered, lost = {"different": 0, "not answered": "none"}, {"different": 2, "not answered": "1 INTERNAL"}
    assert different(section(answered)) == 0 and different(section(answered, lost)) == 3


def test_the_table_is_of_one_kind_of_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    captions = {"model": "en-de", "precision": "int8", "search": "greedy", "engine ÷ CTranslate2": "0.95"}
    Result("Captions", {"avx2": section(captions), "avx512_vnni": section(captions | {"engine ÷ CTranslate2": "0.5"})}).write(
        "engines_captions"
    )
    name = "captions, int8, greedy, small: engine ÷ CTranslate2"
    for kind, said in (("avx2", "0.95 | reached"), ("avx512_vnni", "0.50 | MISSED"), ("asimd", "— | not measured")):
        rows = table(kind)
        assert len(rows) == len(TARGETS) + 2
        (row,) = [row for row in rows if name in row]
        assert said in row


def test_every_target_reads_what_its_benchmark_has_written() -> None:
    """Results of any kind in the tree, so that a column which is called otherwise is noticed."""
    for target in targets.TARGETS:
        for found in report.read_result(target.result).sections.values():
            assert target.row(found)
