"""Which folder engines share weights through: the one that was named, or that of temporary files where it is worth it."""

import tempfile
from pathlib import Path

import pytest

from dragoman.server.weights_folder import weights_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mounts(folder: Path, *lines: str) -> Path:
    path = folder / "mounts"
    path.write_text("".join(f"device {line} rw 0 0\n" for line in lines))
    return path


@pytest.mark.parametrize("num_engines", [1, 4])
def test_a_folder_that_was_named_is_used_and_none_where_it_is_off(num_engines: int) -> None:
    assert weights_folder("/var/cache/weights", num_engines) == "/var/cache/weights"
    assert weights_folder("off", num_engines) == ""


def test_by_default_several_engines_share_on_a_disk(temporary: Path) -> None:
    file = mounts(temporary, "/ ext4", "/proc proc")
    assert weights_folder("auto", 2, file) == str(temporary)
    assert weights_folder("auto", 1, file) == "", "there is nobody to share with"


def test_by_default_nothing_is_shared_through_memory(temporary: Path) -> None:
    above = temporary.parent
    for kind, expected in (("tmpfs", ""), ("ramfs", ""), ("xfs", str(temporary))):
        assert weights_folder("auto", 2, mounts(temporary, "/ ext4", f"{above} {kind}")) == expected
        assert weights_folder("auto", 2, mounts(temporary, f"{temporary} {kind}", f"{above} ext4")) == expected
    assert weights_folder("auto", 2, mounts(temporary, "/ tmpfs", f"{above}-other tmpfs", f"{above} ext4")) == str(temporary)
    assert weights_folder("auto", 2, mounts(temporary, f"{above} ext4", f"{above} tmpfs")) == "", "the last one lies on top"


def test_a_name_with_a_space_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert weights_folder("auto", 2, mounts(tmp_path, "/ ext4", f"{tmp_path}/a\\040b tmpfs")) == ""


def test_where_it_cannot_be_told_nothing_is_shared(temporary: Path) -> None:
    assert weights_folder("auto", 2, temporary / "missing") == ""
    assert weights_folder("auto", 2, mounts(temporary)) == ""
