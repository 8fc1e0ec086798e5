"""Results: a section for each kind of processor, replaced by runs of that kind alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import report
from benchmarks.harness.report import UNKNOWN, figure_name, parse, read, read_result, write
from benchmarks.harness.rewrite import rewrite

COMMITTED = sorted(report.RESULTS.glob("*.json"))
ABOUT = {"date": "2026-01-02", "cores": 2, "processor": "a processor", "python": "3", "versions": {"this": "1", "that": "2"}}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def run_on(kind: str, monkeypatch: pytest.MonkeyPatch, rate: int, **about: Any) -> None:
    monkeypatch.setattr(report, "processor_kind", lambda: kind)
    write("speed", "Speed", ABOUT | about, [{"side": "ours", "rate": rate}], [f"Told on {kind}.", f"![]({figure_name('speed')})"])


def write_old(results: Path) -> None:
    results.mkdir()
    (results / "speed.json").write_text(json.dumps({"environment": ABOUT | {"runs": [5]}, "rows": [{"side": "ours", "rate": 7}]}))
    table = "| side | rate |\n|---|---|\n| ours | 7 |\n"
    (results / "speed.md").write_text(
        f"# Old speed\n\n2026-01-02, words.\n\n{table}\nNotes.\n\n| a |\n|---|\n| 1 |\n\n- kept: all\n"
    )


def test_a_run_replaces_the_section_of_its_own_kind_alone(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on("avx2", monkeypatch, 1, runs=[1, 1])
    run_on("avx512_vnni", monkeypatch, 2, runs=[2, 2])
    before = read_result("speed").sections["avx2"]
    run_on("avx512_vnni", monkeypatch, 3, date="2026-01-03", runs=[3, 3])
    sections = read_result("speed").sections
    assert sections["avx2"] == before and before.rows == [{"side": "ours", "rate": 1}] and before.environment["runs"] == [1, 1]
    assert sections["avx512_vnni"].rows == [{"side": "ours", "rate": 3}] and sections["avx512_vnni"].environment["runs"] == [3, 3]
    assert read("speed") == sections["avx512_vnni"]
    monkeypatch.setattr(report, "processor_kind", lambda: "asimd")
    assert read("speed") is None


def test_the_table_of_each_kind_says_what_it_was_measured_on(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on("avx512_vnni", monkeypatch, 2, processor="the other")
    run_on("avx2", monkeypatch, 1)
    assert (results / "speed.md").read_text() == (
        "# Speed\n"
        "\n## `avx2`\n\n2026-01-02, 2 cores of a processor, Python 3, this 1, that 2.\n"
        "\n| side | rate |\n|---|---|\n| ours | 1 |\n\nTold on avx2.\n![](speed-avx2.png)\n"
        "\n## `avx512_vnni`\n\n2026-01-02, 2 cores of the other, Python 3, this 1, that 2.\n"
        "\n| side | rate |\n|---|---|\n| ours | 2 |\n\nTold on avx512_vnni.\n![](speed-avx512_vnni.png)\n"
    )


def test_a_file_of_the_form_before_is_of_an_unknown_kind(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_old(results)
    run_on("avx2", monkeypatch, 1)
    sections = read_result("speed").sections
    assert list(sections) == ["avx2", UNKNOWN]
    assert sections[UNKNOWN].rows == [{"side": "ours", "rate": 7}] and sections[UNKNOWN].environment["runs"] == [5]
    text = (results / "speed.md").read_text()
    assert text.index("`avx2`") < text.index("unknown kind")
    assert text.endswith("| ours | 7 |\n\nNotes.\n\n| a |\n|---|\n| 1 |\n\n- kept: all\n")


def test_a_section_is_given_the_kind_that_is_known_of_it(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_old(results)
    rewrite(["speed"])
    assert read_result("speed").title == "Old speed" and list(read_result("speed").sections) == [UNKNOWN]
    rewrite(["speed"], "avx512_vnni")
    assert list(read_result("speed").sections) == ["avx512_vnni"]
    rewrite(["speed"], "avx2")
    assert list(read_result("speed").sections) == ["avx512_vnni"]


def test_a_section_never_takes_the_place_of_one_that_says_its_kind(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_old(results)
    run_on("avx2", monkeypatch, 1)
    with pytest.raises(ValueError, match="has a section of avx2"):
        rewrite(["speed"], "avx2")
    assert list(read_result("speed").sections) == ["avx2", UNKNOWN]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_tables_are_what_their_figures_make_them(path: Path) -> None:
    result = parse(path)
    assert "kinds" in json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == result.text()
