from pathlib import Path

import pytest

from dragoman.load.trace import Entry, Extent, measure_trace, read_trace
from dragoman.model.errors import InputError


def test_a_trace_has_numbers_and_objects(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('0.5\n\n{"at": 1, "text": "a dog", "num_beams": 4}\n{"at": 1, "words": 7, "max_new_tokens": 3}\n')
    assert list(read_trace(path)) == [Entry(0.5), Entry(1.0, "a dog", None, 4), Entry(1.0, None, 7, None, 3)]
    assert measure_trace(path) == Extent(3, 1.0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("soon", "line 2"),
        ("-1", "at"),
        ("NaN", "at"),
        ("0.5", "due before"),
        ('{"text": "a"}', "at"),
        ('{"at": 2, "beams": 3}', "beams"),
        ('{"at": 2, "words": 0}', "words"),
        ('{"at": 2, "words": 1, "text": "a"}', "exclude"),
        ("[1]", "line 2"),
        ("[" * 100_000, "too deep"),
        ('{"at": 1e999}', "at"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace"
    path.write_text(f"1.0\n{line}\n")
    with pytest.raises(InputError, match=f"trace, line 2: .*{reason}" if reason != "line 2" else "trace, line 2: "):
        measure_trace(path)


def test_a_trace_without_calls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(InputError, match=name):
            measure_trace(tmp_path / name)
