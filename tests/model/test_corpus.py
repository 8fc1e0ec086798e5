import gzip
import re
from pathlib import Path

import pytest

from dragoman.model.corpus import DataError, read_lines, read_parallel, write_lines


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refuses(path: Path, message: str) -> pytest.RaisesExc[DataError]:
    """Expect an error that begins with the file."""
    return pytest.raises(DataError, match="^" + re.escape(f"{path}{message}"))


def test_lines_come_as_they_are(tmp_path) -> None:
    path = write(tmp_path / "a", "one\r\n two \u2028 still two\n\nvier\x0b\x0c ü".encode())
    assert read_lines(path) == ["one", " two \u2028 still two", "", "vier\x0b\x0c ü"]


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    lines = ["one", "", " two \u2028 still two", "ü"]
    write_lines(tmp_path / name, iter(lines))
    assert read_lines(tmp_path / name) == lines
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_gzip_is_unpacked(tmp_path) -> None:
    assert read_lines(write(tmp_path / "a.gz", gzip.compress(b"eins\nzwei\n"))) == ["eins", "zwei"]


def test_missing_file_is_named(tmp_path) -> None:
    with refuses(tmp_path / "none", ": No such file or directory"):
        read_lines(tmp_path / "none")


def test_folder_in_place_of_a_file_is_named(tmp_path) -> None:
    with refuses(tmp_path, ": Is a directory"):
        read_lines(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("a", b""), ("a.gz", gzip.compress(b"", mtime=0))], ids=["plain", "packed"])
def test_empty_file_is_named(tmp_path, name, content) -> None:
    with refuses(tmp_path / name, ": the file is empty"):
        read_lines(write(tmp_path / name, content))


def test_line_that_is_not_utf8_is_numbered(tmp_path) -> None:
    path = write(tmp_path / "a", b"good\nba\xe9d\n")
    with refuses(path, ", line 2: not UTF-8: invalid continuation byte at byte 2"):
        read_lines(path)


PACKED = gzip.compress(bytes(range(256)) * 20, mtime=0)


@pytest.mark.parametrize(
    "content",
    [b"plain text", PACKED[: len(PACKED) // 2], PACKED[:-6] + b"\0" * 6, PACKED[:20] + b"\xff" * 40 + PACKED[60:]],
    ids=["not gzip", "cut short", "wrong checksum", "damaged inside"],
)
def test_bad_gzip_is_named(tmp_path, content) -> None:
    path = write(tmp_path / "a.gz", content)
    with refuses(path, ": "):
        read_lines(path)


def test_parallel_text_is_read(tmp_path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"x\ny")
    assert read_parallel(source, target) == (["a", "b"], ["x", "y"])


def test_line_counts_that_differ_are_told(tmp_path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"x\n")
    with refuses(source, f" has 2 lines but {target} has 1"):
        read_parallel(source, target)


@pytest.mark.parametrize("side", [0, 1])
def test_blank_line_is_numbered(tmp_path, side) -> None:
    contents = [b"a\nb\nc\n", b"a\nb\nc\n"]
    contents[side] = b"a\nb\n \t\n"
    source, target = write(tmp_path / "s", contents[0]), write(tmp_path / "t", contents[1])
    with refuses((source, target)[side], ", line 3: the line is blank"):
        read_parallel(source, target)
