from pathlib import Path

import pytest

from dragoman.load.result import Check, Result, Step, Sweep, read_result, write_result
from dragoman.load.scrape import Point, ServerSeries
from dragoman.model.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_written_is_read(make_result, tmp_path: Path) -> None:
    result = make_result(
        [[0.1, 0.2], [], [0.3]],
        server=[ServerSeries("http://somewhere", [Point(1.0, {"waiting": 3.0})], 2)],
        sweep=Sweep([Step(10.0, True, 1.0, 9.5, 9.5, {"INTERNAL": 1}, {})], 10.0, 0.99),
        checks=[Check("errors>0", 0.0, False)],
        warnings=["careful"],
    )
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a result"),
        ("[]", "not a result"),
        ('{"format": "other"}', "not a result"),
        ('{"format": "dragoman-load", "version": 99}', "version 99"),
        ('{"format": "dragoman-load", "version": 1}', "created"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(InputError, match=f"file: .*{message}"):
        read_result(tmp_path / "file")
    with pytest.raises(InputError, match="missing"):
        read_result(tmp_path / "missing")


def test_figures_are_of_the_time_that_counts(make_result) -> None:
    result = make_result([[0.1] * 6, [0.1] * 2], slos={"e2e": 0.2})
    assert (result.total.requests_per_second, result.total.goodput, result.total.tokens_per_second) == (4.0, 4.0, 40.0)
    assert result.total.times["e2e"].percentiles["p95"] == pytest.approx(0.1, rel=0.003)


def test_every_field_of_the_file_is_documented() -> None:
    text = (ROOT / "docs/load-testing.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in Result.__struct_fields__)
