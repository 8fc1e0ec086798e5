from pathlib import Path

import pytest

from dragoman.model.files import replaced, write_text


def test_text_is_written_as_it_is(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "eins\nzwei ü\r\n")
    assert (tmp_path / "a.json").read_bytes() == "eins\nzwei ü\r\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old", encoding="utf-8")
    with replaced(path) as temporary:
        temporary.write_text("new", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_text(encoding="utf-8") == "new"


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(RuntimeError), replaced(path) as temporary:
        temporary.write_text("ne", encoding="utf-8")
        raise RuntimeError
    assert path.read_text(encoding="utf-8") == "old"
