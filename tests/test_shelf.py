"""What tests share is made once, and whole or not at all."""

import multiprocessing
from pathlib import Path

import pytest

from tests.shelf import Shelf


def count(folder: Path) -> None:
    """Make something, and leave a line of it."""
    folder.mkdir()
    with (folder.parent / "made").open("a") as file:
        file.write("once\n")


def ask(shelf: Path) -> None:
    assert (Shelf(shelf).get("thing", count)).is_dir()


def test_several_who_ask_at_once_get_what_one_of_them_has_made(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=ask, args=(tmp_path / "shelf",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert (tmp_path / "shelf" / "made").read_text() == "once\n"


def test_what_was_not_finished_is_made_anew(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shelf.get("thing", fail)
    assert list(shelf.get("thing", count).iterdir()) == []
