import os
from pathlib import Path

import pytest

from dragoman.client.output_file import replacing
from dragoman.model.errors import InputError


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with replacing(path) as file:
        file.write("Grüße\n")
        assert not path.exists()
    assert path.read_bytes() == "Grüße\n".encode()
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(failure), replacing(path) as file:
        file.write("new")
        raise failure
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with replacing(tmp_path / "out.txt"):
        pass
    assert (tmp_path / "out.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replacing(tmp_path / "link") as file:
        file.write("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "x"


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none/out\.txt: No such file"), replacing(tmp_path / "none" / "out.txt"):
        pytest.fail("the block must not run")


def test_directories_and_devices_are_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="not a regular file"), replacing(path):
            pytest.fail("the block must not run")
    assert (tmp_path / "pipe").is_fifo()


def test_name_as_long_as_names_can_be_is_fine(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    with replacing(path) as file:
        file.write("x")
    assert path.read_text() == "x"
