import os
from io import BytesIO
from pathlib import Path

import pytest

from dragoman.client.lines import LineFile, stream_lines
from dragoman.client.ordered import PAUSE
from dragoman.model.errors import InputError


def lines_of(stream) -> list[str]:
    return [line for line in stream_lines(stream, "stdin") if line is not PAUSE]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\n\n", ["", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        ("a\u2028b\x0bc\x85d\re\nf".encode(), ["a\u2028b\x0bc\x85d\re", "f"]),
        ("Hündin\n犬 🐕\n".encode(), ["Hündin", "犬 🐕"]),
    ],
)
def test_file_and_stream_have_the_same_lines(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(content)
    file = LineFile(path)
    assert (list(file), len(file)) == (lines, len(lines))
    assert list(file) == lines
    assert lines_of(BytesIO(content)) == lines
    with path.open("rb") as stream:
        assert lines_of(stream) == lines


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt: No such file"):
        LineFile(tmp_path / "none.txt")


def test_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        LineFile(tmp_path)


def test_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"good\nalso good\nna\xefve\n")
    with pytest.raises(InputError, match=r"in\.txt, line 3: not UTF-8: .* at byte 2"):
        LineFile(path)


def test_stream_gives_the_lines_before_the_one_that_is_not_utf8() -> None:
    lines = stream_lines(BytesIO(b"good\n\xff\n"), "stdin")
    assert next(lines) == "good"
    with pytest.raises(InputError, match=r"^stdin, line 2: not UTF-8"):
        next(lines)


def test_line_longer_than_a_read_stays_whole() -> None:
    long = "ä" * 300_000
    assert lines_of(BytesIO(f"a\n{long}\nb\n".encode())) == ["a", long, "b"]


def test_stream_pauses_only_where_the_next_line_is_not_there_yet() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as feed:
        lines = stream_lines(stream, "stdin")
        feed.write(b"eins\nzwei\ndr")
        assert [next(lines) for _ in range(3)] == ["eins", "zwei", PAUSE]
        feed.write(b"ei\n")
        assert next(lines) == "drei"
        assert next(lines) is PAUSE
        feed.write("ä".encode()[:1])
        assert next(lines) is PAUSE
        feed.write("ä".encode()[1:] + b"\n")
        assert next(lines) == "ä"
        feed.write(b"end")
        feed.close()
        assert [line for line in lines if line is not PAUSE] == ["end"]
