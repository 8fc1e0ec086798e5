"""Files that are replaced whole, corpora of lines, and padding of rows."""

import gzip
import re
from pathlib import Path

import pytest

from dragoman.model.corpus import DataError, read_lines, read_parallel, write_lines
from dragoman.model.files import replaced, write_text
from dragoman.model.padding import pad


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "eins\nzwei ü\r\n")
    assert path.read_bytes() == "eins\nzwei ü\r\n".encode()
    with pytest.raises(RuntimeError), replaced(path) as temporary:
        temporary.write_text("ne", encoding="utf-8")
        raise RuntimeError
    with replaced(path) as temporary:
        temporary.write_text("new", encoding="utf-8")
        assert path.read_bytes() == "eins\nzwei ü\r\n".encode()
    assert path.read_text(encoding="utf-8") == "new" and [file.name for file in tmp_path.iterdir()] == ["a.json"]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_are_kept_as_they_are(tmp_path: Path, name: str) -> None:
    lines = ["one", "", " two \u2028 still two", "vier\x0b\x0c ü"]
    write_lines(tmp_path / name, iter(lines))
    assert read_lines(tmp_path / name) == lines
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert read_lines(write(tmp_path / "a", b"one\r\n\ntwo")) == ["one", "", "two"]


PACKED = gzip.compress(bytes(range(256)) * 20, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, ": No such file or directory"),
        (".", None, ": Is a directory"),
        ("a", b"", ": the file is empty"),
        ("a.gz", gzip.compress(b"", mtime=0), ": the file is empty"),
        ("a", b"good\nba\xe9d\n", ", line 2: not UTF-8: invalid continuation byte at byte 2"),
        ("a.gz", b"plain text", ": "),
        ("a.gz", PACKED[: len(PACKED) // 2], ": "),
        ("a.gz", PACKED[:-6] + b"\0" * 6, ": "),
        ("a.gz", PACKED[:20] + b"\xff" * 40 + PACKED[60:], ": "),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(DataError, match="^" + re.escape(f"{tmp_path / name}{message}")):
        read_lines(tmp_path / name)


def test_parallel_text_has_as_many_lines_and_no_blank_ones(tmp_path: Path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"x\ny")
    assert read_parallel(source, target) == (["a", "b"], ["x", "y"])
    assert pad([[5], [6, 7, 8], []], 9).tolist() == [[5, 9, 9], [6, 7, 8], [9, 9, 9]]
    write(target, b"x\n")
    with pytest.raises(DataError, match="^" + re.escape(f"{source} has 2 lines but {target} has 1")):
        read_parallel(source, target)
    for blank, other in ((source, target), (target, source)):
        write(blank, b"a\nb\n \t\n")
        write(other, b"a\nb\nc\n")
        with pytest.raises(DataError, match="^" + re.escape(f"{blank}, line 3: the line is blank")):
            read_parallel(source, target)
